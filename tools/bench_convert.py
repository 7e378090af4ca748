"""Conversion part of `make bench`: a random 1.035 B-parameter Qwen3-MoE (2,523 tensors, 2.07 GB, bf16).

In one run, without fsync on either side, each part in a process of its own, in turns, medians of three:
loading into a built Megatron model against transformers' from_pretrained (at most 1.0x), export with save against
save_pretrained (at most 1.0x), the streaming converter each way against a plain read and write of the bytes (at most
2.5x) and its anonymous memory (at most 1 GB above the largest tensor group). Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from bench_idle import say_if_busy, settled_load

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bench_convert"
SOURCE = FOLDER / "checkpoint"
MARK = "BENCH "
NEEDED_BYTES = 14e9
LARGEST_GROUP_BYTES = 32000 * 1024 * 2
MEMORY_BYTES = 1e9 + LARGEST_GROUP_BYTES
# Ours, what it is compared with, how many times as long it may take.
LIMITS = (
    ("load", "from_pretrained", 1.0),
    ("export", "save_pretrained", 1.0),
    ("convert", "copy", 2.5),
    ("convert_back", "copy", 2.5),
)


def run(part: str, source: Path, target: Path) -> dict[str, float]:
    """One measurement in its own process, with nothing left to write by the ones before. SystemExit when it fails."""
    os.sync()
    script = ROOT / "tools" / "bench_convert_case.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), part, str(source), str(target)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if ended.returncode != 0 or not lines:
        raise SystemExit(f"{part} failed:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    found: dict[str, float] = json.loads(lines[-1].removeprefix(MARK))
    print(f"{part:16s} {found['seconds']:6.2f} s  {found['anonymous_peak_bytes'] / 1e9:5.2f} GB anonymous", flush=True)
    return found


def one_round(figures: dict[str, list[dict[str, float]]], *, last: bool) -> None:
    """Every part once, ours next to what it is compared with; the results are removed again."""
    megatron = FOLDER / "megatron"
    for part, source, target in (
        ("copy", SOURCE, FOLDER / "copy"),
        ("convert", SOURCE, megatron),
        ("convert_back", megatron, FOLDER / "back"),
        ("from_pretrained", SOURCE, FOLDER / "none"),
        ("load", SOURCE, FOLDER / "none"),
        ("save_pretrained", SOURCE, FOLDER / "saved"),
        ("export", SOURCE, FOLDER / "exported"),
    ):
        figures.setdefault(part, []).append(run(part, source, target))
        if last and part == "convert":
            figures["fsync"] = [run("fsync", source, target)]
        if target != megatron:
            if part in ("convert_back", "export"):
                compare_files(target)
            shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(megatron)


def compare_files(folder: Path) -> None:
    """The result is the source, byte by byte."""
    for path in sorted(SOURCE.glob("*.safetensors")):
        if subprocess.run(["cmp", "-s", str(path), str(folder / path.name)], check=False).returncode != 0:
            raise SystemExit(f"{folder / path.name} is not {path}")


def report(figures: dict[str, list[dict[str, float]]], load: float) -> bool:
    """Print and write the figures; True when all limits are kept."""
    rounds = len(figures["copy"])
    seconds = {part: statistics.median(row["seconds"] for row in rows) for part, rows in figures.items()}
    peaks = {part: max(row["anonymous_peak_bytes"] for row in rows) for part, rows in figures.items()}
    rows = [(ours, other, limit, seconds[ours] / seconds[other]) for ours, other, limit in LIMITS]
    print(f"\n1.035 B parameters, 2,523 tensors, 2.07 GB bf16; medians of {rounds}, no fsync, one thread")
    say_if_busy(load)
    for ours, other, limit, ratio in rows:
        line = f"{ours:13s} {seconds[ours]:5.2f} s against {other:16s} {seconds[other]:5.2f} s: {ratio:4.2f}x of at most {limit}x"
        print(line + ("" if ratio <= limit else "  MISSED"))
    for part in ("convert", "convert_back"):
        kept = "" if peaks[part] <= MEMORY_BYTES else "  MISSED"
        print(f"{part:13s} {peaks[part] / 1e9:5.2f} GB anonymous of at most {MEMORY_BYTES / 1e9:.2f} GB{kept}")
    print(f"fsync of the converted checkpoint would add {seconds['fsync']:.2f} s")
    kept = all(ratio <= limit for *_, limit, ratio in rows) and max(peaks["convert"], peaks["convert_back"]) <= MEMORY_BYTES
    conditions = {"rounds": rounds, "load_average_before": load, "limits": LIMITS, "memory_limit_bytes": MEMORY_BYTES}
    result = {**conditions, "seconds_median": seconds, "anonymous_peak_bytes": peaks, "all": figures, "kept": kept}
    (FOLDER / "bench_convert.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"figures: {FOLDER / 'bench_convert.json'}")
    return kept


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time checkpoint conversion.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    load = settled_load()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    free = shutil.disk_usage(FOLDER).free
    if free < NEEDED_BYTES:
        raise SystemExit(f"{FOLDER}: {NEEDED_BYTES / 1e9:.0f} GB are needed, {free / 1e9:.1f} GB are free")
    run("make", SOURCE, SOURCE)
    figures: dict[str, list[dict[str, float]]] = {}
    try:
        for number in range(rounds):
            one_round(figures, last=number == rounds - 1)
        kept = report(figures, load)
    finally:
        for path in FOLDER.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
