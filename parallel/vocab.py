"""Log-prob and entropy of given tokens under a vocabulary that is split over tensor-parallel ranks.

Everything is fp32, in chunks of tokens, and exact: no [T, V] copy is made, the input is never written to, padded
vocabulary rows take no part, and the gradient is softmax - onehot on every shard whether or not it holds the target.
Two forms: from logits, and from hidden states and the output weight, where [T, V] logits never exist.

T tokens, V full vocabulary, W rows of this rank's shard (V padded, over tp), H hidden size.
`tp_group` None or of size 1 means the shard is the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK_TOKENS = 512
NO_MAXIMUM = torch.finfo(torch.float32).min / 4
"""Stands for the maximum of a shard without a valid row: finite, so that 0 x (it - max) stays 0."""


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
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    def __post_init__(self) -> None:
        """Refuse a temperature that is not positive (ValueError)."""
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: a positive number is needed")

    def shard(self, rows: int) -> VocabShard:
        """The shard of a rank that holds `rows` rows; ValueError if all ranks hold fewer than `vocab_size`."""
        ranks, rank = (1, 0) if self.tp_group is None else (self.tp_group.size(), self.tp_group.rank())
        if rows * ranks < self.vocab_size:
            raise ValueError(f"{ranks} vocabulary shards of {rows} rows cannot hold vocab_size={self.vocab_size}")
        start = rank * rows
        return VocabShard(start, min(max(self.vocab_size - start, 0), rows), self.tp_group)

    def cuts(self, tokens: int) -> list[slice]:
        """Consecutive runs of at most `chunk_tokens` tokens."""
        step = self.chunk_tokens
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def vocab_parallel_logprob_entropy(logits: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy, nats, fp32 [T] each, from logits [T, W]. Gradient flows through the log-prob only."""
    return _FromLogits.apply(logits, targets, readout)


def linear_logprob_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """The same from hidden states [T, H] (equal on all tp ranks) and this rank's output weight [W, H].

    The gradient of `hidden` is summed over tp ranks here, so it is whole on each of them.
    """
    return _FromHidden.apply(hidden, weight, targets, readout)


@dataclass
class _Sums:
    """Per token over this shard: maximum m, sum e^(l-m), sum e^(l-m) (l-m), logit of the target (0 if not held)."""

    values: Tensor

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> _Sums:
        values = torch.zeros(4, tokens, dtype=torch.float32, device=device)
        values[0] = NO_MAXIMUM
        return cls(values)

    def fill(self, cut: slice, scores: Tensor, local: Tensor) -> None:
        """Enter one chunk: scores [c, valid] at temperature 1 scale, local target column (out of range: not held)."""
        if scores.shape[1] == 0:
            return
        top = scores.amax(dim=1)
        shifted = scores - top[:, None]
        weights = shifted.exp()
        held = (local >= 0) & (local < scores.shape[1])
        column = torch.where(held, local, 0)[:, None]
        self.values[0, cut] = top
        self.values[1, cut] = weights.sum(dim=1)
        self.values[2, cut] = shifted.mul_(weights).sum(dim=1)
        self.values[3, cut] = torch.where(held, scores.gather(1, column)[:, 0], 0.0)

    def finish(self, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob, entropy and log-sum-exp over the whole vocabulary."""
        top, total, weighted, target = self.values
        if shard.split:
            top, total, weighted, target = _over_ranks(self.values, shard.group)
        log_total = total.log()
        lse = top + log_total
        return target - lse, log_total - weighted / total, lse


def _over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bring every shard's sums to the common maximum and add them up."""
    top = values[0].clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    gap = values[0] - top
    scale = gap.exp()
    sums = torch.stack([scale * values[1], scale * (values[2] + gap * values[1]), values[3]])
    dist.all_reduce(sums, group=group)
    return top, sums[0], sums[1], sums[2]


def _score_gradient(scores: Tensor, lse: Tensor, local: Tensor, grad: Tensor) -> Tensor:
    """grad x (onehot - softmax) on this shard, [c, valid]; overwrites `scores`, which is a copy of ours."""
    out = scores.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    held = ((local >= 0) & (local < out.shape[1])).nonzero()[:, 0]
    out[held, local[held]] += grad[held]
    return out


class _FromLogits(Function):
    """Keeps the logits themselves (no copy) and one number per token for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
        shard, sums = readout.shard(logits.shape[1]), _Sums.empty(len(targets), logits.device)
        for cut in readout.cuts(len(targets)):
            sums.fill(cut, logits[cut, : shard.valid].float() / readout.temperature, targets[cut] - shard.start)
        logprob, entropy, lse = sums.finish(shard)
        ctx.save_for_backward(logits, targets, lse)
        ctx.readout, ctx.shard = readout, shard
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, lse = ctx.saved_tensors
        readout, valid = ctx.readout, ctx.shard.valid
        grad, local = grad_outputs[0] / readout.temperature, targets - ctx.shard.start
        out = torch.zeros_like(logits)
        for cut in readout.cuts(len(targets)):
            scores = logits[cut, :valid].float() / readout.temperature
            out[cut, :valid] = _score_gradient(scores, lse[cut], local[cut], grad[cut])
        return out, None, None


class _FromHidden(Function):
    """Computes the logits of one chunk at a time, again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
        shard, sums = readout.shard(weight.shape[0]), _Sums.empty(len(targets), hidden.device)
        rows = weight[: shard.valid]
        for cut in readout.cuts(len(targets)):
            sums.fill(cut, (hidden[cut] @ rows.T).float().div_(readout.temperature), targets[cut] - shard.start)
        logprob, entropy, lse = sums.finish(shard)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.readout, ctx.shard = readout, shard
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, lse = ctx.saved_tensors
        readout, shard = ctx.readout, ctx.shard
        grad, local, rows = grad_outputs[0] / readout.temperature, targets - shard.start, weight[: shard.valid]
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for cut in readout.cuts(len(targets)):
            scores = (hidden[cut] @ rows.T).float().div_(readout.temperature)
            scores = _score_gradient(scores, lse[cut], local[cut], grad[cut]).to(hidden.dtype)
            to_hidden[cut] = scores @ rows
            to_weight[: shard.valid].addmm_(scores.T, hidden[cut])
        if shard.split:
            dist.all_reduce(to_hidden, group=shard.group)
        return to_hidden, to_weight, None, None
