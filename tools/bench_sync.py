"""Weight-sync part of `make bench`: a random 1.035 B-parameter Qwen3-MoE (2,523 tensors, 2.07 GB) in bfloat16.

In one run, same processes and one thread each, in turns, medians of five after one that is not counted: a proved sync
from two trainer ranks (EP=2) without read-back against the floor, the engine loading the same tensors from a segment
that is already full (at most 1.25x); against files on a warm tmpfs and a correct reload (must be faster); against the same
sync without digests, probe and read-back, which tells what the proof costs (median over the rounds, at most a tenth of
the sync). The segment and what the ranks take more than at the start, while they send: at most two buckets. Exit status 1
when one is missed.
vLLM's nccl and ipc transports take the same source on GPUs (tests/engine/test_vllm_transports.py): not run on a GPU.
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
from typing import Any

from bench_convert import MARK, run
from bench_idle import say_if_busy, settled_load

from mcore_rl.ranks import free_port

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bench_sync"
TMPFS = Path("/dev/shm/mcore_rl_bench")
ROUNDS = 6
MOST_OF_FLOOR = 1.25
MOST_PROOF = 0.10
RANKS = 2


def run_ranks(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Both trainer ranks; rank 0 starts the engine. SystemExit naming the log when one fails."""
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    shared |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "THP_MEM_ALLOC_ENABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    shared |= {"LOCAL_WORLD_SIZE": str(RANKS)}
    command = [sys.executable, str(ROOT / "tools" / "bench_sync_case.py"), str(checkpoint), str(TMPFS), str(FOLDER), str(rounds)]
    ranks = []
    for rank in range(RANKS):
        log = (FOLDER / f"rank{rank}.log").open("w") if rank else None  # rank 0 tells how it goes
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True))
    output, _ = ranks[0].communicate()
    for rank in ranks[1:]:
        rank.communicate()
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if any(rank.returncode for rank in ranks) or not lines:
        raise SystemExit(f"bench_sync failed; logs: {FOLDER}/rank1.log, {FOLDER}/engine.log")
    return json.loads(lines[0].removeprefix(MARK))


def report(found: dict[str, Any], load: float) -> bool:
    """Print and write the figures; True when all limits are kept."""
    seconds = {kind: statistics.median(rows[1:] or rows) for kind, rows in found["seconds"].items()}
    stages = {kind: medians(rows[1:] or rows) for kind, rows in found["stages"].items()}
    ratio, files = seconds["sync"] / seconds["floor"], seconds["files"] / seconds["sync"]
    pairs = zip(found["seconds"]["sync"], found["seconds"]["unproved"], strict=True)
    proof = statistics.median([proved - bare for proved, bare in pairs][1:])
    share, allowed = proof / seconds["sync"], 2 * found["bucket_bytes"]
    staged = found["segment_bytes"] + found["sending_bytes"]
    kept = ratio <= MOST_OF_FLOOR and files > 1.0 and share <= MOST_PROOF and staged <= allowed
    print(f"\n{found['tensors']:,} tensors, {found['bytes'] / 1e9:.2f} GB, EP=2, one thread each")
    say_if_busy(load)
    print(f"floor                    {seconds['floor']:6.2f} s")
    print(f"sync without read-back   {seconds['sync']:6.2f} s  {ratio:.2f}x of at most {MOST_OF_FLOOR}x the floor")
    print(f"the same without proof   {seconds['unproved']:6.2f} s")
    print(f"sync with a tenth read   {seconds['sync_sampled']:6.2f} s")
    print(f"sync with full read-back {seconds['sync_full_readback']:6.2f} s")
    print(f"files on tmpfs, reload   {seconds['files']:6.2f} s  {files:.2f}x the sync")
    print(f"proof (digests, probe, one tensor read back) {proof:.2f} s: {share:.0%} of the sync, at most {MOST_PROOF:.0%}")
    print("stages: " + ", ".join(f"{name} {value:.2f} s" for name, value in stages["sync"].items()))
    extra = ", ".join(f"{name} {value / 1e6:.0f} MB" for name, value in found["extra_bytes"].items())
    print(f"extra memory of a whole sync: {extra}")
    print(f"segment and both ranks while sending: {staged / 1e6:.0f} MB of at most two buckets, {allowed / 1e6:.0f} MB")
    print("CUDA transports (ipc, nccl): not run on a GPU")
    result = {**found, "load_average_before": load, "seconds_median": seconds, "stages_median": stages, "kept": kept}
    (FOLDER / "bench_sync.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"figures: {FOLDER / 'bench_sync.json'}")
    return kept


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each stage."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time the weight sync.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    load = settled_load()
    for folder in (FOLDER, TMPFS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    checkpoint = FOLDER / "checkpoint"
    try:
        run("make", checkpoint, checkpoint)
        kept = report(run_ranks(checkpoint, rounds), load)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(TMPFS, ignore_errors=True)
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
