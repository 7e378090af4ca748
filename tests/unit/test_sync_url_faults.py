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
