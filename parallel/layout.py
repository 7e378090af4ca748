"""How the ranks of a run are arranged: sizes of each parallel axis, every way they can be wrong, and who is where.

Two arrangements share the same ranks, as in Megatron-Core (order tp-cp-ep-dp-pp, the first varies fastest):
dense layers: rank = tp + TP (cp + CP (dp + DP pp)); expert layers: rank = etp + ETP (ep + EP (edp + EDP pp)).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a model that a layout has to divide. num_experts and moe_ffn are None for a dense model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    ffn: int
    num_experts: int | None
    moe_ffn: int | None
    vocab_size: int


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

    def _check_positive(self) -> None:
        sizes = {"world": self.world, "tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp, "cp": self.cp}
        for key, size in sizes.items():
            if size < 1:
                raise ValueError(f"layout.{key}={size} must be at least 1")
        if self.vpp is not None and self.vpp < 1:
            raise ValueError(f"layout.vpp={self.vpp} must be at least 1, or null")

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
    def token_multiple(self) -> int:
        """A micro-batch's token count must be a multiple of this."""
        return (self.tp if self.sp else 1) * (2 * self.cp if self.cp > 1 else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """A rank's number of micro-batches must be a multiple of this (Megatron's interleaved schedule)."""
        return self.pp if self.chunks > 1 else 1

    def validate(self, dims: ModelDims) -> None:
        """Refuse a model that these sizes do not divide (ValueError naming the numbers)."""
        _divides(self.tp, "tp", dims.num_heads, "attention heads")
        _divides(self.tp, "tp", dims.num_kv_heads, "key-value heads")
        _divides(self.tp, "tp", dims.ffn, "ffn columns")
        stages = self.pp * self.chunks
        if dims.num_layers % stages:
            raise ValueError(f"layout.pp x vpp = {self.pp} x {self.chunks} = {stages} does not divide {dims.num_layers} layers")
        if dims.num_experts is None:
            self._validate_dense()
            return
        _divides(self.ep, "ep", dims.num_experts, "experts")
        _divides(self.etp, "etp", dims.moe_ffn, "expert ffn columns")
        if self.tp > 1 and not self.sp:
            raise ValueError(
                f"layout.tp={self.tp} of a mixture-of-experts model needs layout.sp=True: its experts would see tokens twice"
            )

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
