"""Which tensor travels in which bucket, and where in it: a pure function of the model's metadata.

Every trainer rank computes the same plan on its own, so nothing about it travels between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.types import TensorMeta

ALIGN_BYTES = 64


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
    """Fill buckets in metadata order up to `bucket_bytes`; a larger tensor travels alone. No bucket is empty.

    ValueError for a repeated name or a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"sync.bucket_bytes={bucket_bytes}: at least 1 is needed")
    seen: set[str] = set()
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    for meta in metadata:
        if meta.name in seen:
            raise ValueError(f"weights: tensor {meta.name!r} is listed twice in the metadata")
        seen.add(meta.name)
        size = -(-meta.nbytes // align_bytes) * align_bytes
        if slots and filled + size > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(slots), filled))
            slots, filled = [], 0
        slots.append(Slot(meta, filled))
        filled += size
    if slots:
        buckets.append(Bucket(len(buckets), tuple(slots), filled))
    return tuple(buckets)


def slot_bytes(plan: Sequence[Bucket]) -> int:
    """Bytes one staging slot needs so that every bucket fits; at least 1."""
    return max([1, *(bucket.nbytes for bucket in plan)])
