"""The weights of a GatedDeltaNet layer between Hugging Face and Megatron: invertible copies of bits, as in `models.mapping`.

Megatron's input projection is one matrix whose rows are six sections, q, k, v, z, b, a; its convolution has three, q, k, v.
A tensor-parallel rank holds its own heads of every section, in that order: never a plain slice of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.mapping import Shape, check_shapes
from models.spec import DeltaNetSpec


def shard_sections(whole: Tensor, sections: Sequence[int], rank: int, size: int) -> Tensor:
    """The rank-th of `size` equal pieces of every section of dimension 0; ValueError when a section does not divide."""
    if whole.shape[0] != sum(sections):
        raise ValueError(f"{whole.shape[0]} rows are not the sections {tuple(sections)}")
    for section in sections:
        if section % size:
            raise ValueError(f"{section} rows of the sections {tuple(sections)} do not divide over {size} tensor-parallel ranks")
    return torch.cat([part.chunk(size)[rank] for part in whole.split(list(sections))])


def join_sections(shards: Sequence[Tensor], sections: Sequence[int]) -> Tensor:
    """The whole from every rank's pieces: `shard_sections` reversed."""
    local = [section // len(shards) for section in sections]
    parts = [shard.split(local) for shard in shards]
    return torch.cat([rank_parts[number] for number in range(len(sections)) for rank_parts in parts])


@dataclass(frozen=True)
class _InputProjection:
    """in_proj [q, k, v, z, b, a rows, hidden]; the two Hugging Face spellings differ in their parts only."""

    delta_net: DeltaNetSpec
    hidden_size: int

    @property
    def sharded(self) -> bool:
        """Always."""
        return True

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Every section's rows of this rank's heads."""
        self.delta_net.part(size)
        return shard_sections(whole, self.delta_net.projection_sections, rank, size)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Whole sections from every rank's rows."""
        return join_sections(shards, self.delta_net.projection_sections)


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
class DeltaNetConv:
    """conv1d.weight [q, k, v channels, 1, taps]: one kernel per channel."""

    delta_net: DeltaNetSpec

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One part."""
        return ((sum(self.delta_net.conv_sections), 1, self.delta_net.conv_width),)

    @property
    def sharded(self) -> bool:
        """Always."""
        return True

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The part itself."""
        check_shapes(parts, self.shapes)
        return parts[0]

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The whole itself."""
        return (whole.contiguous(),)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The q, k and v channels of this rank's heads."""
        self.delta_net.part(size)
        return shard_sections(whole, self.delta_net.conv_sections, rank, size)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Whole q, k and v channels from every rank's."""
        return join_sections(shards, self.delta_net.conv_sections)


@dataclass(frozen=True)
class HeadVector:
    """A_log or dt_bias [value heads]; a rank holds those of its heads."""

    delta_net: DeltaNetSpec

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One part."""
        return ((self.delta_net.num_v_heads,),)

    @property
    def sharded(self) -> bool:
        """Always."""
        return True

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The part itself."""
        check_shapes(parts, self.shapes)
        return parts[0]

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The whole itself."""
        return (whole.contiguous(),)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Consecutive value heads: those of this rank's key heads."""
        self.delta_net.part(size)
        return shard_sections(whole, self.shapes[0], rank, size)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """All heads in order."""
        return torch.cat(tuple(shards))
