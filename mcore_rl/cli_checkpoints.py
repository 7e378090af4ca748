"""What `mcore-rl convert|verify|inspect|average|reshard|contract` do. Others do the work."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mcore_rl.contract_engines import run_contract
from models.checkpoint_reader import OWN_FILE, is_distributed_checkpoint, stored_digests
from models.convert_average import AverageOptions, average
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_inspect import inspect_checkpoint
from models.convert_megatron import COMPANIONS, ImportOptions
from models.convert_reshard import reshard
from models.convert_staging import Step
from models.convert_verify import compare_forwards, compare_tensors, wrong_digests
from models.registry import read_spec

_QUIET_S = 2.0
DEFAULT_SHARD_GB = 4.0


class Shown:
    """Progress on stderr: a bar on a terminal, a line every two seconds anywhere else. Use it as a context manager."""

    def __init__(self, what: str) -> None:
        """what: stands before the bar."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[sizes]}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)
        self._terminal = console.is_terminal
        self._what, self._start_s, self._last_s = what, time.monotonic(), 0.0

    def __enter__(self) -> Shown:
        if self._terminal:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=None, sizes="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()

    def __call__(self, step: Step) -> None:
        """One more unit is done."""
        sizes = f"{step.done_bytes / 1e9:.2f} of {step.total_bytes / 1e9:.2f} GB"
        if self._terminal:
            self._bar.update(self._task, completed=step.done_bytes, total=step.total_bytes, sizes=f"{step.unit}  {sizes}")
            return
        passed = time.monotonic() - self._start_s
        if passed - self._last_s >= _QUIET_S or step.done_bytes == step.total_bytes:
            self._last_s = passed
            taken = "  (done before)" if step.resumed else ""
            sys.stderr.write(f"[{passed:6.1f}s] {self._what}: {step.unit}  {sizes}{taken}\n")


def _options(arguments: argparse.Namespace, mtp: str = "keep") -> ImportOptions:
    if min(arguments.tp, arguments.etp) < 1:
        raise ValueError(f"--tp {arguments.tp} --etp {arguments.etp}: both must be at least 1")
    return ImportOptions(arguments.tp, arguments.etp, mtp, not arguments.no_fsync)


def convert(arguments: argparse.Namespace) -> int:
    """One direction or the other, by what the source is."""
    with Shown("convert") as shown:
        if is_distributed_checkpoint(arguments.source):
            _refuse(arguments, {"--mtp drop": arguments.mtp == "drop", "--tp": arguments.tp > 1, "--etp": arguments.etp > 1})
            options = ExportOptions(arguments.reference, arguments.text_only, not arguments.no_fsync)
            megatron_to_hf(arguments.source, arguments.target, options, shown)
        else:
            _refuse(arguments, {"--reference": arguments.reference is not None, "--text-only": arguments.text_only})
            hf_to_megatron(arguments.source, arguments.target, _options(arguments, arguments.mtp), shown)
    print(arguments.target)
    return 0


def _refuse(arguments: argparse.Namespace, given: dict[str, bool]) -> None:
    """An option that would have no effect is an error."""
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        kind = "a Megatron checkpoint" if is_distributed_checkpoint(arguments.source) else "a Hugging Face folder"
        raise ValueError(f"{wrong[0]} has no meaning here: {arguments.source} is {kind}")


def verify(arguments: argparse.Namespace) -> int:
    """Bits, digests, forward; 1 when anything differs."""
    with Shown("bits") as shown:
        bits = compare_tensors(arguments.megatron, arguments.hf, shown)
    wrong = list(wrong_digests(arguments.megatron))
    print(f"bits: {bits.tensors - len(bits.different)} of {bits.tensors} tensors are the same" + _first(bits.different))
    print(f"digests: {_about_digests(arguments.megatron, wrong)}")
    if arguments.no_forward:
        return int(bool(bits.different or wrong))
    parity = compare_forwards(arguments.megatron, arguments.hf, read_spec(_configured(arguments)))
    where = parity.first_different_layer()
    print(f"forward: max |log-prob difference| {parity.max_logprob_difference_nats:.1e} nats, greedy tokens", end=" ")
    print("equal" if parity.greedy_equal else "differ", "" if where is None else f", first apart at {where}", sep="")
    same = not bits.different and not wrong and parity.ok
    print("the same model" if same else "NOT the same model")
    return int(not same)


def _about_digests(folder: Path, wrong: list[str]) -> str:
    if stored_digests(folder) is None:
        return f"there are none: {folder} has no {OWN_FILE}"
    return f"{'as written' if not wrong else 'not as written'}{_first(wrong)}"


def _configured(arguments: argparse.Namespace) -> Path:
    own = arguments.megatron / COMPANIONS
    return own if own.is_dir() else arguments.hf


def _first(names: tuple[str, ...] | list[str]) -> str:
    return f"; different: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def inspect(arguments: argparse.Namespace) -> int:
    """A table or JSON."""
    found = inspect_checkpoint(arguments.folder, digests=arguments.digests)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else found.text(), end="\n" if arguments.json else "")
    return 0


def cut_anew(arguments: argparse.Namespace) -> int:
    """The same kind of checkpoint, in other pieces."""
    shard_bytes = arguments.shard_gb * 1e9
    if not math.isfinite(shard_bytes) or shard_bytes < 1:
        raise ValueError(f"--shard-gb {arguments.shard_gb} must be positive, and a number of GB (at least one byte)")
    if is_distributed_checkpoint(arguments.source):
        _refuse(arguments, {"--shard-gb": arguments.shard_gb != DEFAULT_SHARD_GB})
    else:
        _refuse(arguments, {"--tp": arguments.tp > 1, "--etp": arguments.etp > 1})
    with Shown("reshard") as shown:
        reshard(arguments.source, arguments.target, _options(arguments), shard_bytes=int(shard_bytes), report=shown)
    print(arguments.target)
    return 0


def mean(arguments: argparse.Namespace) -> int:
    """Several checkpoints into one."""
    weights = None if arguments.weights is None else tuple(arguments.weights)
    with Shown("average") as shown:
        average(arguments.sources, arguments.target, AverageOptions(weights, not arguments.no_fsync), shown)
    print(arguments.target)
    return 0


def contract(arguments: argparse.Namespace) -> int:
    """Gates and figures, one a line; exit status 1 unless all pass."""
    out = arguments.out or arguments.accelerated / "contract.json"
    result = run_contract(arguments.target, arguments.accelerated, out, responses=arguments.responses)
    for name, gate in result["gates"].items():
        print(f"{name}: {gate['verdict']}  " + "  ".join(f"{key}={value:.4g}" for key, value in gate["figures"].items()))
    print(f"{result['verdict']}: {out}")
    return int(result["verdict"] != "pass")


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": convert,
    "verify": verify,
    "inspect": inspect,
    "average": mean,
    "contract": contract,
    "reshard": cut_anew,
}
