"""What an engine must be able to do for the trainer, however it is reached: a pipe to a child or HTTP to a server."""

from __future__ import annotations

from typing import Any, Protocol


class EngineLink(Protocol):
    """Plain builtins in and out. Every call raises EngineDied when the engine is gone, EngineRefused when it says no."""

    name: str

    def wait_ready(self) -> None:
        """Block until the engine answers."""
        ...

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Per request {token_ids, sampling}: {id, token_ids, logprobs, finish_reason, versions, routed_experts}."""
        ...

    def score(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Per request: log-probs (nats) of its token_ids after the first."""
        ...

    def native(self, step: str, payload: dict[str, Any]) -> None:
        """One call of vLLM's weight-transfer lifecycle: init, start, update or finish."""
        ...

    def rpc(self, method: str, args: list[Any]) -> list[Any]:
        """A worker-extension method on every worker; one result per worker."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Whether the cache was emptied."""
        ...

    def set_version(self, version: str) -> None:
        """Label the weights; every output echoes the label."""
        ...

    def get_version(self) -> str:
        """The label in force."""
        ...

    def sleep(self, level: int) -> None:
        """Give the GPU memory back (rollout.sleep)."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...

    def health(self) -> None:
        """EngineDied when it does not answer."""
        ...

    def close(self) -> None:
        """Stop what this link started."""
        ...
