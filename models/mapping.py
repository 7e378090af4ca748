"""Small invertible operations between Hugging Face tensors and one Megatron parameter, and how that parameter is sharded.

`fuse` builds the whole Megatron tensor from its Hugging Face parts, `split` is its inverse; `shard` cuts the piece of one
tensor-parallel rank out of the whole, `join` is its inverse. Export is import reversed: join, then split. Everything is
a copy of bits; nothing is computed. No Megatron, no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


def check_shapes(parts: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
    """ValueError when the parts do not have exactly these shapes."""
    found = [tuple(part.shape) for part in parts]
    if found != list(shapes):
        raise ValueError(f"expected shapes {list(shapes)}, got {found}")


class Op(Protocol):
    """How Hugging Face tensors become one Megatron parameter, and back."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the Hugging Face parts, in order."""
        ...

    @property
    def sharded(self) -> bool:
        """False when every tensor-parallel rank holds the whole."""
        ...

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole Megatron tensor."""
        ...

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The Hugging Face parts, contiguous."""
        ...

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The piece of tensor-parallel rank `rank` of `size`."""
        ...

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole from the pieces of all ranks, in rank order."""
        ...


def _chunk(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if whole.shape[dim] % size:
        raise ValueError(f"dimension {dim} of shape {tuple(whole.shape)} does not divide into {size} tensor-parallel shards")
    return whole.chunk(size, dim)[rank]


def _rows(shards: Sequence[Tensor]) -> Tensor:
    """The shards below each other; a single one as it is, without a copy."""
    return shards[0] if len(shards) == 1 else torch.cat(tuple(shards))


def shard_sections(whole: Tensor, sections: Sequence[int], rank: int, size: int) -> Tensor:
    """The rank-th of `size` equal pieces of every section of dimension 0; ValueError when a section does not divide."""
    if whole.shape[0] != sum(sections):
        raise ValueError(f"{whole.shape[0]} rows are not the sections {tuple(sections)}")
    return whole if size == 1 else torch.cat([_chunk(part, 0, rank, size) for part in whole.split(list(sections))])


def join_sections(shards: Sequence[Tensor], sections: Sequence[int]) -> Tensor:
    """The whole from every rank's pieces: `shard_sections` reversed."""
    if len(shards) == 1:
        return shards[0]
    parts = [shard.split([section // len(shards) for section in sections]) for shard in shards]
    return torch.cat([rank_parts[number] for number in range(len(sections)) for rank_parts in parts])


class OnePart(Op, Protocol):
    """An op of one Hugging Face tensor, which is the whole as it is."""

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The part itself."""
        check_shapes(parts, self.shapes)
        return parts[0]

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The whole itself."""
        return (whole.contiguous(),)


class Sections(Op, Protocol):
    """An op whose rows are sections, each of them cut over the ranks: a rank holds its piece of the first, of the second..."""

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of each section of the whole."""
        ...

    @property
    def sharded(self) -> bool:
        """Always."""
        return True

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's rows of every section."""
        return shard_sections(whole, self.sections, rank, size)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Whole sections from every rank's rows."""
        return join_sections(shards, self.sections)


class Rows(Op, Protocol):
    """An op whose ranks hold consecutive rows."""

    @property
    def sharded(self) -> bool:
        """Always."""
        return True

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Consecutive rows; of q, k and v whole groups when the kv heads divide, Megatron's split groups when they do not."""
        return _chunk(whole, 0, rank, size)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate rows."""
        return _rows(shards)


@dataclass(frozen=True)
class Rename(OnePart):
    """One tensor under another name. shard_dim: 0 column parallel, 1 row parallel, None replicated."""

    shape: Shape
    shard_dim: int | None = None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One part."""
        return (self.shape,)

    @property
    def sharded(self) -> bool:
        """True with a shard_dim."""
        return self.shard_dim is not None

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The rank-th slice along shard_dim."""
        return whole if self.shard_dim is None else _chunk(whole, self.shard_dim, rank, size)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate along shard_dim."""
        if self.shard_dim is None or len(shards) == 1:
            return shards[0]
        return torch.cat(tuple(shards), self.shard_dim)


@dataclass(frozen=True)
class VocabRows(OnePart):
    """Embedding or head [vocab, hidden], column parallel over rows that are padded with zeros to multiple x ranks."""

    vocab_size: int
    hidden_size: int
    multiple: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """One part, without padding rows."""
        return ((self.vocab_size, self.hidden_size),)

    @property
    def sharded(self) -> bool:
        """Always."""
        return True

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Rows of this rank; rows beyond the vocabulary are zero."""
        unit = self.multiple * size
        rows = -(-self.vocab_size // unit) * unit // size
        piece = whole[rank * rows : (rank + 1) * rows]
        missing = rows - piece.shape[0]
        return torch.cat([piece, piece.new_zeros(missing, self.hidden_size)]) if missing else piece

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate and drop the padding rows."""
        return _rows(shards)[: self.vocab_size]


@dataclass(frozen=True)
class FuseQkv(Rows):
    """q, k, v -> one matrix in Megatron's order: for each kv head its query heads, its key head, its value head.

    width: hidden size of a weight, None for a bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int | None = None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """q, k, v."""
        tail = () if self.width is None else (self.width,)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (q, *tail), (kv, *tail), (kv, *tail)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """[kv heads x (queries per kv head + 2) x head_dim, width]."""
        check_shapes(parts, self.shapes)
        grouped = [part.reshape(self.num_kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """q, k, v."""
        queries = self.num_heads // self.num_kv_heads * self.head_dim
        grouped = whole.reshape(self.num_kv_heads, -1, *whole.shape[1:])
        parts = grouped.split([queries, self.head_dim, self.head_dim], dim=1)
        return tuple(part.reshape(-1, *whole.shape[1:]).contiguous() for part in parts)


@dataclass(frozen=True)
class FuseGatedQkv(Rows):
    """q with its output gate, k, v -> one matrix: for each kv head its queries, their gates, its key, its value.

    Hugging Face's q_proj alternates: for each head its query rows, then its gate rows.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """q and gate, k, v."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (2 * q, self.width), (kv, self.width), (kv, self.width)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """[kv heads x (2 x queries per kv head + 2) x head_dim, width]."""
        check_shapes(parts, self.shapes)
        gated = parts[0].reshape(self.num_kv_heads, -1, 2, self.head_dim, self.width)
        grouped = [t.reshape(self.num_kv_heads, -1, self.width) for t in (*gated.unbind(2), *parts[1:])]
        return torch.cat(grouped, dim=1).reshape(-1, self.width)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """q and gate, k, v."""
        queries = self.num_heads // self.num_kv_heads * self.head_dim
        grouped = whole.reshape(self.num_kv_heads, -1, self.width)
        q, gate, k, v = grouped.split([queries, queries, self.head_dim, self.head_dim], dim=1)
        gated = torch.stack([t.reshape(-1, self.head_dim, self.width) for t in (q, gate)], dim=1)
        return tuple(t.reshape(-1, self.width).contiguous() for t in (gated, k, v))


@dataclass(frozen=True)
class FuseGateUp(Sections):
    """gate, up [ffn, hidden] -> [gate; up]; a shard holds its rows of gate, then its rows of up."""

    ffn_size: int
    hidden_size: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """gate, up."""
        return (self.ffn_size, self.hidden_size), (self.ffn_size, self.hidden_size)

    @property
    def sections(self) -> tuple[int, int]:
        """Rows of gate, rows of up."""
        return self.ffn_size, self.ffn_size

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """[2 x ffn, hidden]."""
        check_shapes(parts, self.shapes)
        return torch.cat(tuple(parts))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """gate, up."""
        return tuple(part.contiguous() for part in whole.chunk(2))
