"""What a person sees while a run works: a bar on a terminal, one plain line per event anywhere else.

The ranks' own stdout and stderr go to their log files, so the launcher hands rank 0 a file descriptor of its terminal
in MCORE_RL_PROGRESS_FD; without it (under torchrun) stdout is used.
"""

from __future__ import annotations

import fcntl
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PROGRESS_FD = "MCORE_RL_PROGRESS_FD"
TEACHER_KL = "teacher_kl_nats/"
"""A distillation's divergence, one number per update."""
_COLUMNS = (
    SpinnerColumn(),
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


def progress_stream() -> TextIO:
    """Where progress goes in this process. A descriptor that cannot be written to is named in a warning and not used."""
    number = os.environ.get(PROGRESS_FD)
    if number is not None:
        try:
            return _opened(int(number))
        except (ValueError, OverflowError, OSError) as error:
            say(f"{PROGRESS_FD}={number!r} is no open file descriptor to write to ({error}); progress goes to stdout", sys.stderr)
    return Path(os.devnull).open("w", encoding="utf-8") if sys.stdout is None else sys.stdout


def _opened(descriptor: int) -> TextIO:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise ValueError("it is open for reading alone")
    return os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)


def say(line: str, stream: TextIO | None) -> None:
    """One line for a person. A stream that is closed, or that nobody reads any more, takes it and all that follow silently."""
    if stream is None:
        return
    try:
        stream.write(line + "\n")
        stream.flush()
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """What is still in the buffer and all that follows goes nowhere: it would fail again, at the latest when the process ends."""
    with suppress(OSError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def step_line(step: int, total_steps: int, metrics: Mapping[str, float | list[float]], *, held_out: float | None = None) -> str:
    """`step 3/20  reward 0.41  accuracy 0.40  |delta| 2e-06 nats (max 1e-05)  rollout 1.2s ... = 4.3s`."""
    width = len(str(total_steps))
    parts = [f"step {step + 1:>{width}}/{total_steps}", f"reward {_number(metrics, 'reward_mean')}"]
    parts.append(f"accuracy {_number(metrics, 'accuracy')}" + ("" if held_out is None else f" (held-out {held_out:.3f})"))
    mean, peak = metrics.get("delta_mean_abs_nats"), metrics.get("delta_max_abs_nats")
    if isinstance(mean, float) and isinstance(peak, float):
        parts.append(f"|delta| {mean:.1e} nats (max {peak:.1e})")
    divergences = [value for name, value in metrics.items() if name.startswith(TEACHER_KL) and isinstance(value, float)]
    if divergences:
        parts.append(f"KL to teacher {' '.join(f'{value:.4f}' for value in divergences)} nats")
    seconds = stage_seconds(metrics)
    if seconds:
        parts.append(" ".join(f"{name} {value:.1f}s" for name, value in seconds.items()) + f" = {sum(seconds.values()):.1f}s")
    return "  ".join(parts)


def stage_seconds(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Stage -> seconds of one step, from its `seconds/<stage>` metrics."""
    prefix = "seconds/"
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix) and isinstance(value, float)
    }


class Progress:
    """A telemetry sink for eyes. Use it as a context manager or call `close`.

    It falls silent when its stream is closed (`mcore-rl train | head`): nobody looks any more, and the run goes on.
    """

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, enabled: bool = True) -> None:
        """total_steps: rollout batches. enabled False shows nothing (telemetry.progress)."""
        self._total = total_steps
        self._stream = stream or progress_stream()
        self._enabled = enabled
        self._start_s = time.monotonic()
        self._held_out: float | None = None
        self._console = Console(file=self._stream, soft_wrap=True, highlight=False)
        self._bar: Bar | None = None
        if enabled and self._console.is_terminal:
            self._bar = Bar(*_COLUMNS, console=self._console, refresh_per_second=2, transient=True)
            self._task = self._bar.add_task("starting", total=None)
            with self._while_open():
                self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self, text: str) -> None:
        """One permanent line with the time since the start."""
        if not self._enabled:
            return
        stamped = f"[{time.monotonic() - self._start_s:6.1f}s] {text}"
        with self._while_open():
            if self._bar is not None:
                self._bar.console.print(stamped, markup=False)
            else:
                self._stream.write(stamped + "\n")
                self._stream.flush()

    def phase(self, name: str, total: int | None = None) -> None:
        """A new phase (building, warm-up, evaluation, training) of `total` steps begins."""
        self.line(name if total is None else f"{name} ({total} steps)")
        self._show(name, 0, total)

    def advance(self, name: str, done: int, total: int | None = None) -> None:
        """Move the bar without a permanent line."""
        self._show(name, done, total)

    def evaluation(self, label: str, accuracy: float, half_width: float, prompts: int) -> None:
        """A held-out evaluation is in; later step lines repeat its accuracy."""
        self._held_out = accuracy
        self.line(f"held-out accuracy, {label}: {accuracy:.3f} +- {half_width:.3f} ({prompts} prompts)")

    def log_step(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """One line per training step."""
        self.line(step_line(step, self._total, metrics, held_out=self._held_out))
        self._show("training", step + 1, self._total)

    def log_rollouts(self, step: int, records: Sequence[dict[str, object]]) -> None:
        """Rollouts are not shown."""

    def finish(self, places: Mapping[str, Path | str], headline: str = "") -> None:
        """The last lines: what came out and where everything is."""
        self._stop_bar()
        if headline:
            self.line(headline)
        width = max((len(name) for name in places), default=0)
        for name, place in places.items():
            self.line(f"{name:<{width}}  {place}")
        self.close()

    def close(self) -> None:
        """Give the terminal back. Twice is fine."""
        self._stop_bar()
        with self._while_open():
            self._stream.flush()

    def _show(self, name: str, done: int, total: int | None) -> None:
        if self._bar is not None:
            with self._while_open():
                self._bar.update(self._task, description=name, completed=done, total=total)

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._while_open():
                bar.stop()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Run the body; when the stream turns out to be closed, show nothing from now on."""
        try:
            yield
        except OSError:
            self._enabled, self._bar = False, None
            silence(self._stream)


def _number(metrics: Mapping[str, float | list[float]], name: str) -> str:
    value = metrics.get(name, math.nan)
    return f"{value:.3f}" if isinstance(value, int | float) and math.isfinite(value) else "-"
