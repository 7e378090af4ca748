"""The process an owned engine lives in: one vLLM `LLM` behind a pipe of JSON messages.

Started by vllm_owned in a fresh interpreter (`python -m mcore_rl.rollout.vllm_child`), so nothing that happened in the
trainer's process reaches it: no Megatron, no CPU patches, no process group. It ends with its parent.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from mcore_rl.guard import die_with_parent
from mcore_rl.rollout.lifeline import become_root

REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What vLLM and the extension say no with. Anything stranger ends the process."""


class Engine:
    """The operations the parent may ask for; arguments and results are JSON."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Build the LLM; vllm is imported here, after the process has been tied to its parent."""
        import vllm  # noqa: PLC0415 - seconds of import, and only this process pays them

        self._vllm = vllm
        self._llm = vllm.LLM(**arguments)

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One output per request: ids, the sampled tokens' log-probs, finish reason, weight versions."""
        outputs = self._run(requests)
        return [{"id": output.request_id, **_completion(output.outputs[0])} for output in outputs]

    def score(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Log-prob of every prompt token after the first."""
        outputs = self._run(requests)
        return [
            [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], request["token_ids"][1:], strict=True)]
            for output, request in zip(outputs, requests, strict=True)
        ]

    def top_logprobs(self, requests: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Of every prompt token from the request's `start` on: the K likeliest ids, likeliest first, and their log-probs.

        K is the request's prompt_logprobs; [n, K] arrays, int32 and float32.
        """
        outputs = self._run(requests)
        return [_top(output.prompt_logprobs, request) for output, request in zip(outputs, requests, strict=True)]

    def native(self, step: str, payload: dict[str, Any]) -> None:
        """One call of vLLM's weight-transfer lifecycle."""
        if step == "init":
            self._llm.init_weight_transfer_engine({"init_info": payload})
        elif step == "start":
            self._llm.start_weight_update()
        elif step == "update":
            self._llm.update_weights({"update_info": payload})
        else:
            self._llm.finish_weight_update()

    def rpc(self, method: str, args: list[Any]) -> list[Any]:
        """A method of the worker extension, on every worker."""
        return self._llm.collective_rpc(method, args=tuple(args))

    def reset_prefix_cache(self) -> bool:
        """Whether the cache really was emptied."""
        return bool(self._llm.reset_prefix_cache())

    def set_version(self, version: str) -> None:
        """Label of the weights, echoed on every output."""
        self._llm.update_weight_version(version)

    def get_version(self) -> str:
        """The label in force."""
        return self._llm.get_weight_version()

    def sleep(self, level: int) -> None:
        """Give the GPU memory back; the weights stay in host memory at level 1 and are dropped at level 2."""
        self._llm.sleep(level=level)

    def wake(self) -> None:
        """Take the memory again."""
        self._llm.wake_up()

    def ping(self) -> bool:
        """Answer at all."""
        return True

    def _run(self, requests: list[dict[str, Any]]) -> list[Any]:
        prompts: Any = [{"prompt_token_ids": request["token_ids"]} for request in requests]
        sampling = [self._vllm.SamplingParams(**request["sampling"]) for request in requests]
        return self._llm.generate(prompts, sampling, use_tqdm=False)


def _top(rows: Any, request: dict[str, Any]) -> dict[str, str]:
    import numpy as np  # noqa: PLC0415 - of the engine's process alone

    count = request["sampling"]["prompt_logprobs"]
    ranked = [sorted(row.items(), key=lambda pair: pair[1].rank)[:count] for row in rows[request["start"] :]]
    ids = np.array([[token for token, _ in row] for row in ranked], dtype=np.int32)
    logprobs = np.array([[found.logprob for _, found in row] for row in ranked], dtype=np.float32)
    return {"ids": _npy(ids), "logprobs": _npy(logprobs)}


def _completion(output: Any) -> dict[str, Any]:
    token_ids = list(output.token_ids)
    return {
        "token_ids": token_ids,
        "logprobs": [row[token].logprob for row, token in zip(output.logprobs, token_ids, strict=True)],
        "finish_reason": output.finish_reason,
        "versions": sorted({span.version for span in output.weight_versions or []}),
        "routed_experts": None if output.routed_experts is None else _npy(output.routed_experts),
    }


def _npy(array: Any) -> str:
    """base64 of a .npy file, as vLLM's server sends arrays."""
    import numpy as np  # noqa: PLC0415 - of the engine's process alone

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def serve(pipe: Connection, engine: Engine) -> None:
    """Answer until the parent says `close` or is gone."""
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        if message["op"] == "close":
            return
        pipe.send_bytes(json.dumps(_answer(engine, message)).encode())


def _answer(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    """The result, or what was refused and why. What is no refusal ends the process, which the parent reports as a death."""
    try:
        return {"result": vars(Engine)[message["op"]](engine, *message["args"])}
    except REFUSALS as failure:
        traceback.print_exc()
        return {"error": str(failure), "kind": type(failure).__name__}


def main(argv: list[str]) -> int:
    """argv: file descriptor of the pipe, pid of the parent, JSON of vLLM's arguments."""
    descriptor, parent, arguments = int(argv[0]), int(argv[1]), json.loads(argv[2])
    os.set_inheritable(descriptor, False)
    die_with_parent(parent)
    become_root()
    pipe = Connection(descriptor)
    started = time.monotonic()
    engine = Engine(arguments)
    pipe.send_bytes(json.dumps({"result": {"pid": os.getpid(), "start_s": time.monotonic() - started}}).encode())
    serve(pipe, engine)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
