"""Which experts each scheduled token went to, collected in a vLLM worker that runs layer by layer (CPU, or eager).

vLLM's own `enable_return_routed_experts` needs its second model runner, which needs Triton; here the choice is read off
every router as it is made, and put to requests and positions by what the scheduler asked for in that step.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.routes import LARGEST_UINT8_EXPERTS


class RouteCapture:
    """Installed once in a worker's model runner. Rows are kept per request until they are taken."""

    def __init__(self, runner: Any) -> None:
        """Watch every router of the runner's model. ValueError where routes could not be told or trusted."""
        if runner.vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("routes cannot be captured with prefix caching: cached tokens are not routed again")
        if runner.vllm_config.parallel_config.enable_eplb:
            raise ValueError("routes cannot be captured with expert load balancing (EPLB)")
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter  # noqa: PLC0415

        self._runner = runner
        self._step: dict[int, Tensor] = {}
        self._rows: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._layers: dict[int, int] = {}
        self._num_experts = 0
        for module in runner.get_model().modules():
            router = getattr(module, "router", None)
            if isinstance(router, BaseRouter):
                self._watch(router, int(module.layer_id))
                self._layers[int(module.layer_id)] = router.top_k
                self._num_experts = max(self._num_experts, router.global_num_experts)
        if not self._num_experts:
            raise ValueError("routes cannot be captured: the engine's model has no routers")
        self._execute = runner.execute_model
        runner.execute_model = self._watched_execute

    def _watch(self, router: Any, layer: int) -> None:
        compute = router._compute_routing

        def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, experts = compute(*args, **kwargs)
            # Not in any order on the CPU: the heaviest first.
            self._step[layer] = experts.gather(1, weights.argsort(-1, descending=True))
            return weights, experts

        router._compute_routing = watched

    def _watched_execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.clear()
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        result = self._execute(scheduled, *args, **kwargs)
        if self._step:
            self._assign(scheduled.num_scheduled_tokens, starts)
        return result

    def _assign(self, counts: dict[str, int], starts: dict[str, int]) -> None:
        """Rows of a step lie request after request, in the order of the runner's own batch."""
        dtype = np.uint8 if self._num_experts <= LARGEST_UINT8_EXPERTS else np.int16
        table = torch.stack([self._step[layer] for layer in sorted(self._step)], dim=1).cpu().numpy().astype(dtype)
        at = 0
        for request in self._runner.input_batch.req_ids:
            count = counts.get(request, 0)
            if count:
                self._rows.setdefault(request, []).append((starts[request], table[at : at + count]))
                at += count
        if at != sum(counts.values()):
            raise RuntimeError(f"route capture: {at} of {sum(counts.values())} scheduled tokens belong to requests of the batch")

    def clear(self) -> None:
        """Forget what was collected."""
        self._rows = {}

    def take(self) -> dict[str, Any]:
        """Everything collected since the last call, cleared: layers, top_k, wide, and per request id its experts and gaps.

        vLLM appends 8 random characters to an id; here it is the caller's own.
        """
        requests = {name.rpartition("-")[0]: _merged(rows) for name, rows in self._rows.items()}
        self.clear()
        head = {"layers": sorted(self._layers), "top_k": max(self._layers.values())}
        return {**head, "wide": self._num_experts > LARGEST_UINT8_EXPERTS, "requests": requests}


def _merged(rows: list[tuple[int, np.ndarray]]) -> dict[str, Any]:
    """Rows by position; a later row replaces an earlier one (a preempted request is computed again)."""
    total = max(start + len(piece) for start, piece in rows)
    table = np.zeros((total, *rows[0][1].shape[1:]), dtype=rows[0][1].dtype)
    known = np.zeros(total, dtype=bool)
    for start, piece in rows:
        table[start : start + len(piece)] = piece
        known[start : start + len(piece)] = True
    return {"experts": base64.b64encode(table.tobytes()).decode("ascii"), "missing": np.flatnonzero(~known).tolist()}
