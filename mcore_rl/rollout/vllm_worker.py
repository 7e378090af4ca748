"""Worker extension: what the trainer may ask of each vLLM worker, beyond vLLM's own API.

Given to vLLM as `worker_extension_cls`; vLLM imports it in every worker process before the model is loaded, which is
also what registers the `mcore_shm` transport. Arguments and results are plain builtins, so the same calls work through
a pipe and through HTTP. Never imports Megatron.

What is asked in the middle of a run does not raise (see vllm_transfer). `mcore_layout`, which is asked first, does: an
engine that cannot answer it has to be started in another way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import vllm

from mcore_rl.rollout.lifeline import follow_root
from mcore_rl.rollout.vllm_facts import engine_facts
from mcore_rl.rollout.vllm_readback import read_digests
from mcore_rl.rollout.vllm_routes import RouteCapture
from mcore_rl.rollout.vllm_transfer import ShmTransferEngine, refusal_of, register

register()
follow_root()

P = ParamSpec("P")
S = TypeVar("S")
Method = Callable[Concatenate[S, P], dict[str, Any]]


def answered(method: Method[S, P]) -> Method[S, P]:
    """A method that answers {"mcore_refused": reason} in place of raising a refusal."""

    @wraps(method)
    def answer(self: S, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        found: dict[str, Any] = {}
        reason = refusal_of(lambda: found.update(method(self, *args, **kwargs)))
        return {"mcore_refused": reason} if reason else found

    return answer


class WorkerExtension:
    """Mixed into vLLM's worker class; every public name starts with mcore_."""

    _mcore_routes: RouteCapture | None = None

    def mcore_info(self) -> dict[str, Any]:
        """Which process this is and what it runs on."""
        return {
            "pid": os.getpid(),
            "vllm": vllm.__version__,
            "torch": str(torch.__version__),  # a subclass of str, which no wire takes
            "threads": torch.get_num_threads(),
            "megatron": any(name.split(".")[0] == "megatron" for name in sys.modules),
            "cpu_megatron": "parallel.cpu_megatron" in sys.modules,
        }

    @answered
    def mcore_facts(self) -> dict[str, Any]:
        """What model this is, for the comparison with the trainer's."""
        return engine_facts(self._mcore_engine().model, self.vllm_config)  # pyright: ignore[reportAttributeAccessIssue]

    def mcore_layout(self) -> dict[str, Any]:
        """HF name -> full shape and the regions this worker holds, as the engine's model defines them."""
        return {
            name: {"shape": list(entry.shape), "regions": [piece.region.as_json() for piece in entry.pieces]}
            for name, entry in self._mcore_engine().layout.items()
        }

    @answered
    def mcore_readback(self, names: list[str]) -> dict[str, list[str]]:
        """HF name -> digest per region of what the kernels compute with."""
        engine = self._mcore_engine()
        return read_digests(engine.model, engine.layout, names)

    def mcore_status(self) -> dict[str, Any]:
        """What the current or last update received, and why it was refused if it was."""
        engine = self._mcore_engine()
        return {
            "names": engine.received.names,
            "parameters": len(engine.received.parameters),
            "error": engine.last_error,
            "active": self._weight_update_active,
        }

    def mcore_outcome(self, step: str) -> dict[str, Any]:
        """Why this worker refused a step of the lifecycle ("" when it did not), and whether an update is open."""
        engine = self._mcore_engine()
        return {"error": engine.init_error if step == "init" else engine.last_error, "active": self._weight_update_active}

    @answered
    def mcore_abort(self) -> dict[str, Any]:
        """End an update that will not finish; the next one starts clean."""
        engine = self._mcore_engine()
        engine.abort()
        engine.reset_weight_update_target()
        self._weight_update_active = False
        self._mcore_forget_tokens()
        return {"aborted": True}

    def _mcore_forget_tokens(self) -> None:
        """Zero the keys and values of the abandoned weights: attention on the CPU multiplies unused ones by 0, NaN too."""
        for layer in self.model_runner.kv_caches:  # pyright: ignore[reportAttributeAccessIssue]
            for cache in layer if isinstance(layer, list | tuple) else (layer,):
                cache.zero_()

    def mcore_capture_routes(self) -> dict[str, Any]:
        """Keep the experts of every scheduled token from now on, until they are taken; see vllm_routes."""
        if self._mcore_routes is None:
            self._mcore_routes = RouteCapture(self.model_runner)  # pyright: ignore[reportAttributeAccessIssue]
        self._mcore_routes.clear()
        return {"capturing": True}

    def mcore_take_routes(self) -> dict[str, Any]:
        """Routes by request id since the last call; of no request when they are not captured, which the trainer refuses."""
        if self._mcore_routes is None:
            return {"layers": [], "top_k": 0, "wide": False, "requests": {}}
        return self._mcore_routes.take()

    def _mcore_engine(self) -> ShmTransferEngine:
        engine = self.weight_transfer_engine  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(engine, ShmTransferEngine):
            raise RuntimeError(f"the engine's weight transport is {type(engine).__name__}; start it with backend mcore_shm")
        return engine
