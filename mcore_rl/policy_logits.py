"""Logits after the last token of each sequence, collected from the ranks that computed them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.policy_rows import PolicyRow
from parallel.layout import Coordinates


class LastLogits:
    """A table [B, vocabulary]: every entry comes from exactly one rank (its row's, its token's, its part of the words)."""

    def __init__(self, sequences: int, vocab_size: int, at: Coordinates, device: torch.device) -> None:
        """Zeros, as on ranks that contribute nothing."""
        self._tp = at.tp
        self._table = torch.zeros(sequences, vocab_size, dtype=torch.float32, device=device)

    @torch.no_grad()
    def put(self, row: PolicyRow, hidden: Tensor, weight: Tensor) -> None:
        """Enter one row. hidden: [T / cp, H] of the last layer; weight: this rank's rows [W, H] of the output weight."""
        starts, used = row.packed.cu_seqlens[:-1], torch.tensor(row.packed.used)
        for index, last in zip(row.packed.segments, (starts + used - 1).tolist(), strict=True):
            at = (row.part == last).nonzero()[:, 0]
            if index < 0 or not at.numel():
                continue
            logits = (hidden[at[0]] @ weight.T.to(hidden.dtype)).float()
            first = self._tp * weight.shape[0]
            count = min(weight.shape[0], self._table.shape[1] - first)
            if count > 0:
                self._table[index, first : first + count] = logits[:count]

    def gather(self) -> Tensor:
        """The whole table on every rank. Collective over the default group."""
        dist.all_reduce(self._table)
        return self._table.cpu()
