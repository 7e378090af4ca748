"""What a GPU must show before a run is trusted to it: `python tools/gpu_check.py [--out FILE] [--parts gdn,attention]`.

One GPU, under 8 minutes; needs torch, Triton, transformers, megatron-core and fla-core, no network and no checkpoint.
Every part compares with an independent reference and says what it measured; a part whose package is missing says which.
JSON goes to standard output (or FILE), progress to standard error. Exit status 0: all parts ran and passed; 1: one
failed; 3: nothing failed, but a part could not run. `--device cpu` runs the same parts in small on a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_parts import PARTS, Figures, MissingPackage, Setup

from parallel.groups import destroy_groups, initialize_groups
from parallel.layout import ParallelLayout
from parallel.runtime import start_runtime, stop_runtime

BUDGET_S = 480.0
PACKAGES = ("torch", "triton", "transformers", "megatron-core", "fla-core", "flash-linear-attention", "transformer-engine")


def versions() -> dict[str, str | None]:
    """Installed versions; None where a package is not there."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@contextmanager
def opened(device: str) -> Iterator[Setup]:
    """A world of one rank on the device, and a scratch folder."""
    runtime = start_runtime(device)
    try:
        groups = initialize_groups(ParallelLayout(), 1234)
        try:
            with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
                yield Setup(runtime.device, groups, Path(scratch))
        finally:
            destroy_groups()
    finally:
        stop_runtime()


def run_part(name: str, setup: Setup) -> dict[str, object]:
    """One part: ok, failed (with the reason) or missing (with the package), seconds, peak bytes and its figures."""
    started = time.perf_counter()
    row: dict[str, object] = {"part": name}
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        figures: Figures = PARTS[name](setup)
        row |= {"status": "ok", **figures}
    except MissingPackage as missing:
        row |= {"status": "missing", "reason": str(missing)}
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, OSError, ImportError) as failure:
        row |= {"status": "failed", "reason": f"{type(failure).__name__}: {failure}", "trace": traceback.format_exc(limit=-4)}
    row["seconds"] = round(time.perf_counter() - started, 2)
    if setup.device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
    print(f"[gpu_check] {name}: {row['status']} in {row['seconds']} s {row.get('reason', '')}", file=sys.stderr, flush=True)
    return row


def check(device: str, names: list[str]) -> dict[str, object]:
    """All parts, one after the other; those that no longer fit in the time are named, never left out."""
    started = time.monotonic()
    rows: list[dict[str, object]] = []
    with opened(device) as setup:
        for name in names:
            if time.monotonic() - started > BUDGET_S:
                rows.append({"part": name, "status": "missing", "reason": f"no time left of {BUDGET_S:.0f} s"})
            else:
                rows.append(run_part(name, setup))
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    return {"device": where, "kind": device, "versions": versions(), "parts": rows, "seconds": time.monotonic() - started}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of standard output")
    options = parser.parse_args()
    names = [name for name in options.parts.split(",") if name]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        sys.exit(f"gpu_check: --parts={options.parts}: {unknown[0] if unknown else 'none'} is not one of {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no CUDA device; --device cpu runs the same parts in small")
    report = check(options.device, names)
    text = json.dumps(report, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    parts = report["parts"]
    states = {row["status"] for row in parts} if isinstance(parts, list) else {"failed"}
    sys.exit(1 if "failed" in states else 3 if "missing" in states else 0)


if __name__ == "__main__":
    main()
