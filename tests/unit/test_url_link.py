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
from mcore_rl.types import EngineDied, Prompt, SamplingParams, StaleRollout

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

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer({"weight_version": self.server.version})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            return self._answer({"results": [{"pid": self.server.pid}]})
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
        data = json.dumps(content).encode()
        self.send_response(200)
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
