"""A batch as this rank's packed rows, log-probs of a row's trained tokens, and the way back to the whole batch.

B sequences of the batch, T tokens and S segments of one packed row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mcore_rl.algorithms.losses import LossInputs
from mcore_rl.policy_routes import row_routes
from mcore_rl.types import TokenBatch, TokenValues, TrainBatch
from models.routes import Routes
from parallel.context import gather_sequence, shard_indices
from parallel.layout import Coordinates, ParallelLayout
from parallel.packing import PackedMicroBatch, pack_micro_batch, plan_micro_batches
from parallel.vocab import Readout, linear_logprobs_entropy


@dataclass(frozen=True)
class RowValues:
    """What the current policy makes of a row, fp32 with gradient, 0 where not trained: log-prob and entropy of its tokens
    [T]; log-probs [T, K] of the teacher's choices, None where the row has no teacher.
    """

    logprobs: Tensor
    entropy: Tensor
    teacher_choices: Tensor | None


@dataclass(frozen=True)
class PolicyRow:
    """One packed micro-batch on this rank's device, and what its loss needs.

    mask: bool [T], trained tokens. advantages: [S], None without a loss. fields: [T, ...] each, by the names of
    TrainBatch.token_fields. index: number of the micro-batch on this rank.
    part: int64 [T / cp], the tokens that this context-parallel rank computes; everything else here is the whole row's, the
    same on every rank of the group. routes: of the tokens at `part`.
    """

    index: int
    packed: PackedMicroBatch
    token_ids: Tensor
    cu_seqlens: Tensor
    mask: Tensor
    part: Tensor
    advantages: Tensor | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    routes: Routes | None = None

    def weigh(self, token_loss: Tensor) -> Tensor:
        """The row's share of the loss: sum of weight x token loss [T]."""
        if "weights" not in self.fields:
            raise ValueError("this row was made for a log-prob pass: it has no token weights")
        return (self.fields["weights"] * token_loss).sum()

    def loss_inputs(self, values: RowValues) -> LossInputs:
        """The row as a loss function sees it, with the current policy's values.

        A token that weighs nothing was dropped: it takes no part in a sequence's ratio either.
        """
        weights = self.fields.get("weights")
        advantages = torch.zeros(len(self.packed.segments)) if self.advantages is None else self.advantages
        return LossInputs(
            current=values.logprobs,
            old=self.fields.get("old"),
            mask=self.mask if weights is None else self.mask & (weights > 0),
            segment_of_token=self.packed.segment_of_token.to(values.logprobs.device),
            advantages=advantages.to(values.logprobs.device),
            weights=weights,
            entropy=values.entropy,
            scale=self.fields.get("scale"),
            advantage_shift=self.fields.get("shift"),
            reference=self.fields.get("reference"),
            teacher=self.fields.get("teacher_logprobs"),
            student=values.teacher_choices,
        )


@dataclass(frozen=True)
class RowPlan:
    """How batches are cut: this rank's place in the layout, the token budget of a row, and what T is a multiple of.

    multiple is the layout's `token_multiple`, or a multiple of it.
    """

    layout: ParallelLayout
    at: Coordinates
    token_budget: int
    multiple: int
    device: torch.device

    def rows(self, tokens: TokenBatch, train: TrainBatch | None = None) -> list[PolicyRow]:
        """This rank's rows; every data-parallel rank gets equally many."""
        plan = plan_micro_batches(
            [ids.numel() for ids in tokens.token_ids],
            dp_size=self.layout.dp,
            token_budget=self.token_budget,
            multiple=self.multiple,
            segment_multiple=self.layout.segment_multiple,
            count_multiple=self.layout.micro_batch_multiple,
        )
        return [self._row(index, one, tokens, train) for index, one in enumerate(plan[self.at.dp])]

    def _row(self, index: int, sequences: Sequence[int], tokens: TokenBatch, train: TrainBatch | None) -> PolicyRow:
        packed = pack_micro_batch(
            tokens.token_ids, sequences, multiple=self.multiple, segment_multiple=self.layout.segment_multiple
        )
        part = shard_indices(packed.cu_seqlens, self.layout.cp, self.at.cp)
        row = PolicyRow(
            index=index,
            packed=packed,
            token_ids=packed.token_ids.to(self.device),
            cu_seqlens=packed.cu_seqlens.to(self.device),
            mask=packed.pack(tokens.loss_mask).to(self.device),
            part=part.to(self.device),
            routes=None if tokens.routes is None else row_routes(packed, tokens.routes, part, self.device),
        )
        return row if train is None else self._with_loss(row, train)

    def _with_loss(self, row: PolicyRow, train: TrainBatch) -> PolicyRow:
        packed = row.packed
        advantages = [float(train.advantages[i]) if i >= 0 else 0.0 for i in packed.segments]
        return replace(
            row,
            advantages=torch.tensor(advantages, device=self.device),
            fields={name: packed.pack(values).to(self.device) for name, values in train.token_fields().items()},
        )


def row_values(hidden: Tensor, weight: Tensor, row: PolicyRow, readout: Readout, cp_group: dist.ProcessGroup) -> RowValues:
    """Log-prob and entropy of the row's trained tokens, and log-probs of what a teacher would have chosen there.

    hidden: [T / cp, H] of the last layer; weight: this rank's output weight [W, H]. The token at t is scored by the hidden
    state at t - 1, which lies in the same segment: position 0 is never trained. That may be another context-parallel rank's:
    each rank scores what its own states speak of, and then all get the whole row.
    Collective over the context-parallel group, also in backward.
    """
    scored = row.mask.roll(-1)[row.part].nonzero()[:, 0]
    wanted, choices = row.token_ids[:, None], row.fields.get("teacher_ids")
    if choices is not None:
        wanted = torch.cat([wanted, choices], 1)
    targets = wanted.roll(-1, 0)[row.part[scored]]
    logprobs, entropy = linear_logprobs_entropy(hidden.index_select(0, scored), weight, targets, readout)
    mine = torch.zeros(row.part.numel(), 1 + wanted.shape[1], dtype=torch.float32, device=hidden.device)
    whole = gather_sequence(mine.index_copy(0, scored, torch.cat([entropy[:, None], logprobs], 1)), row.cu_seqlens, cp_group)
    shifted = functional.pad(whole[:-1], (0, 0, 1, 0))
    return RowValues(shifted[:, 1], shifted[:, 0], None if choices is None else shifted[:, 2:])


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
        both = torch.stack([logprobs.detach(), entropy.detach()], dim=1)
        for sequence, piece in row.packed.unpack(both).items():
            start = self.starts[sequence]
            self.flat[:, start : start + len(piece)] = piece.T

    def gather(self) -> TokenValues:
        """The whole batch on every rank. Collective over the default group; each token was put on exactly one rank."""
        dist.all_reduce(self.flat)
        logprobs, entropy = (tuple(part.split(self.lengths)) for part in self.flat.cpu())
        return TokenValues(logprobs, entropy)


def count_tokens(masks: Sequence[Tensor]) -> int:
    """Trained tokens of a batch."""
    return sum(int(mask.sum()) for mask in masks)
