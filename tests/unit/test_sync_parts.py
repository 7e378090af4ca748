"""Buckets, shared memory, digests and the proof's checks, without an engine."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from mcore_rl.sync.buckets import plan_buckets, slot_bytes
from mcore_rl.sync.digest import Region, canonical, content_digest, dtype_from_name, wire_digest
from mcore_rl.sync.proof import (
    check_coverage,
    check_layout,
    check_probe,
    check_readback,
    check_same_version,
    compare_probe,
    readback_names,
    region_digests,
)
from mcore_rl.sync.shm import Segment, sweep
from mcore_rl.types import TensorMeta, WeightMismatch

SIZES = [7, 1, 8, 3, 20, 4]


def metas(sizes):
    return [TensorMeta(f"t{i}", torch.uint8, (size,)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [[0], [1], [2], [3], [4], [5]]),
        (8, [[0], [1], [2], [3], [4], [5]]),
        (19, [[0], [1, 2, 3], [4], [5]]),
        (20, [[0], [1, 2, 3], [4], [5]]),
        (42, [[0, 1], [2, 3, 4, 5]]),
        (43, [[0, 1, 2, 3, 4, 5]]),
        (400, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_buckets_cover_everything_once_in_order(limit, expected):
    plan = plan_buckets(metas(SIZES), limit, align_bytes=1)
    assert [[int(name[1:]) for name in bucket.names] for bucket in plan] == expected
    assert [bucket.index for bucket in plan] == list(range(len(plan)))
    assert slot_bytes(plan) <= max(limit, *SIZES)
    for bucket in plan:
        ends = [slot.offset + slot.meta.nbytes for slot in bucket.slots]
        assert [slot.offset for slot in bucket.slots] == [0, *ends[:-1]]
        assert ends[-1] == bucket.nbytes


def test_a_layer_that_fits_is_not_split():
    """Layers of 30, 30 and 50 bytes, then a tensor of its own: with 45 bytes the last layer cannot stay together."""
    names = ["embed", *(f"model.layers.{layer}.t{i}" for layer in range(3) for i in range(2)), "norm"]
    sizes = [10, 10, 20, 10, 20, 25, 25, 5]
    metadata = [TensorMeta(name, torch.uint8, (size,)) for name, size in zip(names, sizes, strict=True)]
    plan = plan_buckets(metadata, 45, align_bytes=1)
    assert [[names.index(name) for name in bucket.names] for bucket in plan] == [[0], [1, 2], [3, 4], [5], [6, 7]]
    assert [len(bucket.names) for bucket in plan_buckets(metadata, 100, align_bytes=1)] == [1, 4, 3]
    without_embedding = plan_buckets(metadata[1:], 45, align_bytes=1)  # 30 bytes are more than a quarter and stay together
    assert [len(bucket.names) for bucket in without_embedding] == [2, 2, 1, 2]


def test_offsets_are_aligned_and_do_not_overlap():
    plan = plan_buckets([TensorMeta("a", torch.bfloat16, (3, 5)), TensorMeta("b", torch.float64, (2,))], 10_000)
    assert [slot.offset for slot in plan[0].slots] == [0, 64]
    assert plan[0].nbytes == 128


def test_a_plan_refuses_repeated_names_and_no_room():
    with pytest.raises(ValueError, match="'t0' is listed twice"):
        plan_buckets([*metas([1]), *metas([1])], 10)
    with pytest.raises(ValueError, match=r"sync\.bucket_bytes=0"):
        plan_buckets(metas([1]), 0)
    assert plan_buckets([], 10) == ()


def test_two_mappings_see_the_same_bytes_and_the_name_may_go():
    ours = Segment.create(256)
    theirs = Segment.attach(ours.path, 256)
    ours.unlink()
    assert not ours.path.exists()
    value = torch.arange(12, dtype=torch.float32).view(3, 4)
    ours.view(1, 64, torch.float32, (3, 4)).copy_(value)
    seen = theirs.view(1, 64, torch.float32, (3, 4))
    assert torch.equal(seen, value)
    assert theirs.owns(seen[1:])
    assert not theirs.owns(seen.clone())
    assert torch.equal(theirs.view(0, 64, torch.float32, (3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize(("slot", "offset", "count"), [(2, 0, 1), (0, 256, 1), (1, 0, 65), (0, -4, 1)])
def test_nothing_is_written_outside_a_slot(slot, offset, count):
    segment = Segment.create(256)
    segment.unlink()
    with pytest.raises(ValueError, match="leaves the slot of 256 bytes"):
        segment.view(slot, offset, torch.float32, (count,))


def test_too_little_shared_memory_is_named():
    with pytest.raises(ValueError, match=r"needs 2 x 1125899906842624 bytes of shared memory but /dev/shm has \d+ free"):
        Segment.create(2**50)
    assert not list(sweep())


def test_attaching_to_another_segment_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist here: trainer and engine must share one host"):
        Segment.attach(tmp_path / "gone", 64)
    (tmp_path / "short").write_bytes(b"x" * 64)
    with pytest.raises(ValueError, match="holds 64 bytes, 128 are expected"):
        Segment.attach(tmp_path / "short", 64)


def test_what_a_killed_process_left_is_swept():
    code = "import os; from mcore_rl.sync.shm import Segment; print(Segment.create(64).path, flush=True); os.kill(os.getpid(), 9)"
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    assert os.path.exists(left)  # noqa: PTH110 - a name from another process
    mine = Segment.create(64)
    assert not os.path.exists(left)  # noqa: PTH110
    assert mine.path.exists()
    mine.unlink()


def test_a_digest_sees_one_bit_and_the_shape():
    value = torch.arange(6, dtype=torch.float32)
    other = value.clone()
    other.view(torch.int32)[5] ^= 1
    whole = Region(torch.float32)
    assert wire_digest(value) != wire_digest(other)
    assert content_digest(value, whole) != content_digest(other, whole)
    assert content_digest(value.view(2, 3), whole) != content_digest(value.view(3, 2), whole)
    assert content_digest(value.view(2, 3).t(), whole) != content_digest(value.view(3, 2), whole)
    assert content_digest(value, whole) == content_digest(value.clone(), whole)


def test_a_kernel_cannot_show_signed_zeros_or_subnormals():
    whole = Region(torch.float32)
    assert content_digest(torch.tensor([-0.0, 1e-40, 1.0]), whole) == content_digest(torch.tensor([0.0, 0.0, 1.0]), whole)
    assert content_digest(torch.tensor([2e-38]), whole) != content_digest(torch.tensor([0.0]), whole)
    assert content_digest(torch.tensor([math.nan]), whole) != content_digest(torch.tensor([0.0]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_canonical_by_its_definition(dtype):
    """Smaller than the smallest normal number: +0; everything else, NaN and infinities too, bit for bit."""
    tiny = torch.finfo(dtype).tiny
    odd = torch.tensor([0.0, -0.0, tiny, -tiny, tiny / 2, -tiny / 2, math.nan, math.inf, -math.inf, 1.0], dtype=dtype)
    assert odd[4] != 0 and odd[5] != 0
    wanted = odd.clone()
    wanted[torch.tensor([1, 4, 5])] = 0.0
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(canonical(odd).view(bits), wanted.view(bits))
    usual = odd[6:].clone()
    assert torch.equal(canonical(usual).view(bits), usual.view(bits)) and canonical(odd[:0]).numel() == 0


def test_regions_are_what_each_worker_holds():
    value = torch.arange(24, dtype=torch.float32).view(4, 6)
    rows = Region(torch.float32, 0, 2, 2)
    assert Region.from_json(rows.as_json()) == rows
    assert content_digest(value, rows) == content_digest(value[2:].clone(), Region(torch.float32))
    half = content_digest(value, Region(torch.bfloat16, 1, 3, 3))
    assert half == content_digest(value[:, 3:].bfloat16(), Region(torch.bfloat16))
    assert region_digests(value, {"regions": [rows.as_json()]}) == [content_digest(value[2:], Region(torch.float32))]
    with pytest.raises(ValueError, match="ends before"):
        content_digest(value, Region(torch.float32, 0, 3, 2))
    with pytest.raises(ValueError, match="'Tensor' is not a torch dtype"):
        dtype_from_name("Tensor")


@pytest.mark.parametrize(("count", "every"), [(23, 10), (5, 10), (10, 1), (7, 3)])
def test_every_tensor_is_read_back_within_any_window(count, every):
    metadata = metas([1] * count)
    names = {meta.name for meta in metadata}
    assert readback_names(metadata, 0, every) == [meta.name for meta in metadata]
    for start in range(1, 8):
        window = [readback_names(metadata, sync, every) for sync in range(start, start + every)]
        assert set().union(*window) == names
        assert sum(len(part) for part in window) == count


WHOLE = [Region(torch.float32).as_json()]
LAYOUT = {"a": {"shape": [2], "regions": WHOLE}, "b": {"shape": [3, 4], "regions": WHOLE}}


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        ({"a": (2,), "b": (3, 4), "c": (1,)}, "the engine has no such weight: c"),
        ({"a": (2,)}, "the trainer does not offer it: b"),
        ({"a": (2,), "b": (4, 3)}, r"tensor b is \[4, 3\] in the trainer and \[3, 4\] in the engine"),
    ],
)
def test_the_two_sides_must_name_the_same_tensors(offered, message):
    with pytest.raises(WeightMismatch, match=message):
        check_layout("engine", LAYOUT, [TensorMeta(name, torch.float32, shape) for name, shape in offered.items()])


def test_a_tensor_that_no_worker_holds_is_named():
    with pytest.raises(WeightMismatch, match="no worker of the engine holds it: a"):
        check_layout("engine", {"a": {"shape": [2], "regions": []}}, [TensorMeta("a", torch.float32, (2,))])


@pytest.mark.parametrize(
    ("cuts", "whole"),
    [
        ([(0, 0, 4)], True),
        ([(0, 2, 2), (0, 0, 2)], True),
        ([(0, 0, 2), (0, 0, 2), (0, 2, 2)], True),  # a key-value head on two workers
        ([(0, 0, 4), (0, 4, 0)], True),  # a worker with padding only
        ([(1, 0, 8)], True),
        ([(0, 0, 0)], False),
        ([(0, 0, 2)], False),
        ([(0, 0, 1), (0, 2, 2)], False),
        ([(0, 0, 4), (1, 0, 8)], False),
        ([(0, 0, 5)], False),
        ([(2, 0, 4)], False),
    ],
)
def test_the_workers_must_hold_all_of_a_tensor(cuts, whole):
    regions = [Region(torch.float32, *cut).as_json() for cut in cuts]
    layout, offered = {"a": {"shape": [4, 8], "regions": regions}}, [TensorMeta("a", torch.float32, (4, 8))]
    if whole:
        check_layout("engine", layout, offered)
    else:
        with pytest.raises(WeightMismatch, match=r"engine: its workers declare only parts of a \[4, 8\]"):
            check_layout("engine", layout, offered)


def test_ranks_at_different_versions_are_named():
    assert check_same_version([3, 3]) == 3
    with pytest.raises(WeightMismatch, match=r"versions \[3, 2\], rank by rank"):
        check_same_version([3, 2])


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (["t0"], "1 tensors never arrived: t1"),
        (["t0", "t1", "t1"], "arrived more than once: t1"),
        (["t0", "t1", "x"], "arrived unasked: x"),
    ],
)
def test_coverage_names_what_is_off(received, message):
    with pytest.raises(WeightMismatch, match=message):
        check_coverage("engine", received, metas([1, 1]))


def test_read_back_compares_every_region():
    check_readback("engine", {"a": ["1", "2"]}, {"a": ["1", "2"]})
    for found in ({"a": ["1", "3"]}, {"a": ["1"]}, {}):
        with pytest.raises(WeightMismatch, match="1 of 1 tensors read back differ from the trainer's: a"):
            check_readback("engine", {"a": ["1", "2"]}, found)
    with pytest.raises(WeightMismatch, match="1 of 2 tensors read back differ from the trainer's: b"):
        check_readback("engine", {"a": ["1"]}, {"a": ["1"], "b": ["2"]})  # nobody on the trainer's side vouches for b


def test_probe_values():
    result = compare_probe([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-3.25]])
    assert (result.max_nats, result.mean_nats) == (0.5, 0.25)
    check_probe("engine", result, 0.5, None)
    check_probe("engine", result, 0.5, 0.25)
    with pytest.raises(WeightMismatch, match=r"differ by up to 0.5 nats \(mean 0.25\); sync.probe_max_nats=0.4"):
        check_probe("engine", result, 0.4, 0.2)
    with pytest.raises(WeightMismatch, match=r"differ by up to 0.5 nats \(mean 0.25\); sync.probe_mean_nats=0.2"):
        check_probe("engine", result, 0.5, 0.2)


def test_a_probe_of_nan_or_of_nothing_proves_nothing():
    with pytest.raises(WeightMismatch, match="nan"):
        check_probe("engine", compare_probe([[0.0, math.nan]], [[0.0, 0.0]]), 1.0, 1.0)
    with pytest.raises(ValueError, match="no token to compare"):
        compare_probe([], [])
    with pytest.raises(ValueError, match=r"trainer scored \[2\] tokens, engine \[1\]"):
        compare_probe([[0.0, 0.0]], [[0.0]])
