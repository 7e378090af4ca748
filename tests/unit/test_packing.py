"""Packed micro-batches: every token once, in order, within budget, equal counts."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.packing import DUMMY, pack_micro_batch, plan_micro_batches

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34]


def sequences(lengths):
    return [torch.arange(n) + 100 * (i + 1) for i, n in enumerate(lengths)]


def test_hand_packed_row():
    ids = sequences([2, 3])
    row = pack_micro_batch(ids, [1, 0], multiple=4)
    assert row.token_ids.tolist() == [200, 201, 202, 100, 101, 0, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row.cu_seqlens.tolist() == [0, 3, 5, 8] and row.cu_seqlens.dtype == torch.int32
    assert row.segments == (1, 0, DUMMY)
    assert row.segment_of_token.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert row.max_len == 3 and row.num_tokens == 8
    assert row.real.tolist() == [True] * 5 + [False] * 3


def test_hand_packed_row_of_padded_segments():
    """Context parallel over 2 ranks with sequence parallel over 2: segments of 4, rows of 8 tokens."""
    ids = sequences([2, 5])
    row = pack_micro_batch(ids, [0, 1], multiple=8, segment_multiple=4)
    assert row.token_ids.tolist() == [100, 101, 0, 0, 200, 201, 202, 203, 204, 0, 0, 0, 0, 0, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert row.cu_seqlens.tolist() == [0, 4, 12, 16] and row.segments == (0, 1, DUMMY) and row.used == (2, 5, 0)
    assert row.real.tolist() == [True] * 2 + [False] * 2 + [True] * 5 + [False] * 7
    assert {i: part.tolist() for i, part in row.unpack(row.token_ids).items()} == {0: [100, 101], 1: [200, 201, 202, 203, 204]}


def test_segments_that_do_not_make_a_row_are_refused():
    with pytest.raises(ValueError, match="a multiple of 6 tokens cannot be made of segments of a multiple of 4"):
        pack_micro_batch(sequences([2]), [0], multiple=6, segment_multiple=4)


def test_no_padding_segment_when_it_fits():
    row = pack_micro_batch(sequences([2, 2]), [0, 1], multiple=4)
    assert row.segments == (0, 1)


def test_dummy_micro_batch_belongs_to_nobody():
    row = pack_micro_batch(sequences([5]), [], multiple=2)
    assert row.num_tokens == 2 and row.segments == (DUMMY,) and not row.real.any()
    assert row.unpack(torch.ones(2)) == {}


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("budget", [34, 40, 87, 1000])
@pytest.mark.parametrize(("multiple", "segment_multiple"), [(1, 1), (2, 1), (2, 2)])
def test_round_trip(dp_size, budget, multiple, segment_multiple):
    ids, lengths = sequences(LENGTHS), {"multiple": multiple, "segment_multiple": segment_multiple}
    plan = plan_micro_batches(LENGTHS, dp_size=dp_size, token_budget=budget, **lengths)
    back = {}
    for rank in plan:
        for indices in rank:
            row = pack_micro_batch(ids, indices, **lengths)
            assert row.num_tokens <= budget and row.num_tokens % multiple == 0
            assert all(length % segment_multiple == 0 for length in row.lengths())
            back.update(row.unpack(row.pack([values * 2 for values in ids])))
    assert sorted(back) == list(range(len(ids)))
    assert all(torch.equal(back[i], ids[i] * 2) for i in back)
    assert len({len(rank) for rank in plan}) == 1


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    dp_size=st.integers(1, 4),
    budget=st.integers(60, 200),
    count_multiple=st.integers(1, 3),
)
def test_plan_covers_everything_once(lengths, dp_size, budget, count_multiple):
    plan = plan_micro_batches(lengths, dp_size=dp_size, token_budget=budget, count_multiple=count_multiple)
    flat = [i for rank in plan for one in rank for i in one]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in one) <= budget for rank in plan for one in rank)
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1 and counts.pop() % count_multiple == 0
    assert plan == plan_micro_batches(lengths, dp_size=dp_size, token_budget=budget, count_multiple=count_multiple)


def test_more_ranks_than_sequences_gives_dummies():
    plan = plan_micro_batches([4, 4], dp_size=4, token_budget=8)
    assert sorted(plan) == [((),), ((),), ((0,),), ((1,),)]


def test_long_tail_is_balanced_and_full():
    rng = random.Random(0)
    lengths = [min(4096, int(rng.lognormvariate(5.5, 1.0)) + 1) for _ in range(4096)]
    plan = plan_micro_batches(lengths, dp_size=8, token_budget=16384)
    per_rank = [sum(lengths[i] for one in rank for i in one) for rank in plan]
    assert max(per_rank) / (sum(per_rank) / 8) <= 1.03
    assert sum(per_rank) / (8 * len(plan[0]) * 16384) >= 0.9


@pytest.mark.parametrize(
    ("lengths", "needle"), [([], "0 sequences"), ([3, 0], "sequence 1 has 0"), ([9, 17], "sequence 1 has 17")]
)
def test_refusals(lengths, needle):
    with pytest.raises(ValueError, match=needle):
        plan_micro_batches(lengths, dp_size=1, token_budget=17, multiple=2)


def test_a_sequence_that_is_too_long_once_padded():
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens \(12 with padding\), more than .* \(8 after rounding"):
        plan_micro_batches([3, 9], dp_size=1, token_budget=11, multiple=4, segment_multiple=4)
