"""The link to a server, against a small HTTP server that answers, drops, hangs or leaves things out."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_url import UrlLink
from mcore_rl.types import EngineDied, Prompt, SamplingParams, StaleRollout, WeightMismatch

SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), samples_per_prompt=2, seed=5)
PROMPTS = [Prompt(f"p{i}", (1, 2, 10 + i), "", "") for i in range(3)]


class Server(ThreadingHTTPServer):
    """Samples the request's seed; `behave(number of times this body came, body)` may do something else first."""

    daemon_threads = True

    def __init__(self, behave=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave or (lambda count, body: None)
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.version = "0"
        self.pid = 7
        self.odd: dict[str, tuple[int, bytes, str]] = {}  # path -> status, body and content-encoding, instead of an answer

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path in self.server.odd:
            return self._send(*self.server.odd[self.path])
        return self._answer({"weight_version": self.server.version})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in self.server.odd:
            return self._send(*self.server.odd[self.path])
        if self.path == "/collective_rpc":
            return self._answer({"results": [{"pid": self.server.pid, "error": "", "active": True}]})
        if self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        if self.path != "/inference/v1/generate":
            return self._answer({})
        self.server.bodies.append(body)
        key = json.dumps(body, sort_keys=True)
        self.server.seen[key] += 1
        done = self.server.behave(self.server.seen[key], body)
        if done == "drop":
            return self.connection.close()
        return self._answer({"request_id": "r", "choices": [{**choice(body, self.server.version), **(done or {})}]})

    def _answer(self, content):
        self._send(200, json.dumps(content).encode())

    def _send(self, status, data, encoding=""):
        self.send_response(status)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet."""


def choice(body, version):
    token = body["sampling_params"]["seed"] % 1000
    logprobs = {"content": [{"logprob": -1.0}]}
    return {"token_ids": [token], "logprobs": logprobs, "finish_reason": "length", "weight_versions": [{"version": version}]}


@pytest.fixture
def serve():
    """serve(behave): an engine over a link to such a server, holding version 0."""
    started = []

    def start(behave=None, request_timeout_s=5.0):
        server = Server(behave)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
        link = UrlLink(server.url, start_timeout_s=5, request_timeout_s=request_timeout_s, max_connections=8)
        engine = VllmEngine(link, max_model_len=64)
        engine.attach("/dev/shm/none", 8)
        engine.commit(0)
        return server, engine

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_a_broken_connection_is_asked_again_and_the_answer_is_the_same(serve):
    _, calm = serve()
    server, engine = serve(lambda count, body: "drop" if count < 3 and body["token_ids"][2] == 11 else None)
    assert engine.generate(PROMPTS, SAMPLING) == calm.generate(PROMPTS, SAMPLING)
    assert sorted(server.seen.values()) == [1, 1, 1, 1, 3, 3]


def test_retries_are_capped(serve):
    server, engine = serve(lambda count, body: "drop" if body["token_ids"][2] == 11 else None)
    with pytest.raises(EngineDied, match="died or is unreachable during '/inference/v1/generate'"):
        engine.generate(PROMPTS, SAMPLING)
    assert max(server.seen.values()) == 3


def test_a_request_that_never_ends_is_named(serve):
    _, engine = serve(lambda count, body: time.sleep(3) if body["token_ids"][2] == 12 else None, request_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(EngineDied, match=r"did not answer request [45] of 6 \(3 prompt tokens\) of .* in 0\.5 s"):
        engine.generate(PROMPTS, SAMPLING)
    assert time.monotonic() - started < 2.5


def test_the_engine_is_asked_with_token_ids_and_a_seed_of_its_own_for_every_sample(serve):
    server, engine = serve()
    engine.generate(PROMPTS, SAMPLING)
    assert sorted(body["token_ids"] for body in server.bodies) == sorted(list(p.token_ids) for p in PROMPTS for _ in range(2))
    assert len({body["sampling_params"]["seed"] for body in server.bodies}) == 6
    assert all("prompt" not in body and "text" not in body for body in server.bodies)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ({"token_ids": None}, "p0/0: 0 tokens with 1 log-probs"),
        ({"token_ids": [], "text": "hello"}, "p0/0: 0 tokens with 1 log-probs"),
        ({"token_ids": [5, 6]}, "p0/0: 2 tokens with 1 log-probs"),
        ({"logprobs": None}, "p0/0: 1 tokens with 0 log-probs"),
        ({"logprobs": {"content": None}}, "p0/0: 1 tokens with 0 log-probs"),
        ({"finish_reason": "abort"}, "p0/0 ended with 'abort'"),
    ],
)
def test_what_is_missing_is_refused_and_never_made_up(serve, lost, message):
    _, engine = serve(lambda count, body: lost)
    with pytest.raises(EngineRefused, match=message):
        engine.generate(PROMPTS, SAMPLING)


def test_a_server_that_was_started_again_is_a_death_and_no_stale_answer(serve):
    """Somebody restarted it at the same address: it answers, with the weights it was started with."""
    server, engine = serve()
    server.version, server.pid = "initial", 8
    with pytest.raises(EngineDied, match="was started again: process 8 answers for 7"):
        engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(EngineDied, match="was started again"):
        engine.same_process()


def test_another_label_on_the_same_server_is_stale(serve):
    server, engine = serve()
    server.version = "9"
    with pytest.raises(StaleRollout, match=r"sampled with weights \['9'\], version 0 was proved"):
        engine.generate(PROMPTS, SAMPLING)


GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"
LOGPROBS = b'{"prompt_logprobs": [null, {"2": {"logprob": -1}}'
ODD = [
    (GENERATE, 502, b'{"error": "bad gateway"}', "HTTP 502: bad gateway"),
    (GENERATE, 502, b'{"error": null}', "HTTP 502: {'error': None}"),
    (GENERATE, 400, b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
    (GENERATE, 404, b"\xff\xfe{", "HTTP 404: "),
    (GENERATE, 302, b"", "HTTP 302: Found"),
    (GENERATE, 200, b"<html>hi", "status 200 with something that is no JSON: '<html>hi'"),
    (GENERATE, 200, b"\xff\xfe{", "status 200 with something that is no JSON"),
    (GENERATE, 200, b"{}", "request 0 of 1: 'prompt_logprobs' is missing in {}"),
    (GENERATE, 200, b"null", "request 0 of 1: 'prompt_logprobs' is missing in None"),
    (GENERATE, 200, LOGPROBS + b"]}", "'prompt_logprobs' has 2 entries for 3 tokens"),
    (GENERATE, 200, LOGPROBS + b', {"9": {"logprob": -1}}]}', "prompt_logprobs[2]: '3' is missing in {'9'"),
    (GENERATE, 200, LOGPROBS + b', {"3": {"logprob": null}}]}', "prompt_logprobs[2]: 'logprob' must be a number, not None"),
    ("/weight_info", 200, b"{}", "'weight_version' is missing in {}"),
    ("/weight_info", 200, b'{"weight_version": 3}', "'weight_version' must be a string, not 3"),
    (RPC, 200, b"{}", "'results' is missing in {}"),
    (RPC, 200, b"", "'results' is missing in None"),
    (RPC, 200, b'{"results": []}', "'mcore_status': 'results' is empty"),
    (RPC, 200, b'{"results": [null]}', "'mcore_status': a worker's result must be an object, not None"),
    (RPC, 200, b'{"results": [{}]}', "'mcore_status': 'names' is missing in {}"),
    ("/reset_prefix_cache", 200, b"{}", "'success' is missing in {}"),
    ("/reset_prefix_cache", 200, b'{"success": "false"}', "'success' must be true or false, not 'false'"),
]


@pytest.mark.parametrize(("path", "status", "body", "message"), ODD)
def test_an_odd_answer_is_refused_with_address_route_and_what_was_wrong(serve, path, status, body, message):
    server, engine = serve()
    server.odd[path] = (status, body, "")
    ask = {
        GENERATE: lambda: engine.score([[1, 2, 3]]),
        "/weight_info": lambda: engine.commit(3),
        RPC: lambda: engine.link.rpc("mcore_status", []),
        "/reset_prefix_cache": engine.reset_prefix_cache,
    }
    with pytest.raises(EngineRefused) as caught:
        ask[path]()
    assert server.url in str(caught.value)
    assert path in str(caught.value)
    assert message in str(caught.value)


def test_a_damaged_body_is_refused_and_keeps_its_reason(serve):
    server, engine = serve()
    server.odd[GENERATE] = server.odd["/update_weights"] = (200, b"no gzip", "gzip")
    with pytest.raises(EngineRefused, match=f"{server.url} .*{GENERATE}: an answer whose content-encoding is wrong: Error -3"):
        engine.score([[1, 2, 3]])
    server.odd[RPC] = (200, b"{}", "")
    with pytest.raises(WeightMismatch, match=f"{server.url} .*/update_weights: an answer whose content-encoding is wrong"):
        engine.load(0, [])


def test_a_weight_update_keeps_the_reason_of_a_server_that_answers_oddly(serve):
    server, engine = serve()
    server.odd["/update_weights"] = (500, b'{"error": "no space left"}', "")
    server.odd[RPC] = (200, b"{}", "")
    with pytest.raises(WeightMismatch, match="/update_weights: HTTP 500: no space left"):
        engine.load(0, [])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"logprobs": [-1.0]}, "'logprobs' must be an object, not [-1.0]"),
        ({"logprobs": {"content": [-1.0]}}, "'logprob' is missing in -1.0"),
        ({"token_ids": 5}, "'token_ids' must be a list, not 5"),
        ({"weight_versions": [{"version": 0}]}, "'version' must be a string, not 0"),
        ({"finish_reason": 1}, "'finish_reason' must be a string, not 1"),
    ],
)
def test_a_sample_of_another_form_is_refused_by_request_and_field(serve, odd, message):
    server, engine = serve(lambda count, body: odd if body["token_ids"][2] == 11 else None)
    with pytest.raises(EngineRefused) as caught:
        engine.generate(PROMPTS, SAMPLING)
    assert f"{GENERATE}: request 2 of 6: {message}" in str(caught.value)
    server.odd[GENERATE] = (200, b'{"request_id": "r", "choices": []}', "")
    with pytest.raises(EngineRefused, match="request 0 of 6: 'choices' is empty"):
        engine.generate(PROMPTS, SAMPLING)
