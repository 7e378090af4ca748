"""Engine processes that do not outlive what started them, whatever ends it."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

ROOT_VARIABLE = "MCORE_RL_ENGINE_ROOT"
_POLL_S = 0.5


def become_root() -> None:
    """Mark this process as the one whose end ends every vLLM process below it."""
    os.environ[ROOT_VARIABLE] = str(os.getpid())


def follow_root() -> None:
    """In a vLLM worker: end this process and the engine core above it when the marked process is gone.

    vLLM alone leaves engine core and workers behind when its API server is killed.
    """
    root = int(os.environ.get(ROOT_VARIABLE, "0"))
    if root not in (0, os.getpid()):
        threading.Thread(target=_watch_root, args=(psutil.Process(root),), daemon=True).start()


def _watch_root(root: psutil.Process) -> None:
    core = os.getppid()
    while _lives(root):
        time.sleep(_POLL_S)
    if os.getppid() == core != root.pid:
        os.kill(core, signal.SIGKILL)
    os._exit(1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
