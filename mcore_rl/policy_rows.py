"""A batch as this rank's packed rows, log-probs of a row's trained tokens, and the way back to the whole batch.

B sequences of the batch, T tokens and S segments of one packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.algorithms.losses import LossInputs
from mcore_rl.types import TokenBatch, TokenValues, TrainBatch
from parallel.packing import PackedMicroBatch, pack_micro_batch, plan_micro_batches
from parallel.vocab import Readout, vocab_parallel_logprob_entropy


@dataclass(frozen=True)
class PolicyRow:
    """One packed micro-batch on this rank's device, and what its loss needs.

    mask: bool [T], trained tokens. weights: fp32 [T], None without a loss. old: [T] or None. advantages: [S].
    index: number of the micro-batch on this rank.
    """

    index: int
    packed: PackedMicroBatch
    token_ids: Tensor
    cu_seqlens: Tensor
    mask: Tensor
    weights: Tensor | None = None
    advantages: Tensor | None = None
    old: Tensor | None = None

    def weigh(self, token_loss: Tensor) -> Tensor:
        """The row's share of the loss: sum of weight x token loss [T]."""
        if self.weights is None:
            raise ValueError("this row was made for a log-prob pass: it has no token weights")
        return (self.weights * token_loss).sum()

    def loss_inputs(self, logprobs: Tensor) -> LossInputs:
        """The row as a loss function sees it, with `logprobs` [T] as the current policy."""
        advantages = torch.zeros(len(self.packed.segments)) if self.advantages is None else self.advantages
        return LossInputs(
            current=logprobs,
            old=self.old,
            mask=self.mask,
            segment_of_token=self.packed.segment_of_token.to(logprobs.device),
            advantages=advantages.to(logprobs.device),
        )


@dataclass(frozen=True)
class RowPlan:
    """How batches are cut: this rank's place among dp_size, the token budget of a row, and what T must divide by."""

    dp_rank: int
    dp_size: int
    token_budget: int
    multiple: int
    count_multiple: int
    device: torch.device

    def rows(self, tokens: TokenBatch, train: TrainBatch | None = None) -> list[PolicyRow]:
        """This rank's rows; every data-parallel rank gets equally many."""
        plan = plan_micro_batches(
            [ids.numel() for ids in tokens.token_ids],
            dp_size=self.dp_size,
            token_budget=self.token_budget,
            multiple=self.multiple,
            count_multiple=self.count_multiple,
        )
        mine = enumerate(plan[self.dp_rank])
        return [
            self._row(index, pack_micro_batch(tokens.token_ids, one, multiple=self.multiple), tokens, train)
            for index, one in mine
        ]

    def _row(self, index: int, packed: PackedMicroBatch, tokens: TokenBatch, train: TrainBatch | None) -> PolicyRow:
        row = PolicyRow(
            index=index,
            packed=packed,
            token_ids=packed.token_ids.to(self.device),
            cu_seqlens=packed.cu_seqlens.to(self.device),
            mask=packed.pack(tokens.loss_mask).to(self.device),
        )
        return row if train is None else self._with_loss(row, train)

    def _with_loss(self, row: PolicyRow, train: TrainBatch) -> PolicyRow:
        packed = row.packed
        advantages = [float(train.advantages[i]) if i >= 0 else 0.0 for i in packed.segments]
        return replace(
            row,
            weights=packed.pack(train.token_weights).to(self.device),
            advantages=torch.tensor(advantages, device=self.device),
            old=None if train.old_logprobs is None else packed.pack(train.old_logprobs).to(self.device),
        )


def row_logprobs(logits: Tensor, row: PolicyRow, readout: Readout) -> tuple[Tensor, Tensor]:
    """Log-prob (with gradient) and entropy of the row's trained tokens, fp32 [T], 0 elsewhere; from logits [T, W].

    The token at t is scored by the logits at t - 1, which lie in the same segment: position 0 is never trained.
    """
    trained = row.mask.nonzero()[:, 0]
    chosen = logits.index_select(0, trained - 1)
    logprob, entropy = vocab_parallel_logprob_entropy(chosen, row.token_ids[trained], readout)
    zeros = torch.zeros(row.mask.numel(), dtype=torch.float32, device=logits.device)
    return zeros.index_copy(0, trained, logprob), zeros.index_copy(0, trained, entropy)


class BatchValues:
    """Collects per-token values of a whole batch from the rows that each rank computed."""

    def __init__(self, tokens: TokenBatch, device: torch.device) -> None:
        """Nothing collected yet: zeros, as on ranks that contribute nothing."""
        self.lengths = [ids.numel() for ids in tokens.token_ids]
        ends = torch.tensor(self.lengths).cumsum(0)
        self.starts = (ends - torch.tensor(self.lengths)).tolist()
        self.flat = torch.zeros(2, int(ends[-1]), dtype=torch.float32, device=device)

    def put(self, row: PolicyRow, logprobs: Tensor, entropy: Tensor) -> None:
        """Enter one row's [T] values (detached)."""
        both = torch.stack([logprobs.detach(), entropy.detach()])
        pieces = both.split(row.packed.lengths(), dim=1)
        for sequence, piece in zip(row.packed.segments, pieces, strict=True):
            if sequence >= 0:
                start = self.starts[sequence]
                self.flat[:, start : start + piece.shape[1]] = piece

    def gather(self) -> TokenValues:
        """The whole batch on every rank. Collective over the default group; each token was put on exactly one rank."""
        dist.all_reduce(self.flat)
        logprobs, entropy = (tuple(part.split(self.lengths)) for part in self.flat.cpu())
        return TokenValues(logprobs, entropy)


def count_tokens(masks: Sequence[Tensor]) -> int:
    """Trained tokens of a batch."""
    return sum(int(mask.sum()) for mask in masks)
