"""Runs the sections of `make test` one after the other, with headings and times: `python tools/run_tests.py lint unit`.

Every section runs even if an earlier one failed; the exit status is 1 if any did. A section whose files do not
exist yet says so and fails: nothing is claimed that is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("basedpyright",),
    ("lint-imports",),
)
TESTS = {
    "unit": ("tests/unit",),
    "dist": ("tests/dist",),
    "engine": ("tests/engine",),
    "chaos": (
        "tests/engine/test_sync_faults.py",
        "tests/unit/test_sync_deaths.py",
        "tests/unit/test_sync_url_faults.py",
        "tests/engine/test_when_engines_die.py",
    ),
    "soak": ("tests/soak",),
    "long": ("tests/dist", "tests/engine"),
}
# Tests marked `long` repeat on more models or layouts what a shorter one shows; they run with the soak.
MARKED = {"unit": "not long", "dist": "not long", "engine": "not long", "long": "long"}
SCRIPTS = {
    "parity": "tools/parity.py",
    "bench": "tools/bench.py",
    "bench_convert": "tools/bench_convert.py",
    "bench_sync": "tools/bench_sync.py",
    "bench_logprob": "tools/bench_logprob.py",
    "bench_packing": "tools/bench_packing.py",
}
WIDTH = 78
FAULT_TABLE = ROOT / "runs" / "chaos" / "faults.jsonl"
FEWEST_FAULTS = 30


@dataclass(frozen=True)
class Result:
    """How one section ended."""

    section: str
    ok: bool
    seconds: float


def heading(text: str) -> None:
    """A line that is easy to find in a long log."""
    print(f"\n== {text} {'=' * max(0, WIDTH - len(text) - 4)}", flush=True)


def run(command: list[str]) -> bool:
    """Runs a command from the repository root; its output goes straight through."""
    print(f"$ {' '.join(command)}", flush=True)
    return subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode == 0


def lint() -> bool:
    """All linters, every one even if an earlier one complained."""
    failed = [command for command in LINT if not run(list(command))]
    return not failed


def pytest(section: str) -> bool:
    """A section's tests, those of unit and dist on two workers. None found is a failure: pytest's exit status 5."""
    # Engines and whole runs fill the cores by themselves.
    workers = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "loadgroup"] if section in ("unit", "dist") else []
    marked = ["-m", MARKED[section]] if section in MARKED else []
    extra = ["--durations=5", *os.environ.get("PYTEST_ARGS", "").split()]
    return run(["python", "-m", "pytest", *TESTS[section], *workers, *marked, *extra])


def run_section(section: str) -> bool:
    """True when the section is there and passed."""
    if section == "lint":
        return lint()
    targets = TESTS.get(section) or (SCRIPTS[section],)
    missing = [target for target in targets if not (ROOT / target).exists()]
    if missing:
        print(f"{section}: nothing to run yet, {', '.join(missing)} does not exist")
        return False
    if section == "chaos":
        return chaos()
    return pytest(section) if section in TESTS else run(["python", *targets])


def chaos() -> bool:
    """Break syncs and engines; every fault a test saw caught is a row of the table. Too few rows are a failure."""
    FAULT_TABLE.parent.mkdir(parents=True, exist_ok=True)
    FAULT_TABLE.unlink(missing_ok=True)
    os.environ["MCORE_RL_FAULT_TABLE"] = str(FAULT_TABLE)
    passed = pytest("chaos")
    lines = FAULT_TABLE.read_text(encoding="utf-8").splitlines() if FAULT_TABLE.exists() else []
    rows = {row["fault"]: row for row in map(json.loads, lines)}
    print(f"\n{'fault':72s} {'caught by':14s} seconds")
    for row in rows.values():
        print(f"{row['fault']:72s} {row['caught']:14s} {row['seconds']:7.2f}")
    print(f"{len(rows)} distinct faults, each caught and named; at least {FEWEST_FAULTS} are asked; rows: {FAULT_TABLE}")
    return passed and len(rows) >= FEWEST_FAULTS


def main() -> None:
    """Command line."""
    known = ["lint", *TESTS, *SCRIPTS]
    sections = sys.argv[1:]
    unknown = [name for name in sections if name not in known]
    if unknown or not sections:
        sys.exit(f"run_tests.py: sections are {', '.join(known)}; got {' '.join(sections) or 'none'}")
    results = []
    for index, section in enumerate(sections, start=1):
        heading(f"{index}/{len(sections)} {section}")
        started = time.monotonic()
        ok = run_section(section)
        results.append(Result(section, ok, time.monotonic() - started))
    total = sum(result.seconds for result in results)
    heading(f"total {total:.0f} s, Python {sys.version.split()[0]}")
    for result in results:
        print(f"{result.section:13s} {'ok' if result.ok else 'FAILED':8s} {result.seconds:6.0f} s")
    sys.exit(0 if all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
