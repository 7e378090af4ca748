"""The engine's side of a weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SyncEndpoint(Protocol):
    """Implemented by rollout.vllm_engine.VllmEngine. Every call may raise EngineDied; refusals are WeightMismatch."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def wait_ready(self) -> None:
        """Block until the engine has started."""
        ...

    def layout(self) -> dict[str, dict[str, Any]]:
        """HF name -> {shape, regions}: what the engine's model is made of."""
        ...

    def attach(self, path: str, slot_bytes: int) -> None:
        """Map the segment the buckets will be in."""
        ...

    def begin(self) -> None:
        """Open an update; from here the engine has no version."""
        ...

    def load(self, slot: int, tensors: list[list[Any]]) -> None:
        """Load one bucket; returns when nothing reads the slot any more."""
        ...

    def finish(self) -> list[str]:
        """Close the update; returns the names received."""
        ...

    def abort(self) -> None:
        """End an update that failed; the engine stays without a version."""
        ...

    def readback(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Digests of what the engine computes with."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop keys and values of the old weights."""
        ...

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats) of every token after the first."""
        ...

    def commit(self, version: int) -> None:
        """Set the proved version and read it back."""
        ...
