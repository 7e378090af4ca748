"""The launcher of local ranks: one message, a non-zero exit code, and nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from mcore_rl import launch
from mcore_rl.config.compose import compose_config
from mcore_rl.guard import LAUNCHER_PID
from mcore_rl.ranks import Outcome, free_port

HERE = Path(__file__).parent / "fake_ranks"
ROOT = Path(__file__).parents[2]


def start(folder: Path, plan: str, world: int) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "launcher.py"), str(folder), plan, str(world)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(folder: Path, plan: str, world: int = 2) -> tuple[int, str, str]:
    process = start(folder, plan, world)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def pids(folder: Path) -> list[int]:
    return [int(word) for file in sorted(folder.glob("pids*")) for word in file.read_text().split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def wait_for_ranks(folder: Path, world: int) -> None:
    deadline = time.monotonic() + 90
    while len(list(folder.glob("pids*"))) < world:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    time.sleep(0.3)


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids(folder)):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.05)


def test_ranks_that_end_well(tmp_path):
    code, out, err = run(tmp_path, "0:ok,1:ok")
    assert (code, err) == (0, "\n")
    assert out == "progress of rank 0\n"
    assert "rank 1 of 2" in (tmp_path / "logs/rank1.log").read_text()
    wait_until_gone(tmp_path)


CASES = {
    "named error, the other rank hangs": ("0:value,1:hang", "layout.tp=3 is wrong in two lines [ValueError, rank 0]"),
    "named error under its echo": ("0:echo,1:engine", "engine owned[0] died"),
    "killed rank under its echo": ("0:echo,1:sigkill", "rank 1 was killed by SIGKILL"),
    "plain exit": ("0:hang,1:exit", "rank 1 exited with code 1: bad luck"),
    "a rank that ignores SIGTERM": ("0:deaf,1:value", "layout.tp=3 is wrong"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failing_rank_ends_all(tmp_path, name):
    plan, message = CASES[name]
    code, _, err = run(tmp_path, plan)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1
    if "Error" in message or "engine" in message:
        assert any("Traceback" in file.read_text() for file in (tmp_path / "logs").glob("rank*.log"))
    assert len(pids(tmp_path)) == 4
    wait_until_gone(tmp_path)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_launcher_stops_everything(tmp_path, signum, code):
    process = start(tmp_path, "0:hang,1:hang", 2)
    wait_for_ranks(tmp_path, 2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == f"stopped by {signum.name}\n"
    wait_until_gone(tmp_path)


def test_ranks_die_with_a_killed_launcher(tmp_path):
    process = start(tmp_path, "0:hang,1:deaf", 2)
    wait_for_ranks(tmp_path, 2)
    process.kill()
    process.communicate(timeout=60)
    ranks = [int(file.read_text().split()[0]) for file in tmp_path.glob("pids*")]
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in pids(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_free_ports_differ():
    assert len({free_port() for _ in range(20)}) > 15


def test_ranks_of_a_launcher_without_a_stdout_end_well(tmp_path):
    command = [sys.executable, str(HERE / "launcher.py"), str(tmp_path), "0:ok,1:ok", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    closing = ["sh", "-c", 'exec "$0" "$@" >&-', *command]
    ended = subprocess.run(closing, stderr=subprocess.PIPE, text=True, env=env, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "\n")
    wait_until_gone(tmp_path)


@pytest.mark.parametrize("outcome", [Outcome(0), Outcome(1, "rank 1 exited with code 1")])
def test_a_launcher_nobody_reads_runs_on_and_keeps_its_exit_code(tmp_path, monkeypatch, outcome):
    """Both streams are pipes whose reader is gone (`mcore-rl train 2>&1 | head -1`), and empty when they are closed."""
    monkeypatch.setattr(launch, "validate", lambda *_, **__: None)
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: outcome)
    config = compose_config(["experiment=quickstart", f"out_dir={tmp_path}", "name=unread"])
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.close(reader)
            monkeypatch.setattr(sys, name, stack.enter_context(os.fdopen(writer, "w")))
        assert launch.launch("train", config, ["mcore-rl"]) == outcome.exit_code


def test_a_rank_whose_launcher_is_gone_before_it_looks_ends_itself():
    """The kernel's signal at a parent's end comes only to those who asked for it before."""
    program = "from mcore_rl.guard import die_with_parent; die_with_parent(); print('alive')"
    for launcher, code, said in ((os.getpid(), 0, "alive\n"), (2**22 + 1, -signal.SIGKILL, "")):
        env = {**os.environ, LAUNCHER_PID: str(launcher)}
        ended = subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, said)
