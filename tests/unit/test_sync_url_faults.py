"""What a server may answer to a weight update, good and bad, without a server."""

from __future__ import annotations

import time

import httpx
import pytest
from fault_table import record

from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.vllm_url import UrlLink
from mcore_rl.types import EngineDied


def link_to(answer):
    link = UrlLink("http://127.0.0.1:9", start_timeout_s=1, request_timeout_s=1, max_connections=1)
    link._client = httpx.Client(base_url="http://127.0.0.1:9", transport=httpx.MockTransport(answer))
    return link


def fails(name, answer, kind, message):
    started = time.perf_counter()
    with pytest.raises(kind, match=message):
        link_to(answer).native("update", {"slot": 0, "tensors": []})
    record(f"server: {name}", "answer", time.perf_counter() - started)


def test_an_error_with_status_200_is_an_error():
    body = {"error": {"message": "CUDA out of memory", "code": 500}}
    fails("error body with status 200", lambda request: httpx.Response(200, json=body), EngineRefused, "CUDA out of memory")


FAILED = {
    "success false": {"success": False},
    "success false in words": {"success": "false", "message": "no memory"},
    "status error": {"status": "error", "message": "no memory"},
    "status Failed": {"status": "Failed"},
    "an error in a word": {"error": "no memory"},
}
CALLS = {
    "/init_weight_transfer_engine": lambda link: link.native("init", {}),
    "/start_weight_update": lambda link: link.native("start", {}),
    "/update_weights": lambda link: link.native("update", {"slot": 0, "tensors": []}),
    "/finish_weight_update": lambda link: link.native("finish", {}),
    "/update_weight_version": lambda link: link.set_version("3"),
    "/collective_rpc": lambda link: link.rpc("mcore_outcome", ["start"]),
    "/sleep": lambda link: link.sleep(1),
    "/wake_up": lambda link: link.wake(),
}


@pytest.mark.parametrize("said", FAILED)
@pytest.mark.parametrize("route", CALLS)
def test_an_answer_that_says_it_failed_is_a_refusal_of_that_route(route, said):
    body = {"results": [{}], **FAILED[said]}
    with pytest.raises(EngineRefused, match=f"vllm at http://127.0.0.1:9 .*: {route}[^:]*: status 200 (and says|with an error)"):
        CALLS[route](link_to(lambda request: httpx.Response(200, json=body)))


GOOD = [{"message": "Weights updated"}, {"success": True, "new_version": "3"}, {"status": "ok"}, {"error": None}]


@pytest.mark.parametrize("body", GOOD, ids=str)
def test_an_answer_that_says_it_worked_is_taken(body):
    for route, call in CALLS.items():
        call(link_to(lambda request, route=route: httpx.Response(200, json={"results": [{}], **body})))


def test_a_cache_that_was_not_emptied_is_an_answer_and_no_refusal():
    assert link_to(lambda request: httpx.Response(200, json={"success": False})).reset_prefix_cache() is False


def test_a_refusal_is_quoted():
    body = {"error": {"message": "no such weight"}}
    fails("HTTP 400", lambda request: httpx.Response(400, json=body), EngineRefused, "HTTP 400: no such weight")


def test_a_server_error_with_the_engine_gone_is_a_death():
    fails("HTTP 500 and dead", lambda request: httpx.Response(500, text="gone"), EngineDied, "does not answer /health")


def test_no_answer_in_time_is_a_death():
    def late(request):
        raise httpx.ReadTimeout("late", request=request)

    fails("no answer in time", late, EngineDied, "did not answer in time during '/update_weights'")


def test_a_good_answer_is_passed_on():
    link = link_to(lambda request: httpx.Response(200, json={"weight_version": "3"}))
    assert link.get_version() == "3"
