"""Reward processes: what hangs, crashes, raises or answers nonsense costs its own sample; the pool goes on."""

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.rewards.pool import RewardPool
from mcore_rl.rewards.process import CallSpec

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(autouse=True)
def reward_functions_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]))


def pool(name, *, workers=2, limit_s=5.0):
    return RewardPool(CallSpec(f"reward_functions:{name}", limit_s), workers)


def samples(*texts):
    return [{"text": text} for text in texts]


def children():
    return [p for p in psutil.Process().children(recursive=True) if "mcore_rl.rewards.worker" in " ".join(p.cmdline())]


def test_endless_c_code_from_a_thread_costs_its_samples_alone():
    """16 samples, 3 that never return, limit 1 s: over in seconds, and the next batch works."""
    texts = [str(i) for i in range(16)]
    for bad in (2, 7, 13):
        texts[bad] = "hang"
    made, seen = pool("echo", limit_s=1.0), []

    def work():
        begun = time.monotonic()
        seen.append(made.ask_all(samples(*texts)))
        seen.append(time.monotonic() - begun)
        seen.append(made.ask_all(samples("1", "2")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    first, seconds, second = seen
    assert [i for i, reply in enumerate(first) if reply.failure] == [2, 7, 13]
    assert {first[i].failure for i in (2, 7, 13)} == {"timeout"}
    assert [reply.value for reply in first if not reply.failure] == [float(i) for i in range(16) if i not in (2, 7, 13)]
    assert seconds < 10
    assert [reply.value for reply in second] == [1.0, 2.0]
    assert made.restarts == 3
    made.close()
    assert children() == []


def test_every_way_to_fail_is_named():
    made = pool("echo", limit_s=0.5)
    replies = made.ask_all(samples("1", "exit", "raise", "sleep", "2"))
    made.close()
    assert [reply.failure for reply in replies] == [None, "crash", "error", "timeout", None]
    assert "exit code 3" in replies[1].detail
    assert "KeyError: 'no such unit test'" in replies[2].detail
    assert "reward_functions.py:" in replies[2].detail
    assert "0.5 s" in replies[3].detail
    assert made.restarts == 2  # raising costs no process


def test_results_that_are_no_json_value_are_unusable_and_numpy_numbers_are_numbers():
    made = pool("odd", workers=1)
    replies = made.ask_all(samples("object", "float32", "int64", "none", "nan", "text"))
    made.close()
    assert replies[0].failure == "unusable"
    assert [reply.value for reply in replies[1:4]] == [0.25, 2.0, None]
    assert replies[4].value != replies[4].value
    assert replies[5].value == "1.0"


def test_what_a_function_prints_is_no_reply(tmp_path):
    made = RewardPool(CallSpec("reward_functions:chatty", 5.0, log=tmp_path / "reward.log"), 1)
    assert [reply.value for reply in made.ask_all(samples("abc", "de"))] == [3, 2]
    made.close()
    assert "hello" in (tmp_path / "reward.log").read_text()


def test_a_child_left_behind_neither_hangs_the_pool_nor_stays():
    made = pool("forks", workers=1)
    begun = time.monotonic()
    first, second = made.ask_all(samples("fork", "x"))
    assert (first.failure, second.value) == ("crash", 1.0)
    made.close()
    assert time.monotonic() - begun < 10
    assert children() == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("reward_functions:nowhere", "no function 'nowhere'"),
        ("reward_functions:not_a_function", "no function 'not_a_function'"),
        ("no_such_module:reward", "No module named 'no_such_module'"),
        ("reward_functions", "not of the form package.module:name"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_once(target, message):
    made = RewardPool(CallSpec(target, 5.0), 2)
    with pytest.raises(RuntimeError, match=message):
        made.check()
    with pytest.raises(RuntimeError, match=message):
        made.ask_all(samples("1"))
    assert children() == []


def test_order_is_kept_and_processes_are_shared():
    made = pool("echo")
    made.check()
    assert [reply.value for reply in made.ask_all(samples(*map(str, range(40))))] == [float(i) for i in range(40)]
    assert len(children()) == 2
    assert made.ask_all([]) == []
    made.close()
