"""Which tensor travels in which bucket, and where in it: a pure function of the model's metadata.

Every trainer rank computes the same plan on its own, so nothing about it travels between them. A layer that fits into one
bucket is not split over two: the engine would have to keep a copy of its first part until the second arrives. The first
bucket is small, because the engine has nothing to do until it is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mcore_rl.types import TensorMeta

ALIGN_BYTES = 64
_FIRST = 4  # the first of several buckets is filled to this fraction of the others


@dataclass(frozen=True)
class Slot:
    """One tensor's place in its bucket."""

    meta: TensorMeta
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together; nbytes includes alignment."""

    index: int
    slots: tuple[Slot, ...]
    nbytes: int

    @property
    def names(self) -> list[str]:
        """Names in travelling order."""
        return [slot.meta.name for slot in self.slots]


def plan_buckets(metadata: Sequence[TensorMeta], bucket_bytes: int, *, align_bytes: int = ALIGN_BYTES) -> tuple[Bucket, ...]:
    """Fill buckets in metadata order up to `bucket_bytes`; a larger tensor travels alone, a layer together where it fits.
    No bucket is empty. Where one does not hold everything, the first is closed at a quarter.

    ValueError for a repeated name or a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"sync.bucket_bytes={bucket_bytes}: at least 1 is needed")
    _refuse_repeated(metadata)
    units = [unit for layer in _layers(metadata) for unit in _units(layer, bucket_bytes, align_bytes)]
    everything = sum(_padded(meta, align_bytes) for meta in metadata)
    most = bucket_bytes if everything <= bucket_bytes else bucket_bytes // _FIRST
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    for unit in units:
        needed = sum(_padded(meta, align_bytes) for meta in unit)
        if slots and filled + needed > most:
            buckets.append(Bucket(len(buckets), tuple(slots), filled))
            slots, filled, most = [], 0, bucket_bytes
        for meta in unit:
            slots.append(Slot(meta, filled))
            filled += _padded(meta, align_bytes)
    if slots:
        buckets.append(Bucket(len(buckets), tuple(slots), filled))
    return tuple(buckets)


def _layers(metadata: Sequence[TensorMeta]) -> list[list[TensorMeta]]:
    return [list(group) for _, group in groupby(metadata, key=lambda meta: _layer(meta.name))]


def _units(layer: list[TensorMeta], bucket_bytes: int, align_bytes: int) -> list[list[TensorMeta]]:
    """What travels together: a layer that fits into a bucket, or else each of its tensors."""
    fits = sum(_padded(meta, align_bytes) for meta in layer) <= bucket_bytes
    return [layer] if fits else [[meta] for meta in layer]


def _refuse_repeated(metadata: Sequence[TensorMeta]) -> None:
    seen: set[str] = set()
    for meta in metadata:
        if meta.name in seen:
            raise ValueError(f"weights: tensor {meta.name!r} is listed twice in the metadata")
        seen.add(meta.name)


def _padded(meta: TensorMeta, align_bytes: int) -> int:
    return -(-meta.nbytes // align_bytes) * align_bytes


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.gate.weight`; a tensor outside the layers stands alone."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else name


def slot_bytes(plan: Sequence[Bucket]) -> int:
    """Bytes one staging slot needs so that every bucket fits; at least 1."""
    return max([1, *(bucket.nbytes for bucket in plan)])
