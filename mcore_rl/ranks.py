"""Start the ranks of one host, watch them, and leave nothing behind.

Each rank is a process group of its own: Ctrl-C reaches the launcher alone, and whatever a rank started ends with it.
The first failure ends all ranks; the message that comes back names the cause, not the echoes in the other ranks.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mcore_rl.guard import LAUNCHER_PID, read_error
from mcore_rl.progress import PROGRESS_FD, silence
from mcore_rl.run_folder import RunFolder

_POLL_S = 0.1
_SETTLE_S = 0.5
TERM_GRACE_S = 10.0
_LEFTOVER_GRACE_S = 3.0
_STUCK_AFTER_ERROR_S = 15.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: 0, or non-zero and one line that says why."""

    exit_code: int
    message: str = ""


def free_port() -> int:
    """A loopback port nobody listens on, from below the kernel's ephemeral range, so no outgoing connection takes it."""
    for _ in range(200):
        port = random.SystemRandom().randint(20_000, 32_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ValueError("no free loopback port between 20000 and 32000 for the ranks' rendezvous")


def run_ranks(
    command: Sequence[str], *, world: int, folder: RunFolder, env: Mapping[str, str], term_grace_s: float = TERM_GRACE_S
) -> Outcome:
    """Run `command` as `world` ranks until all have ended; env is added to this process' environment.

    term_grace_s: how long a rank may take to clean up after SIGTERM before it is killed.
    stdout and stderr of rank k go to folder.rank_log(k). Returns when no process of any rank is left.
    """
    crew = _Crew(folder, term_grace_s)
    previous = {signum: signal.signal(signum, crew.request_stop) for signum in _STOP_SIGNALS}
    try:
        crew.start(command, world, {**os.environ, **env})
        return crew.watch()
    finally:
        crew.end_all()
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        _show_cursor()


@dataclass
class _Crew:
    folder: RunFolder
    term_grace_s: float
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stop_signal: int | None = None

    def request_stop(self, signum: int, _frame: FrameType | None) -> None:
        self.stop_signal = signum

    def start(self, command: Sequence[str], world: int, env: Mapping[str, str]) -> None:
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            LAUNCHER_PID: str(os.getpid()),
        }
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            terminal = _terminal()
            stack.callback(os.close, terminal)
            for rank in range(world):
                log = stack.enter_context(self.folder.rank_log(rank).open("ab"))
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **({PROGRESS_FD: str(terminal)} if rank == 0 else {})}
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**env, **shared, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(terminal,) if rank == 0 else (),
                        start_new_session=True,
                    )
                )

    def watch(self) -> Outcome:
        while self.stop_signal is None:
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return Outcome(0)
            if any(code not in (None, 0) for code in codes) or self._stuck():
                time.sleep(_SETTLE_S)
                return Outcome(1, self._cause())
            time.sleep(_POLL_S)
        return Outcome(128 + self.stop_signal, f"stopped by {signal.Signals(self.stop_signal).name}")

    def end_all(self) -> None:
        """SIGTERM, then SIGKILL; then whatever the ranks themselves had started."""
        for process in self.processes:
            _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.term_grace_s
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_S)
        for process in self.processes:
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
        deadline = time.monotonic() + _LEFTOVER_GRACE_S
        while time.monotonic() < deadline and any(_signal_group(process.pid, 0) for process in self.processes):
            time.sleep(_POLL_S)
        for process in self.processes:
            _signal_group(process.pid, signal.SIGKILL)

    def _stuck(self) -> bool:
        """A rank said why it ends and then did not end."""
        records = [self.folder.rank_error(rank) for rank in range(len(self.processes))]
        return any(path.exists() and time.time() - path.stat().st_mtime > _STUCK_AFTER_ERROR_S for path in records)

    def _cause(self) -> str:
        """The named error that came first; else a rank killed from outside; else the first other error; else a bare exit code."""
        errors = [error for rank in range(len(self.processes)) if (error := read_error(self.folder.rank_error(rank)))]
        errors.sort(key=lambda error: (error.echo, not error.named, error.time_s))
        if errors and errors[0].named:
            return f"{errors[0].line()}; logs: {self.folder.logs}"
        codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll())}
        killed = [rank for rank, code in codes.items() if code < 0]
        if killed:
            name = signal.Signals(-codes[killed[0]]).name
            why = " (often the kernel, out of memory)" if name == "SIGKILL" else ""
            return f"rank {killed[0]} was killed by {name}{why}; log: {self.folder.rank_log(killed[0])}"
        if errors:
            return f"{errors[0].line()}; traceback: {self.folder.rank_log(errors[0].rank)}"
        rank, code = next(iter(codes.items()))
        return f"rank {rank} exited with code {code}: {_last_line(self.folder.rank_log(rank))}; log: {self.folder.rank_log(rank)}"


def _signal_group(group: int, signum: int) -> bool:
    """Signal a process group; False when it is empty."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:500] if lines else "it printed nothing"


def _terminal() -> int:
    """A descriptor of its own for our stdout; of nothing where that is closed."""
    try:
        return os.dup(sys.stdout.fileno()) if sys.stdout is not None else os.open(os.devnull, os.O_WRONLY)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _show_cursor() -> None:
    """A rank that was killed while it drew a bar has left the cursor hidden."""
    if sys.stdout is None or not sys.stdout.isatty():
        return
    try:
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)
