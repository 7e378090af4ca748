"""The weights of a GatedDeltaNet layer between Hugging Face and Megatron: invertible copies of bits, as in `models.mapping`.

Megatron's input projection is one matrix whose rows are six sections, q, k, v, z, b, a; its convolution has three, q, k, v.
A tensor-parallel rank holds its own heads of every section, in that order: never a plain slice of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.mapping import OnePart, Sections, Shape, check_shapes, shard_sections
from models.spec import DeltaNetSpec


class _HeadSections(Sections, Protocol):
    """Sections of heads: nothing is cut where the key heads do not divide, even if the rows would."""

    delta_net: DeltaNetSpec

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Every section's rows of this rank's heads."""
        self.delta_net.part(size)
        return shard_sections(whole, self.sections, rank, size)


@dataclass(frozen=True)
class _InputProjection(_HeadSections):
    """in_proj [q, k, v, z, b, a rows, hidden]; the two Hugging Face spellings differ in their parts only."""

    delta_net: DeltaNetSpec
    hidden_size: int

    @property
    def sections(self) -> tuple[int, ...]:
        """q, k, v, z, b, a."""
        return self.delta_net.projection_sections


@dataclass(frozen=True)
class FuseDeltaNetGrouped(_InputProjection):
    """Qwen3-Next: in_proj_qkvz and in_proj_ba, both grouped by key head: [q; k; its v heads; their z], [its b; its a]."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """in_proj_qkvz, in_proj_ba."""
        d = self.delta_net
        return (2 * (d.key_size + d.value_size), self.hidden_size), (2 * d.num_v_heads, self.hidden_size)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """[q, k, v, z, b, a rows, hidden]."""
        check_shapes(parts, self.shapes)
        head, sections = self.delta_net.part(self.delta_net.num_k_heads), []
        for part, rows in zip(parts, (head.projection_sections[:4], head.projection_sections[4:]), strict=True):
            grouped = part.reshape(self.delta_net.num_k_heads, sum(rows), self.hidden_size)
            sections += [section.reshape(-1, self.hidden_size) for section in grouped.split(list(rows), dim=1)]
        return torch.cat(sections)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """in_proj_qkvz, in_proj_ba."""
        sections = whole.split(list(self.delta_net.projection_sections))
        grouped = [section.reshape(self.delta_net.num_k_heads, -1, self.hidden_size) for section in sections]
        parts = torch.cat(grouped[:4], dim=1), torch.cat(grouped[4:], dim=1)
        return tuple(part.reshape(-1, self.hidden_size) for part in parts)


@dataclass(frozen=True)
class FuseDeltaNetFlat(_InputProjection):
    """Qwen3.5: in_proj_qkv = [all q; all k; all v], in_proj_z, in_proj_b, in_proj_a."""

    @property
    def _rows(self) -> tuple[int, int, int, int]:
        d = self.delta_net
        return sum(d.conv_sections), d.value_size, d.num_v_heads, d.num_v_heads

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """in_proj_qkv, in_proj_z, in_proj_b, in_proj_a."""
        return tuple((rows, self.hidden_size) for rows in self._rows)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """[q, k, v, z, b, a rows, hidden]."""
        check_shapes(parts, self.shapes)
        return torch.cat(tuple(parts))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """in_proj_qkv, in_proj_z, in_proj_b, in_proj_a."""
        return tuple(part.contiguous() for part in whole.split(list(self._rows)))


@dataclass(frozen=True)
class DeltaNetConv(OnePart, _HeadSections):
    """conv1d.weight [q, k, v channels, 1, taps]: one kernel per channel."""

    delta_net: DeltaNetSpec

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One part."""
        return ((sum(self.sections), 1, self.delta_net.conv_width),)

    @property
    def sections(self) -> tuple[int, ...]:
        """q, k, v."""
        return self.delta_net.conv_sections


@dataclass(frozen=True)
class HeadVector(OnePart, _HeadSections):
    """A_log or dt_bias [value heads]; a rank holds those of its heads."""

    delta_net: DeltaNetSpec

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One part."""
        return (self.sections,)

    @property
    def sections(self) -> tuple[int, ...]:
        """The value heads are one."""
        return (self.delta_net.num_v_heads,)
