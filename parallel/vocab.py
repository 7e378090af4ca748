"""Log-probs of given tokens and entropy from hidden states, under a vocabulary split over tensor-parallel ranks.

The output layer is applied to one tile of tokens x vocabulary at a time, in forward and again in backward, so [T, V] logits
never exist. Softmax is fp32 and exact: sums are carried from tile to tile under a running maximum, padded vocabulary rows
take no part, and each shard gets its whole gradient whether or not it holds the target. Values and gradients do not depend
on the tile.

T tokens, M targets of a token, V full vocabulary, W rows of this rank's shard (V padded, over tp), H hidden size; c tokens
and r rows of a tile. `tp_group` None or of size 1 means the shard is the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

TILE_TOKENS, TILE_ROWS = 4096, 8064
"""One fp32 tile of 126 MiB: many tokens, because a matrix product of few is slow; rows of it that are no power of two apart,
which would fall into the same sets of the cache (8192: the product takes 8% longer)."""
PIECE_ELEMENTS = 2**19
"""What the element-wise steps take of a tile at once on a CPU: 2 MiB stay in its cache."""
NO_MAXIMUM = -torch.inf
"""Of a shard without a valid row, and before the first tile."""


@dataclass(frozen=True)
class VocabShard:
    """Which vocabulary rows this rank holds: rows [start, start + valid), then padding that never counts."""

    start: int
    valid: int
    group: dist.ProcessGroup | None

    @property
    def split(self) -> bool:
        """Whether other ranks hold rows too."""
        return self.group is not None and self.group.size() > 1


@dataclass(frozen=True)
class Readout:
    """How scores become probabilities: temperature divides the logits, once, for log-prob, entropy and gradient."""

    vocab_size: int
    tp_group: dist.ProcessGroup | None = None
    temperature: float = 1.0
    tile_tokens: int = TILE_TOKENS
    tile_rows: int = TILE_ROWS

    def __post_init__(self) -> None:
        """Refuse a temperature that is no positive number, or an empty vocabulary (ValueError)."""
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: a positive number is needed")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size}: at least 1 is needed")

    def shard(self, rows: int) -> VocabShard:
        """The shard of a rank that holds `rows` rows; ValueError if all ranks hold fewer than `vocab_size`."""
        ranks, rank = (1, 0) if self.tp_group is None else (self.tp_group.size(), self.tp_group.rank())
        if rows * ranks < self.vocab_size:
            raise ValueError(f"{ranks} vocabulary shards of {rows} rows cannot hold vocab_size={self.vocab_size}")
        start = rank * rows
        return VocabShard(start, min(max(self.vocab_size - start, 0), rows), self.tp_group)

    def tiles(self, tokens: int, rows: int) -> Iterator[tuple[slice, slice]]:
        """(tokens, rows) of every tile of [tokens, rows] scores."""
        for cut in cuts(tokens, self.tile_tokens):
            for band in cuts(rows, self.tile_rows):
                yield cut, band


def cuts(length: int, step: int) -> list[slice]:
    """Consecutive runs of at most `step`."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def linear_logprob_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy, nats, fp32 [T] each, both with their gradient.

    hidden: [T, H], equal on all tp ranks; weight: this rank's output weight [W, H]. The gradient of `hidden` is summed
    over tp ranks here, so it is whole on each of them; that of the weight is accumulated in fp32. ValueError for a target
    outside the vocabulary, or not one target row per token.
    """
    logprobs, entropy = linear_logprobs_entropy(hidden, weight, targets[:, None], readout)
    return logprobs[:, 0], entropy


def linear_logprobs_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """Log-probs of several `targets` [T, M] of each token, fp32 [T, M], and entropy [T]; otherwise as for one."""
    if hidden.shape[:1] != targets.shape[:1]:
        raise ValueError(f"targets {list(targets.shape)} for hidden states {list(hidden.shape)}: one row per token is needed")
    if targets.numel():
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= readout.vocab_size:
            raise ValueError(f"target {low if low < 0 else high} is outside the vocabulary of {readout.vocab_size}")
    return _Readout.apply(hidden, weight, targets, readout)


@dataclass
class _Sums:
    """Per token over this shard: maximum m, sum e^(l-m), sum e^(l-m) (l-m), logits of the M targets (0 if not held)."""

    values: Tensor

    @classmethod
    def empty(cls, targets: Tensor) -> _Sums:
        tokens, count = targets.shape
        values = torch.zeros(3 + count, tokens, dtype=torch.float32, device=targets.device)
        values[0] = NO_MAXIMUM
        return cls(values)

    def add(self, place: slice, scores: Tensor, local: Tensor) -> None:
        """Enter scores [c, r] of tokens `place`, overwritten; local target columns [c, M] (out of range: not held)."""
        top, total, weighted = self.values[:3, place]
        highest = torch.maximum(top, scores.amax(dim=1))
        gap = top - highest
        scale = gap.exp()
        held, column = _held(local, scores.shape[1])
        self.values[3:, place] += torch.where(held, scores.gather(1, column), 0.0).T
        shifted = scores.sub_(highest[:, None])
        weights = shifted.exp()
        self.values[2, place] = scale * (weighted + _moved(gap, total)) + shifted.mul_(weights).sum(dim=1)
        self.values[1, place] = scale * total + weights.sum(dim=1)
        self.values[0, place] = highest

    def finish(self, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [T, M], entropy, and log-sum-exp over the whole vocabulary in two parts [2, T], maximum and the rest.

        Their sum would round the rest to the last bit of a large maximum.
        """
        top, total, weighted, *targets = _over_ranks(self.values, shard.group) if shard.split else self.values
        log_total = total.log()
        logprobs = (torch.stack(targets, 1) - top[:, None]) - log_total[:, None]
        return logprobs, log_total - weighted / total, torch.stack([top, log_total])


def _moved(gap: Tensor, total: Tensor) -> Tensor:
    """gap x total, 0 where there is nothing yet: the gap is infinite there."""
    return torch.where(total > 0, gap * total, 0.0)


def _pieces(scores: Tensor) -> list[slice]:
    tokens, rows = scores.shape
    return cuts(tokens, tokens if scores.is_cuda else max(1, PIECE_ELEMENTS // rows))


def _held(local: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in a shard of `rows` rows, and their columns there (0 for the others)."""
    held = (local >= 0) & (local < rows)
    return held, torch.where(held, local, 0)


def _over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Bring every shard's sums to the common maximum and add them up."""
    top = values[0].clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    gap = values[0] - top
    scale = gap.exp()
    sums = torch.cat([torch.stack([scale * values[1], scale * (values[2] + _moved(gap, values[1]))]), values[3:]])
    dist.all_reduce(sums, group=group)
    return torch.cat([top[None], sums])


@dataclass(frozen=True)
class _Upstream:
    """Per token: log-sum-exp in two parts [2, T], entropy [T], gradient of log-probs [T, M] and of entropy (or None)."""

    lse: Tensor
    entropy: Tensor
    to_logprobs: Tensor
    to_entropy: Tensor | None

    def to_scores(self, place: slice, scores: Tensor, local: Tensor) -> None:
        """Turn scores [c, r] of tokens `place` into their gradient: sum over targets of g (onehot - p), - h p (log p + H)."""
        given = self.to_logprobs[place]
        log_p = scores.sub_(self.lse[0, place, None]).sub_(self.lse[1, place, None])
        spread = given.sum(1, keepdim=True)
        if self.to_entropy is None:
            log_p.exp_().mul_(-spread)
        else:
            p = log_p.exp()
            log_p.add_(self.entropy[place, None]).mul_(self.to_entropy[place, None]).add_(spread).mul_(p).neg_()
        held, column = _held(local, scores.shape[1])
        scores.scatter_add_(1, column, torch.where(held, given, 0.0))


class _Tile:
    """Memory of one tile of scores, written again for every tile."""

    def __init__(self, hidden: Tensor, rows: Tensor, readout: Readout) -> None:
        tokens, words = min(readout.tile_tokens, len(hidden)), min(readout.tile_rows, len(rows))
        self._memory = torch.empty(tokens * words, dtype=torch.float32, device=hidden.device)
        self._temperature = readout.temperature

    def scores(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Scores [c, r] in fp32, from factors of any dtype."""
        shape = len(hidden), len(rows)
        out = self._memory[: shape[0] * shape[1]].view(shape)
        if hidden.dtype is torch.float32:
            torch.mm(hidden, rows.T, out=out)
        else:
            out.copy_(hidden @ rows.T)
        return out if self._temperature == 1.0 else out.div_(self._temperature)


class _Readout(Function):
    """Keeps three numbers per token between the passes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
        shard, sums = readout.shard(weight.shape[0]), _Sums.empty(targets)
        rows = weight[: shard.valid]
        tile = _Tile(hidden, rows, readout)
        for cut, band in readout.tiles(len(targets), len(rows)):
            scores, local = tile.scores(hidden[cut], rows[band]), targets[cut] - shard.start - band.start
            for piece in _pieces(scores):
                sums.add(slice(cut.start + piece.start, cut.start + piece.stop), scores[piece], local[piece])
        logprobs, entropy, lse = sums.finish(shard)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.readout, ctx.shard = readout, shard
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        readout, shard = ctx.readout, ctx.shard
        to_logprobs, to_entropy = (None if grad is None else grad.float() / readout.temperature for grad in grad_outputs)
        if to_logprobs is None:
            to_logprobs = torch.zeros(targets.shape, dtype=lse.dtype, device=lse.device)
        if to_entropy is not None and not to_entropy.any():
            to_entropy = None
        upstream, rows = _Upstream(lse, entropy, to_logprobs, to_entropy), weight[: shard.valid]
        to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        tile = _Tile(hidden, rows, readout)
        for cut, band in readout.tiles(len(targets), len(rows)):
            scores, local = tile.scores(hidden[cut], rows[band]), targets[cut] - shard.start - band.start
            for piece in _pieces(scores):
                upstream.to_scores(slice(cut.start + piece.start, cut.start + piece.stop), scores[piece], local[piece])
            grad = scores.to(hidden.dtype)
            _add_product(to_hidden[cut], grad, rows[band])
            _add_product(to_weight[band], grad.T, hidden[cut])
        if shard.split:
            dist.all_reduce(to_hidden, group=shard.group)
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, added up in fp32 whatever the dtype of the factors."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
