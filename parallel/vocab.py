"""Log-probs of given tokens and entropy from hidden states, under a vocabulary split over tensor-parallel ranks.

The output layer is applied to a chunk of tokens at a time, in forward and again in backward, so [T, V] logits never exist.
Softmax is fp32 and exact: padded vocabulary rows take no part, and each shard gets its whole gradient whether or not it
holds the target. Values and gradients do not depend on the chunk.

T tokens, c tokens of a chunk, M targets of a token, V full vocabulary, W rows of this rank's shard (V padded, over tp),
H hidden size.
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

DEFAULT_CHUNK_TOKENS = 256
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


def linear_logprob_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy, nats, fp32 [T] each, both with their gradient.

    hidden: [T, H], equal on all tp ranks; weight: this rank's output weight [W, H]. The gradient of `hidden` is summed
    over tp ranks here, so it is whole on each of them; that of the weight is accumulated in fp32.
    """
    logprobs, entropy = linear_logprobs_entropy(hidden, weight, targets[:, None], readout)
    return logprobs[:, 0], entropy


def linear_logprobs_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """Log-probs of several `targets` [T, M] of each token, fp32 [T, M], and entropy [T]; otherwise as for one."""
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

    def fill(self, cut: slice, scores: Tensor, local: Tensor) -> None:
        """Enter one chunk: scores [c, valid], overwritten; local target columns [c, M] (out of range: not held)."""
        if scores.shape[1] == 0:
            return
        top = scores.amax(dim=1)
        held, column = _held(local, scores.shape[1])
        self.values[0, cut] = top
        self.values[3:, cut] = torch.where(held, scores.gather(1, column), 0.0).T
        shifted = scores.sub_(top[:, None])
        weights = shifted.exp()
        self.values[1, cut] = weights.sum(dim=1)
        self.values[2, cut] = shifted.mul_(weights).sum(dim=1)

    def finish(self, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [T, M], entropy and log-sum-exp over the whole vocabulary."""
        top, total, weighted, *targets = _over_ranks(self.values, shard.group) if shard.split else self.values
        log_total = total.log()
        lse = top + log_total
        return torch.stack(targets, 1) - lse[:, None], log_total - weighted / total, lse


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
    sums = torch.cat([torch.stack([scale * values[1], scale * (values[2] + gap * values[1])]), values[3:]])
    dist.all_reduce(sums, group=group)
    return torch.cat([top[None], sums])


@dataclass(frozen=True)
class _Upstream:
    """Per token of a chunk: log-sum-exp [c], entropy [c], local target columns [c, M], gradient of log-probs [c, M] and of
    entropy (or None)."""

    lse: Tensor
    entropy: Tensor
    local: Tensor
    logprob_grad: Tensor
    entropy_grad: Tensor | None

    def to_scores(self, scores: Tensor) -> Tensor:
        """Gradient of scores [c, valid], which are overwritten: sum over targets of g (onehot - p), - h p (log p + H)."""
        log_p, spread = scores.sub_(self.lse[:, None]), self.logprob_grad.sum(1, keepdim=True)
        if self.entropy_grad is None:
            out = log_p.exp_().mul_(-spread)
        else:
            p = log_p.exp()
            factor = log_p.add_(self.entropy[:, None]).mul_(self.entropy_grad[:, None]).add_(spread)
            out = p.mul_(factor).neg_()
        if out.shape[1]:
            held, column = _held(self.local, out.shape[1])
            out.scatter_add_(1, column, torch.where(held, self.logprob_grad, 0.0))
        return out


def _scores(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """fp32 [c, valid], a tensor of our own."""
    scores = (hidden @ rows.T).float()
    return scores if temperature == 1.0 else scores.div_(temperature)


class _Readout(Function):
    """Keeps three numbers per token between the passes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
        shard, sums = readout.shard(weight.shape[0]), _Sums.empty(targets)
        rows = weight[: shard.valid]
        for cut in readout.cuts(len(targets)):
            sums.fill(cut, _scores(hidden[cut], rows, readout.temperature), targets[cut] - shard.start)
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
        to_logprob, to_entropy = (None if grad is None else grad.float() / readout.temperature for grad in grad_outputs)
        if to_logprob is None:
            to_logprob = torch.zeros(targets.shape, dtype=lse.dtype, device=lse.device)
        if to_entropy is not None and not to_entropy.any():
            to_entropy = None
        rows, to_hidden = weight[: shard.valid], torch.zeros_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for cut in readout.cuts(len(targets)):
            upstream = _Upstream(
                lse[cut],
                entropy[cut],
                targets[cut] - shard.start,
                to_logprob[cut],
                None if to_entropy is None else to_entropy[cut],
            )
            grad = upstream.to_scores(_scores(hidden[cut], rows, readout.temperature)).to(hidden.dtype)
            to_hidden[cut] = grad @ rows
            _add_outer(to_weight[: shard.valid], grad, hidden[cut])
        if shard.split:
            dist.all_reduce(to_hidden, group=shard.group)
        return to_hidden, to_weight.to(weight.dtype), None, None


def _add_outer(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total [valid, H] += grad^T hidden, added up in fp32 whatever the dtype of the factors."""
    if hidden.dtype is torch.float32:
        total.addmm_(grad.T, hidden)
    else:
        total.add_(grad.T @ hidden)
