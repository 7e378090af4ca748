"""Routes of a batch on their way to this rank's rows, and back from the ranks that recorded them.

B sequences of the batch, T tokens of one packed row, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.types import TokenBatch
from models.router_policy import RoutingSums
from models.routes import Routes, route_dtype
from models.spec import ModelSpec
from parallel.layout import Coordinates, ParallelLayout
from parallel.packing import PackedMicroBatch


def expert_layers(spec: ModelSpec) -> tuple[int, ...]:
    """0-based numbers of the layers with experts."""
    return tuple(layer for layer in range(spec.num_layers) if spec.has_experts(layer))


def check_batch_routes(tokens: TokenBatch, spec: ModelSpec) -> None:
    """ValueError naming the sample whose routes are not those of this model: the same on every rank."""
    if tokens.routes is None:
        return
    if spec.moe is None:
        raise ValueError(f"the batch carries routes, but {spec.architecture} has no experts")
    layers = expert_layers(spec)
    for name, routes in zip(tokens.sample_ids, tokens.routes, strict=True):
        try:
            routes.check(layers, spec.moe.num_experts, spec.moe.top_k)
        except ValueError as failure:
            raise ValueError(f"sample {name}: {failure}") from failure


def row_routes(packed: PackedMicroBatch, routes: Sequence[Routes], part: Tensor, device: torch.device) -> Routes:
    """The routes of the row's tokens at `part` [T / cp]; padding is not known."""
    first = routes[0]
    experts = torch.zeros(packed.num_tokens, *first.experts.shape[1:], dtype=first.experts.dtype)
    known = torch.zeros(packed.num_tokens, dtype=torch.bool)
    for index, start, used in zip(packed.segments, packed.cu_seqlens.tolist(), packed.used, strict=False):
        if index >= 0:
            experts[start : start + used] = routes[index].experts
            known[start : start + used] = routes[index].known
    return Routes(first.layers, experts[part], known[part]).to(device)


def coverage(tokens: TokenBatch) -> tuple[int, int]:
    """Tokens that are replayed, and tokens of the batch."""
    known = sum(int(routes.known.sum()) for routes in tokens.routes or ())
    return known, sum(ids.numel() for ids in tokens.token_ids)


def check_replayed(sums: RoutingSums, tokens: TokenBatch, spec: ModelSpec) -> None:
    """RuntimeError unless every layer with experts replayed exactly the known tokens of the batch. sums: of all ranks."""
    expected, _ = coverage(tokens)
    for layer in expert_layers(spec):
        replayed = int(sums.replay_L4[layer, 0])
        if replayed != expected:
            raise RuntimeError(f"routing replay: layer {layer} replayed {replayed} tokens of {expected} with recorded routes")


class RouteTable:
    """Collects what the routers of all ranks recorded in one pass over a batch."""

    def __init__(
        self, tokens: TokenBatch, spec: ModelSpec, layout: ParallelLayout, at: Coordinates, device: torch.device
    ) -> None:
        """Nothing recorded yet. at: this rank's place. ValueError for a dense model."""
        if spec.moe is None:
            raise ValueError(f"routes of {spec.architecture}: it has no experts")
        self._layers = expert_layers(spec)
        self._lengths = [ids.numel() for ids in tokens.token_ids]
        self._parts, self._part = (layout.tp, at.tp) if layout.sp else (1, 0)
        # uint8 or int32: gloo sends no int16.
        self._dtype = route_dtype(spec.moe.num_experts)
        sent = torch.uint8 if self._dtype is torch.uint8 else torch.int32
        self._table = torch.zeros(sum(self._lengths), len(self._layers), spec.moe.top_k, dtype=sent, device=device)

    def put(self, rows: Mapping[int, tuple[PackedMicroBatch, Tensor]], taken: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Enter models.router.take_routes of this rank. rows: by number, the row and the tokens that this rank computed."""
        ends = torch.tensor(self._lengths).cumsum(0)
        places = [torch.arange(int(end) - length, int(end)) for end, length in zip(ends, self._lengths, strict=True)]
        for layer, of_row in taken.items():
            for number, experts in of_row.items():
                packed, part = rows[number]
                mine = self._mine(part.cpu())
                real = packed.real[mine]
                at = packed.pack(places)[mine[real]].to(self._table.device)
                self._table[at, self._layers.index(layer)] = experts[real.to(experts.device)].to(self._table.dtype)

    def _mine(self, part: Tensor) -> Tensor:
        """With sequence parallelism a tensor-parallel rank's routers see their slice of the row."""
        return part.chunk(self._parts)[self._part]

    def gather(self) -> tuple[Routes, ...]:
        """The whole batch's routes on every rank, every token known. Collective; each was put on exactly one rank."""
        dist.all_reduce(self._table)
        pieces = self._table.cpu().to(self._dtype).split(self._lengths)
        return tuple(Routes(self._layers, piece, torch.ones(len(piece), dtype=torch.bool)) for piece in pieces)
