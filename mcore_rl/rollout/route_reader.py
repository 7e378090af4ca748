"""Routes of an engine's completions, whichever way the engine records them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.link import EngineLink
from mcore_rl.routes import EncodedRoutes


class RouteReader:
    """native: vLLM's own enable_return_routed_experts (GPU), with each output. Otherwise our worker extension records."""

    def __init__(self, link: EngineLink, *, native: bool) -> None:
        """Nothing is asked of the engine yet."""
        self._link = link
        self._native = native

    def begin(self) -> None:
        """Before a generation: nothing older is left in the engine. Also after a restart of the engine."""
        if not self._native:
            self._link.rpc("mcore_capture_routes", [])

    def collect(self, outputs: Sequence[Mapping[str, Any]]) -> list[EncodedRoutes]:
        """One per output. EngineRefused when the engine has none for one of them."""
        if self._native:
            return [from_array(output["id"], output["routed_experts"]) for output in outputs]
        taken = self._link.rpc("mcore_take_routes", [])[0]  # tensor-parallel workers route alike
        lost = [output["id"] for output in outputs if output["id"] not in taken["requests"]]
        if lost:
            raise EngineRefused(f"{self._link.name}: no routes of {len(lost)} of {len(outputs)} requests, first {lost[0]}")
        return [EncodedRoutes.from_answer(taken, taken["requests"][output["id"]]) for output in outputs]


def from_array(request: str, array: str | None) -> EncodedRoutes:
    """vLLM's [tokens, all layers, top_k], as base64 of a .npy file; layers without experts hold zeros. EngineRefused if lost."""
    if array is None:
        raise EngineRefused(f"request {request}: no routed experts; start the engine with enable_return_routed_experts")
    experts = read_array(array)
    wide = experts.dtype != np.uint8
    layers, top_k = experts.shape[1:]
    data = experts.astype("<i2" if wide else np.uint8).tobytes()
    return EncodedRoutes(tuple(range(layers)), top_k, wide, data)


def read_array(text: str) -> np.ndarray:
    """An array from the base64 of its .npy file, as engines send it; nothing is unpickled."""
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
