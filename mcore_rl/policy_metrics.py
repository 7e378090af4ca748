"""Global numbers of one update: what each rank counted, added up over the ranks that hold the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.algorithms.loss_stats import LossStats
from mcore_rl.types import RoutingLayer
from models.router_policy import RoutingSums


@dataclass
class UpdateSums:
    """This rank's share of an update's loss, the loss function's statistics, trained tokens and summed entropy (nats)."""

    loss: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    stats: LossStats = field(default_factory=LossStats)

    def add(self, loss: Tensor, mask: Tensor, entropy: Tensor, stats: LossStats) -> None:
        """Enter one row: its summed loss, trained tokens, [T] entropies and statistics."""
        self.loss += float(loss.detach())
        self.tokens += float(mask.sum())
        self.entropy += float(entropy.detach().double().sum())
        self.stats = self.stats.merge(stats)

    def reduced(self, device: torch.device) -> UpdateSums:
        """Added up over all ranks. Collective over the default group; ranks without the loss hold zeros."""
        mine = [self.loss, self.tokens, self.entropy, *self.stats.sums()]
        sums = torch.tensor(mine, dtype=torch.float64, device=device)
        ends = torch.tensor(self.stats.extremes(), dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        loss, tokens, entropy, *rest = sums.tolist()
        return UpdateSums(loss, tokens, entropy, LossStats.from_parts(rest, ends.tolist()))

    def metrics(self) -> dict[str, float]:
        """Names as they are logged."""
        entropy = self.entropy / self.tokens if self.tokens else math.nan
        return {"loss": self.loss, "tokens": self.tokens, "policy_entropy_nats": entropy, **self.stats.metrics()}


def routing_layers(sums: RoutingSums) -> tuple[RoutingLayer, ...]:
    """Per-layer means from global sums; layers without a token have NaN means."""
    return tuple(_layer(sums, row) for row in range(len(sums.layers)))


def _layer(sums: RoutingSums, row: int) -> RoutingLayer:
    tokens = float(sums.tokens_L[row])
    load = [float(count) for count in sums.load_LE[row]]
    mean = sum(load) / len(load)
    replayed, compared, flips, jaccard = (float(value) for value in sums.replay_L4[row])
    return RoutingLayer(
        layer=sums.layers[row],
        tokens=int(tokens),
        router_entropy_nats=float(sums.entropy_L[row]) / tokens if tokens else math.nan,
        load_E=tuple(load),
        max_over_mean_load=max(load) / mean if mean else math.nan,
        dead_experts=sum(count == 0 for count in load),
        topk_margin=float(sums.margin_L[row]) / tokens if tokens else math.nan,
        replayed_tokens=int(replayed),
        top1_flip=flips / compared if compared else math.nan,
        topk_jaccard=jaccard / compared if compared else math.nan,
    )
