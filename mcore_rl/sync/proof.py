"""The checks that turn "the weights were sent" into "the engine computes with the trainer's weights"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcore_rl.sync.digest import Region, content_digest
from mcore_rl.types import TensorMeta, WeightMismatch

_NAMED = 5


@dataclass(frozen=True)
class ProbeResult:
    """|trainer - engine| over all probe tokens, in nats."""

    max_nats: float
    mean_nats: float


def check_layout(engine: str, layout: Mapping[str, Mapping[str, Any]], metadata: Sequence[TensorMeta]) -> None:
    """The trainer offers exactly the tensors the engine's model has, in the same shapes (WeightMismatch)."""
    offered = {meta.name: meta.shape for meta in metadata}
    for problem, names in (
        ("the engine has no such weight", [name for name in offered if name not in layout]),
        ("the trainer does not offer it", [name for name in layout if name not in offered]),
        ("no worker of the engine holds it", [name for name, entry in layout.items() if not entry["regions"]]),
    ):
        if names:
            raise WeightMismatch(f"{engine}: {problem}: {_some(names)}")
    for name, shape in offered.items():
        if tuple(layout[name]["shape"]) != shape:
            raise WeightMismatch(
                f"{engine}: tensor {name} is {list(shape)} in the trainer and {layout[name]['shape']} in the engine"
            )
        if not _covers([Region.from_json(row) for row in layout[name]["regions"]], shape):
            raise WeightMismatch(f"{engine}: its workers declare only parts of {name} {list(shape)}: {layout[name]['regions']}")


def _covers(regions: Sequence[Region], shape: Sequence[int]) -> bool:
    """Whether the regions are the whole tensor: what no region holds would never be read back."""
    if any(region.dim is None for region in regions):
        return True
    cuts = sorted((region.start, region.start + region.length) for region in regions)
    [dim, *others] = {region.dim for region in regions}
    reached = 0
    for start, stop in cuts:
        if start > reached:
            return False
        reached = max(reached, stop)
    return not others and dim is not None and dim < len(shape) and reached == shape[dim]


def check_coverage(engine: str, received: Sequence[str], metadata: Sequence[TensorMeta]) -> None:
    """The engine got every tensor exactly once (WeightMismatch naming the others)."""
    expected = {meta.name for meta in metadata}
    repeated = sorted({name for name in received if received.count(name) > 1}) if len(received) != len(set(received)) else []
    for problem, names in (
        ("arrived more than once", repeated),
        ("never arrived", sorted(expected - set(received))),
        ("arrived unasked", sorted(set(received) - expected)),
    ):
        if names:
            raise WeightMismatch(f"{engine}: {len(names)} tensors {problem}: {_some(names)}")


def region_digests(tensor: Tensor, entry: Mapping[str, Any]) -> list[str]:
    """Digest of each region of a trainer tensor, as the engines should report it; equal regions are hashed once."""
    rows = [tuple(row) for row in entry["regions"]]
    known = {row: content_digest(tensor, Region.from_json(row)) for row in set(rows)}
    return [known[row] for row in rows]


def readback_names(metadata: Sequence[TensorMeta], sync_index: int, every: int) -> list[str]:
    """Which tensors the `sync_index`-th sync reads back: all at 0, later every `every`-th, a different set each time.

    Any `every` consecutive syncs read each tensor at least once.
    """
    names = [meta.name for meta in metadata]
    return names if sync_index == 0 else names[sync_index % every :: every]


def check_readback(engine: str, expected: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[str]]) -> None:
    """The engine computes with the trainer's numbers, bit for bit (WeightMismatch naming the tensors)."""
    names = [*expected, *(name for name in found if name not in expected)]
    unequal = [name for name in names if list(found.get(name, ())) != list(expected.get(name, ()))]
    if unequal:
        raise WeightMismatch(
            f"{engine}: {len(unequal)} of {len(names)} tensors read back differ from the trainer's: {_some(unequal)}"
        )


def compare_probe(trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> ProbeResult:
    """Largest and mean |difference|. ValueError when the two do not line up."""
    if [len(row) for row in trainer] != [len(row) for row in engine]:
        raise ValueError(f"probe: trainer scored {[len(r) for r in trainer]} tokens, engine {[len(r) for r in engine]}")
    gaps = [abs(a - b) for ours, theirs in zip(trainer, engine, strict=True) for a, b in zip(ours, theirs, strict=True)]
    if not gaps:
        raise ValueError("probe: no token to compare; the probe needs sequences of at least 2 tokens")
    worst = math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)
    return ProbeResult(worst, math.fsum(gaps) / len(gaps))


def check_probe(engine: str, result: ProbeResult, max_nats: float, mean_nats: float | None) -> None:
    """Both engines give the same log-probs to the same tokens (WeightMismatch). NaN fails. mean_nats: None bounds no mean."""
    found = f"{engine}: probe log-probs differ by up to {result.max_nats:.3g} nats (mean {result.mean_nats:.3g});"
    if not result.max_nats <= max_nats:
        raise WeightMismatch(f"{found} sync.probe_max_nats={max_nats:g}")
    if mean_nats is not None and not result.mean_nats <= mean_nats:
        raise WeightMismatch(f"{found} sync.probe_mean_nats={mean_nats:g}")


def check_same_version(versions: Sequence[int]) -> int:
    """The version of all ranks (WeightMismatch when they are not at the same step)."""
    if len(set(versions)) != 1:
        raise WeightMismatch(f"weights: the trainer's ranks are at versions {list(versions)}, rank by rank; they must be at one")
    return versions[0]


def check_version(before: int, after: int) -> None:
    """The policy took no optimizer step while it was being sent (WeightMismatch): the engine would hold parts of both."""
    if before != after:
        raise WeightMismatch(f"weights: the policy went from version {before} to {after} during the sync; sync between steps")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
