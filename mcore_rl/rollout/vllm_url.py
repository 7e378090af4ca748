"""Link to a vLLM server somewhere else, over HTTP: token ids in, token ids out, weights by vLLM's own routes.

The server is not ours: this link never starts or stops it. `python -m mcore_rl.rollout.vllm_server` starts one that has
every route and extension needed here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.addresses import check_url, key_headers
from mcore_rl.rollout.answers import completion, done, field, prompt_logprobs, unfailed, worker_results
from mcore_rl.types import EngineDied

_GENERATE = "/inference/v1/generate"
_NATIVE = {
    "init": ("/init_weight_transfer_engine", "init_info"),
    "start": ("/start_weight_update", None),
    "update": ("/update_weights", "update_info"),
    "finish": ("/finish_weight_update", None),
}
_POLL_S = 0.5
_CONNECT_S = 5.0
_HEALTH_S = 10.0
_RETRIES = 2
_RETRY_S = 0.2


class UrlLink:
    """One server. Nothing is asked of it before `wait_ready`."""

    def __init__(self, url: str, *, start_timeout_s: float, request_timeout_s: float, max_connections: int) -> None:
        """url: http://host:port of the server. ValueError when it is no such thing, or neither loopback nor behind a key."""
        check_url(f"rollout.url={url}", url)
        self.name = f"vllm at {url} (log: where that server was started)"
        self._url = url.rstrip("/")
        self._start_timeout_s = start_timeout_s
        self._timeout = httpx.Timeout(request_timeout_s, connect=_CONNECT_S)
        # No connection is kept: the server drops idle ones and those of a failed request, which would look like its death.
        self._limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        # trust_env off: a proxy for the internet has no business between a run and its engine.
        self.headers = key_headers()
        self._client = httpx.Client(
            base_url=self._url, timeout=self._timeout, limits=self._limits, headers=self.headers, trust_env=False
        )
        self._ready = False

    def wait_ready(self) -> None:
        """Block until the server answers, then check that it has the routes and the extension a run needs.

        EngineDied when nobody answers in time; ValueError naming the missing setting.
        """
        if self._ready:
            return
        deadline = time.monotonic() + self._start_timeout_s
        while not self._answers():
            if time.monotonic() > deadline:
                raise EngineDied(f"rollout engine {self.name} did not answer within {self._start_timeout_s:.0f} s")
            time.sleep(_POLL_S)
        self._check_routes()
        self._ready = True

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Outputs in the order of the requests; all of them are in flight at once."""
        return [completion(where, answer) for where, answer in self._post_all(requests)]

    def score(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Log-prob of every prompt token after the first."""
        answers = zip(self._post_all(requests), requests, strict=True)
        return [prompt_logprobs(where, answer, request["token_ids"]) for (where, answer), request in answers]

    def native(self, step: str, payload: dict[str, Any]) -> None:
        """One call of the weight-transfer lifecycle."""
        path, key = _NATIVE[step]
        self._do(path, {key: payload} if key else {})

    def rpc(self, method: str, args: list[Any]) -> list[Any]:
        """A worker-extension call, one result per worker."""
        path = "/collective_rpc"
        return worker_results(self._at(path), self._do(path, {"method": method, "args": args}), method)

    def reset_prefix_cache(self) -> bool:
        """Whether the cache was emptied."""
        path = "/reset_prefix_cache"
        return field(self._at(path), self._post(path, {}), "success", bool)

    def set_version(self, version: str) -> None:
        """Label the weights."""
        self._do("/update_weight_version", {"new_version": version})

    def get_version(self) -> str:
        """The server's own label."""
        path = "/weight_info"
        return field(self._at(path), self._ask("GET", path, None), "weight_version", str)

    def sleep(self, level: int) -> None:
        """Give the server's GPU memory back."""
        self._do(f"/sleep?level={level}", {})

    def wake(self) -> None:
        """Take it again."""
        self._do("/wake_up", {})

    def health(self) -> None:
        """EngineDied when the server or the engine behind it does not answer."""
        if not self._answers():
            raise EngineDied(f"rollout engine {self.name} does not answer /health")

    def close(self) -> None:
        """Close the connections; the server stays."""
        self._client.close()

    def _answers(self) -> bool:
        try:
            return self._client.get("/health", timeout=_HEALTH_S).status_code == httpx.codes.OK
        except (httpx.TransportError, httpx.DecodingError):
            return False

    def _check_routes(self) -> None:
        for path, setting in (("/weight_info", "environment VLLM_SERVER_DEV_MODE=1"), (_GENERATE, "option --tokens-only")):
            # A GET of a POST route answers 405, so nothing is started by asking.
            if self._request("GET", path, None).status_code == httpx.codes.NOT_FOUND:
                raise ValueError(f"rollout.url: {self._url} has no route {path}: start the server with {setting}")
        try:
            self.rpc("mcore_layout", [])
        except EngineRefused as failure:
            raise ValueError(
                f"rollout.url: {self._url} lacks our worker extension or transport ({failure}): start the server with"
                " --worker-extension-cls mcore_rl.rollout.vllm_worker.WorkerExtension"
                ' --weight-transfer-config \'{"backend": "mcore_shm"}\''
            ) from failure

    def _do(self, path: str, body: dict[str, Any]) -> Any:
        content = self._post(path, body)
        done(self._at(path), content)
        return content

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        return self._content(path, self._request(method, path, body))

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.TransportError as failure:
            raise self._died(path, failure) from failure
        except httpx.DecodingError as failure:
            raise self._garbled(path, failure) from failure

    def _post_all(self, requests: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        """Per request: which it is, for messages, and its answer."""
        bodies = [{"token_ids": request["token_ids"], "sampling_params": request["sampling"]} for request in requests]
        try:
            responses = asyncio.run(self._gather(bodies))
        except httpx.TransportError as failure:
            raise self._died(_GENERATE, failure) from failure
        except httpx.DecodingError as failure:
            raise self._garbled(_GENERATE, failure) from failure
        which = (f"{self._at(_GENERATE)}: request {index} of {len(bodies)}" for index in range(len(bodies)))
        return [(where, self._content(_GENERATE, response)) for where, response in zip(which, responses, strict=True)]

    async def _gather(self, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        client = httpx.AsyncClient(
            base_url=self._url, timeout=self._timeout, limits=self._limits, headers=self.headers, trust_env=False
        )
        async with client:
            return await asyncio.gather(*(self._persist(client, index, bodies) for index in range(len(bodies))))

    async def _persist(self, client: httpx.AsyncClient, index: int, bodies: list[dict[str, Any]]) -> httpx.Response:
        """One request, asked again when its connection broke: its seed is in it, so the answer is the same."""
        for attempt in range(_RETRIES):
            try:
                return await client.post(_GENERATE, json=bodies[index])
            except httpx.TimeoutException as failure:
                which = f"request {index} of {len(bodies)} ({len(bodies[index]['token_ids'])} prompt tokens)"
                limit = self._timeout.read
                raise EngineDied(f"rollout engine {self.name} did not answer {which} of '{_GENERATE}' in {limit} s") from failure
            except httpx.TransportError:
                await asyncio.sleep(_RETRY_S * (attempt + 1))
        return await client.post(_GENERATE, json=bodies[index])

    def _content(self, path: str, response: httpx.Response) -> Any:
        if response.is_success:
            return self._checked(path, response)
        if response.is_server_error:
            self.health()
        raise EngineRefused(f"{self._at(path)}: HTTP {response.status_code}: {_reason(response)}")

    def _checked(self, path: str, response: httpx.Response) -> Any:
        """The content, None where there is none. A server may report a failure with status 200 (EngineRefused)."""
        try:
            body = response.json() if response.content else None
        except ValueError as failure:
            said = f"status {response.status_code} with something that is no JSON: {response.text[:300]!r}"
            raise EngineRefused(f"{self._at(path)}: {said}") from failure
        return unfailed(self._at(path), body)

    def _at(self, path: str) -> str:
        return f"{self.name}: {path}"

    def _garbled(self, path: str, failure: httpx.DecodingError) -> EngineRefused:
        return EngineRefused(f"{self._at(path)}: an answer whose content-encoding is wrong: {failure}")

    def _died(self, path: str, failure: httpx.TransportError) -> EngineDied:
        how = "did not answer in time" if isinstance(failure, httpx.TimeoutException) else "died or is unreachable"
        return EngineDied(f"rollout engine {self.name} {how} during '{path}': {type(failure).__name__}: {failure}")


def _reason(response: httpx.Response) -> str:
    """The server's own words: of {"error": {"message": ...}}, {"error": "..."}, any other JSON, or plain text."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:300] or response.reason_phrase
    error = body.get("error") if isinstance(body, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return str(said or body)[:1000]
