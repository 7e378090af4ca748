"""An engine killed in a generation and one that hangs in a sync: the run goes on, with the same samples as without."""

import re
import signal
import time

import pytest
from chaos_runs import compare, start_held, strike
from cli_runs import CACHE_RESET, FINISHED_LOADING, wait_for_line, wait_for_rows

STEPS = ("train.steps=4", "rollout.max_tokens=60", "rollout.max_model_len=128", "rollout.request_timeout_s=10")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run twice; the second loses its engine twice."""
    folder = tmp_path_factory.mktemp("restarts")
    reference = start_held(folder, "calm", *STEPS)
    code, _, err = reference.finish(240.0)
    assert code == 0, err[-2000:]
    disturbed = start_held(folder, "struck", *STEPS)
    log = disturbed.folder / "logs" / "engine0.log"
    wait_for_rows(disturbed, 1)
    wait_for_line(log, CACHE_RESET)
    time.sleep(0.3)
    killed = strike(disturbed, signal.SIGKILL)
    wait_for_rows(disturbed, 2)
    wait_for_line(log, FINISHED_LOADING)
    stopped = strike(disturbed, signal.SIGSTOP)
    code, out, err = disturbed.finish(240.0)
    assert code == 0, err[-2000:]
    return reference, disturbed, out, (killed, stopped)


def test_every_sample_is_there_once_and_has_the_same_tokens(runs):
    reference, disturbed, _, _ = runs
    found = compare(disturbed, reference)
    assert found.total == 4 * 4 * 2
    assert (found.missing, found.doubled) == ([], [])
    assert found.equal >= 0.99 * found.total, found.different


def test_both_deaths_are_counted_and_said_in_a_line_each(runs):
    _, disturbed, out, _ = runs
    counts = [row["engine/restarts"] for row in disturbed.rows()]
    assert counts[0] == 0 and counts[-1] == 2 and counts == sorted(counts)
    said = [line for line in out.splitlines() if "replaced (death" in line]
    assert len(said) == 2
    assert re.search(r"died during '\w+': killed by SIGKILL.*replaced \(death 1 of at most 3\)", said[0])
    assert re.search(r"did not answer '\w+' within 10 s and was stopped; replaced \(death 2 of at most 3\)", said[1])


def test_a_replacement_is_read_back_in_full_and_at_the_policys_version(runs):
    _, disturbed, _, _ = runs
    rows = disturbed.rows()
    assert [row["version"] for row in rows] == [2, 4, 6, 8]
    assert all(row["sync/readback_tensors"] == row["sync/tensors"] for row in rows)
    assert max(row["delta_max_abs_nats"] for row in rows) <= 1e-3
    assert disturbed.summary()["exit_reason"] == "completed"


def test_nothing_of_the_dead_is_left(runs):
    reference, disturbed, _, pids = runs
    assert len(set(pids)) == 2
    assert reference.leftovers() == disturbed.leftovers() == []
