"""How the ranks of a run are arranged: sizes of each parallel axis, every way they can be wrong, and who is where.

Two arrangements share the same ranks, as in Megatron-Core (order tp-cp-ep-dp-pp, the first varies fastest):
dense layers: rank = tp + TP (cp + CP (dp + DP pp)); expert layers: rank = etp + ETP (ep + EP (edp + EDP pp)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a model that a layout has to divide. num_experts and moe_ffn are None for a dense model.

    shared_ffn: of the shared expert; linear_heads: key heads of its linear attention. None where there is no such part.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    ffn: int
    num_experts: int | None
    moe_ffn: int | None
    vocab_size: int
    shared_ffn: int | None = None
    linear_heads: int | None = None


@dataclass(frozen=True)
class Coordinates:
    """Place of one rank on every axis."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def _divides(size: int, key: str, count: int | None, of: str) -> None:
    if count is not None and count % size:
        raise ValueError(f"layout.{key}={size} does not divide {count} {of}")


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of the trainer: world = dp x tp x pp x cp, and world = edp x ep x etp x pp for the experts.

    vpp: model chunks per pipeline rank (None: one). sp: sequence parallel, the norms' tokens split over tp.
    first_stage_layers, last_stage_layers: layers of the first and last pipeline rank, over all its chunks, where they are
    not as many as those of the others (None: the even share of what is left).
    ValueError at construction when the sizes cannot be arranged at all; `validate` adds the model's sizes.
    """

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    cp: int = 1
    sp: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no model can be laid out on (ValueError naming the numbers)."""
        self._check_positive()
        dense = self.tp * self.pp * self.cp
        if self.world % dense:
            raise ValueError(
                f"layout.world={self.world} is not a multiple of tp x pp x cp = {self.tp} x {self.pp} x {self.cp} = {dense}"
            )
        expert = self.ep * self.etp * self.pp
        if self.world % expert:
            raise ValueError(
                f"layout.world={self.world} is not a multiple of ep x etp x pp = {self.ep} x {self.etp} x {self.pp} = {expert}"
            )
        if self.sp and self.tp == 1:
            raise ValueError("layout.sp=True needs layout.tp > 1: sequence parallel splits tokens over the tensor-parallel ranks")
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"layout.vpp={self.vpp} needs layout.pp > 1")
        for key, layers in self._uneven().items():
            if layers is not None and self.pp == 1:
                raise ValueError(f"layout.{key}={layers} needs layout.pp > 1")

    def _uneven(self) -> dict[str, int | None]:
        return {"first_stage_layers": self.first_stage_layers, "last_stage_layers": self.last_stage_layers}

    def _check_positive(self) -> None:
        sizes = {"world": self.world, "tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp, "cp": self.cp}
        for key, size in sizes.items():
            if size < 1:
                raise ValueError(f"layout.{key}={size} must be at least 1")
        optional = {"vpp": self.vpp, **self._uneven()}
        for key, size in optional.items():
            if size is not None and size < 1:
                raise ValueError(f"layout.{key}={size} must be at least 1, or null")

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense layers."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert layers."""
        return self.world // (self.ep * self.etp * self.pp)

    @property
    def chunks(self) -> int:
        """Model chunks per rank: vpp, or 1."""
        return self.vpp or 1

    @property
    def segment_multiple(self) -> int:
        """The length of every segment of a packed row must be a multiple of this: context parallelism cuts 2 cp chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def token_multiple(self) -> int:
        """A micro-batch's token count must be a multiple of this."""
        return (self.tp if self.sp else 1) * self.segment_multiple

    @property
    def micro_batch_multiple(self) -> int:
        """A rank's number of micro-batches must be a multiple of this (Megatron's interleaved schedule)."""
        return self.pp if self.chunks > 1 else 1

    def validate(self, dims: ModelDims) -> None:
        """Refuse a model that these sizes do not divide (ValueError naming the numbers)."""
        _divides(self.tp, "tp", dims.num_heads, "attention heads")
        _divides(self.tp, "tp", dims.num_kv_heads, "key-value heads")
        _divides(self.tp, "tp", dims.ffn, "ffn columns")
        _divides(self.tp, "tp", dims.shared_ffn, "shared expert's ffn columns")
        _divides(self.tp, "tp", dims.linear_heads, "linear-attention key heads")
        self.stage_layers(dims.num_layers)
        if dims.num_experts is None:
            self._validate_dense()
            return
        _divides(self.ep, "ep", dims.num_experts, "experts")
        _divides(self.etp, "etp", dims.moe_ffn, "expert ffn columns")
        if self.tp > 1 and not self.sp:
            raise ValueError(
                f"layout.tp={self.tp} of a mixture-of-experts model needs layout.sp=True: its experts would see tokens twice"
            )

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each pipeline rank, over all its chunks; ValueError when they cannot be dealt out."""
        uneven = {key: layers for key, layers in self._uneven().items() if layers is not None}
        middle, left = self.pp - len(uneven), num_layers - sum(uneven.values())
        self._check_stages(num_layers, uneven, left=left, middle=middle)
        even = left // middle if middle else 0
        return (self.first_stage_layers or even, *[even] * (self.pp - 2), self.last_stage_layers or even)[-self.pp :]

    def _check_stages(self, num_layers: int, uneven: dict[str, int], *, left: int, middle: int) -> None:
        pipeline = f"layout.pp x vpp = {self.pp} x {self.chunks} = {self.pp * self.chunks}"
        if not uneven and num_layers % (self.pp * self.chunks):
            raise ValueError(f"{pipeline} does not divide {num_layers} layers")
        for key, layers in uneven.items():
            if layers % self.chunks:
                raise ValueError(f"layout.{key}={layers} is not a multiple of layout.vpp={self.chunks}")
        given = " and ".join(f"layout.{key}={layers}" for key, layers in uneven.items())
        if (middle and left < middle) or left % max(1, middle * self.chunks) or (not middle and left):
            raise ValueError(
                f"{given} of {num_layers} layers leaves {left} for the other {middle} stages; {pipeline} cannot deal them evenly"
            )

    def chunk_layers(self, num_layers: int, pp_rank: int, chunk: int) -> range:
        """0-based numbers of the layers in one chunk of a pipeline rank: chunk after chunk, in each rank after rank."""
        counts = _chunk_counts(self, num_layers)
        first = chunk * sum(counts) + sum(counts[:pp_rank])
        return range(first, first + counts[pp_rank])

    def stage_of_layer(self, num_layers: int, layer: int) -> int:
        """Pipeline rank of the layer with this 0-based number."""
        counts = _chunk_counts(self, num_layers)
        place = layer % sum(counts)
        return sum(place >= end for end in accumulate(counts))

    def _validate_dense(self) -> None:
        for key, size in (("ep", self.ep), ("etp", self.etp)):
            if size > 1:
                raise ValueError(f"layout.{key}={size} needs a model with experts; this one is dense")

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands on every axis; ValueError when it is not a rank of this layout."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a layout of {self.world} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=rest % self.edp)


@lru_cache(maxsize=64)
def _chunk_counts(layout: ParallelLayout, num_layers: int) -> tuple[int, ...]:
    """Layers in one chunk of each pipeline rank. Asked for every parameter of every sync."""
    return tuple(layers // layout.chunks for layers in layout.stage_layers(num_layers))
