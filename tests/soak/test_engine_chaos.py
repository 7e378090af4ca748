"""An engine killed or stopped at 20 random moments of a 30-step run with held weights. About a quarter of an hour."""

import random
import signal
import statistics

import pytest
from chaos_runs import compare, start_held, strike_after, table

from mcore_rl.progress import stage_seconds

STRIKES, STEPS = 20, 30
RUN = (
    f"train.steps={STEPS}",
    "rollout.max_tokens=60",
    "rollout.max_model_len=128",
    "rollout.request_timeout_s=10",
    "rollout.start_timeout_s=120",
    f"rollout.max_engine_restarts={2 * STRIKES}",
)
CALM_LIMIT_S, STEP_LIMIT_S = 900.0, 600.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the run draws when nobody disturbs it."""
    run = start_held(tmp_path_factory.mktemp("calm"), "calm", *RUN)
    code, _, err = run.finish(CALM_LIMIT_S)
    assert code == 0, err[-2000:]
    return run


@pytest.mark.timeout(1800)
def test_two_engines_draw_the_same_and_one_death_is_taken_over(tmp_path, reference):
    run = start_held(tmp_path, "two", *RUN, "rollout.engines=2")
    struck = strike_after(run, 1, signal.SIGKILL, steps=10, delay_s=0.3, limit_s=STEP_LIMIT_S)
    code, _, err = run.finish(CALM_LIMIT_S)
    assert code == 0, err[-2000:]
    found = compare(run, reference)
    assert (found.total, found.missing, found.doubled) == (STEPS * 4 * 2, [], [])
    assert found.equal >= 0.99 * found.total, found.different
    assert (run.rows()[-1]["engine/restarts"], run.rows()[-1]["engine/alive"]) == (1, 2)
    assert struck.recovered_s < STEP_LIMIT_S
    assert run.leftovers() == []


@pytest.mark.timeout(3600)
def test_twenty_deaths_cost_no_sample(tmp_path, capsys, reference):
    chance = random.Random(5)
    moments = sorted(chance.sample(range(1, STEPS), STRIKES))
    # Within a step: a later strike would let steps go by, and 20 of 29 moments must be struck.
    step_s = statistics.median(sum(stage_seconds(row).values()) for row in reference.rows())
    disturbed = start_held(tmp_path, "struck", *RUN)
    strikes = []
    for number, step in enumerate(moments, start=1):
        signum = chance.choice((signal.SIGKILL, signal.SIGSTOP))
        delay_s = chance.uniform(0.0, step_s)
        strikes.append(strike_after(disturbed, number, signum, steps=step, delay_s=delay_s, limit_s=STEP_LIMIT_S))
        if disturbed.process.poll() is not None:
            break
    code, _, err = disturbed.finish(STEP_LIMIT_S)
    found = compare(disturbed, reference)
    with capsys.disabled():
        print("\n" + table(strikes))
        print(f"{found.equal} of {found.total} completions equal the undisturbed run's")
        print("\n".join(found.different))
    assert code == 0, err[-2000:]
    assert disturbed.rows()[-1]["engine/restarts"] >= len(strikes) == STRIKES
    assert (len(disturbed.rows()), found.total) == (STEPS, STEPS * 4 * 2)
    assert (found.missing, found.doubled) == ([], [])
    assert found.equal >= 0.99 * found.total, found.different
    assert disturbed.leftovers() == []
