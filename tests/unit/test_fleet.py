"""Several engines as one: who is asked what, and what a death costs. Engines are stubs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from fleet_stubs import PROMPTS, SAMPLING, TENSORS, VALUES, Made, Source, drawn, expected

from mcore_rl.rollout.fleet import deal
from mcore_rl.rollout.sampling import sample_seed
from mcore_rl.types import EngineDied, StaleRollout, WeightMismatch


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_prompts_are_spread_and_come_back_in_order(count):
    made = Made(count).synced()
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()
    shares = [engine.asked[0] for engine in made.engines if engine.asked]
    assert sorted(name for share in shares for name in share) == sorted(p.prompt_id for p in PROMPTS)
    assert len(shares) == min(count, 7) and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_deal():
    assert deal([3, 4, 5], 2) == [[3], [4, 5]]
    assert deal([3], 4) == [[3]]
    assert deal(range(10), 4) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_the_others_finish_what_a_dead_engine_was_asked():
    made = Made(3).synced()
    made.engines[1].dies_in = "generate"
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()
    lost = made.engines[1].asked[0]
    again = made.engines[0].asked[1] + made.engines[2].asked[1]
    assert sorted(again) == sorted(lost)
    assert (made.fleet.losses, made.engines[1].closed, len(made.fleet.members)) == (1, True, 2)


def test_a_replacement_gets_a_full_sync_before_its_first_sample():
    made = Made(1).synced()
    made.engines[0].dies_in = "generate"
    with pytest.raises(EngineDied, match=r"engine0\.0 died during 'generate'"):
        made.fleet.generate(PROMPTS, SAMPLING)
    [line] = made.recover()
    assert "engine0.0 died during 'generate'; replaced (death 1 of at most 3)" in line
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()
    assert [engine.version for engine in made.engines] == [3, 3]
    assert len(made.engines[1].asked) == 1


def test_a_replacement_that_was_not_synced_refuses():
    made = Made(1).synced()
    made.engines[0].dies_in = "generate"
    with pytest.raises(EngineDied):
        made.fleet.generate(PROMPTS, SAMPLING)
    made.fleet.refresh()
    assert made.fleet.version is None
    with pytest.raises(StaleRollout):
        made.fleet.generate(PROMPTS, SAMPLING)


STEPS = ["attach", "begin", "load t0", "load t4", "finish", "readback", "reset_prefix_cache", "score", "commit"]


@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_death_anywhere_in_a_sync(call, count):
    """No engine keeps a version; the retry is complete and everybody's, and nothing of the first try is left."""
    made = Made(count).synced()
    made.engines[-1].dies_in = call
    made.sync.renew()
    with pytest.raises(EngineDied, match=f"died during '{call}'"):
        made.sync.sync(Source(), lambda: VALUES)
    assert made.fleet.version is None
    for engine in made.engines:
        engine.emptied.clear()
    made.recover()
    assert made.fleet.version == 3
    assert len(made.engines) == count + 1
    living = [engine for engine in made.engines if not engine.closed]
    assert [engine.emptied for engine in living] == [[(5, None)]] * count  # each cache after its last tensor, before its version
    assert all(torch.equal(engine.held[name], tensor) for engine in living for name, tensor in TENSORS.items())
    assert drawn(made.fleet.generate(PROMPTS, SAMPLING)) == expected()


def test_engines_are_started_by_the_main_thread_alone():
    """A child dies with the thread that started it."""
    made = Made(2).synced()
    made.engines[0].dies_in = "generate"
    made.fleet.generate(PROMPTS, SAMPLING)
    made.recover()
    assert set(made.threads) == {threading.main_thread()} and len(made.threads) == 3


@pytest.mark.parametrize("most", [0, 2])
def test_deaths_are_counted_and_the_last_one_ends_the_run(most):
    made = Made(1, max_restarts=most).synced()
    for _ in range(most):
        made.engines[-1].dies_in = "generate"
        with pytest.raises(EngineDied):
            made.fleet.generate(PROMPTS, SAMPLING)
        made.recover()
    made.engines[-1].dies_in = "generate"
    with pytest.raises(EngineDied, match=rf"engine0\.{most} died during 'generate'"):
        made.fleet.generate(PROMPTS, SAMPLING)
    assert not made.fleet.survives()
    with pytest.raises(EngineDied, match=rf"engine0\.{most} died during 'generate'"):
        made.fleet.refresh()


def test_with_zero_restarts_the_others_do_not_go_on():
    made = Made(2, max_restarts=0).synced()
    made.engines[1].dies_in = "generate"
    with pytest.raises(EngineDied, match=r"engine1\.1"):
        made.fleet.generate(PROMPTS, SAMPLING)


def test_an_engine_that_cannot_start_is_not_tried_again():
    made = Made(2)
    made.engines[1].dies_in = "wait_ready"
    with pytest.raises(EngineDied, match="during 'wait_ready'"):
        made.synced()
    assert not made.fleet.survives()


def test_every_engine_is_proved_and_the_wrong_one_is_named():
    made = Made(3)
    made.engines[1].wrong = True
    with pytest.raises(WeightMismatch, match=r"^engine1\.1: 1 of 5 tensors read back differ from the trainer's: t2$"):
        made.synced()
    assert made.fleet.version is None


def test_all_engines_load_a_bucket_before_its_slot_is_written_again():
    """The slow engine sees what was sent, not what came two buckets later; both load at the same time."""
    made = Made(2)
    load, spans = made.engines[1].load, []

    def slow(slot, tensors):
        time.sleep(0.05)
        spans.append(tensors[0][0])
        load(slot, tensors)

    made.engines[1].load = slow
    made.synced()
    assert spans == [f"t{i}" for i in range(5)]
    assert all(torch.equal(made.engines[1].held[name], tensor) for name, tensor in TENSORS.items())


def test_a_death_between_two_questions_is_noticed_before_the_sync():
    made = Made(2).synced()
    made.engines[0].dies_in = "same_process"
    [line] = made.fleet.refresh()
    assert "engine0.0 died during 'same_process'; replaced (death 1 of at most 3)" in line
    assert len(made.engines) == 3 and made.fleet.version is None


def test_seeds_differ_by_prompt_sample_and_step_and_not_by_engine():
    """8 samples of 20 prompts at 6 steps: 960 seeds; the same again; none of them under another base seed."""

    def seeds(base):
        return [sample_seed(base * 1_000_003 + s, f"p{p}", i) for s in range(6) for p in range(20) for i in range(8)]

    assert len(set(seeds(1))) == 960
    assert seeds(1) == seeds(1)
    assert not set(seeds(2)) & set(seeds(1))
    two, one = Made(2).synced(), Made(1).synced()
    assert two.fleet.generate(PROMPTS, SAMPLING) == one.fleet.generate(PROMPTS, SAMPLING)
