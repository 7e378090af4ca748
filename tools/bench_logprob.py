"""Log-prob and entropy with their backward pass: ours from hidden states against [T, V] logits, fp32, in turns.

python tools/bench_logprob.py [--tokens 4096 --vocab 151936 --hidden 896 --rounds 3]

Each run is a process of its own. Memory is the peak of resident memory above what was resident with the inputs in place,
less the weight's gradient, which both sides must hold. Time is of forward and backward together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench_idle import say_if_busy, settled_load

from parallel.vocab import Readout, linear_logprob_entropy

MOST_MEMORY, MOST_TIME = 0.06, 1.1
CORES = len(os.sched_getaffinity(0))


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(side: str, sizes: argparse.Namespace) -> dict[str, float]:
    """One forward and backward pass of one side in this process."""
    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden).requires_grad_()
    weight = (0.02 * torch.randn(sizes.vocab, sizes.hidden)).requires_grad_()
    targets = torch.randint(0, sizes.vocab, (sizes.tokens,))
    warm = torch.randn(64, 64)
    (warm @ warm).sum().item()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, start = resident("VmRSS"), time.perf_counter()
    if side == "ours":
        logprob, entropy = linear_logprob_entropy(hidden, weight, targets, Readout(sizes.vocab))
        entropy = entropy.detach()
    else:
        scores = (hidden @ weight.T).log_softmax(-1)
        logprob = scores.gather(1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(scores.exp() * scores).sum(-1)
    (-logprob.mean()).backward()
    seconds, gradient = time.perf_counter() - start, weight.numel() * weight.element_size()
    if weight.grad is None:
        raise RuntimeError("the weight got no gradient")
    return {
        "seconds": seconds,
        "extra_bytes": resident("VmHWM") - before - gradient,
        "logprob_sum": float(logprob.detach().double().sum()),
        "entropy_sum": float(entropy.double().sum()),
        "gradient_norm": float(weight.grad.double().norm()),
    }


def alternating(sizes: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """rounds x (naive, ours), each in a fresh process. RuntimeError with its last line when one fails."""
    found: dict[str, list[dict[str, float]]] = {"naive": [], "ours": []}
    flags = [f"--{name}={vars(sizes)[name]}" for name in ("tokens", "vocab", "hidden")]
    for _ in range(sizes.rounds):
        for side, runs in found.items():
            command = [sys.executable, __file__, f"--side={side}", *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
            if done.returncode:
                raise RuntimeError(f"{side} failed ({done.returncode}): {(done.stderr or 'no message').splitlines()[-1]}")
            runs.append(json.loads(done.stdout))
            print(
                f"{side:6s} {runs[-1]['seconds']:7.1f} s  {runs[-1]['extra_bytes'] / 2**20:8.0f} MiB above the live set",
                flush=True,
            )
    return found


def same_numbers(found: dict[str, list[dict[str, float]]]) -> bool:
    """Both sides computed the same thing: sums and gradient norm within 1e-5."""
    naive, ours = found["naive"][0], found["ours"][0]
    names = ("logprob_sum", "entropy_sum", "gradient_norm")
    return all(abs(naive[name] - ours[name]) <= 1e-5 * abs(naive[name]) for name in names)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 4096), ("vocab", 151_936), ("hidden", 896), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--side", choices=("naive", "ours"))
    sizes = parser.parse_args()
    if sizes.side:
        sys.stdout.write(json.dumps(measure(sizes.side, sizes)))
        return
    load = settled_load()
    found = alternating(sizes)
    medians = {side: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for side, runs in found.items()}
    memory = medians["ours"]["extra_bytes"] / medians["naive"]["extra_bytes"]
    seconds = medians["ours"]["seconds"] / medians["naive"]["seconds"]
    say_if_busy(load)
    print(f"T={sizes.tokens} V={sizes.vocab} H={sizes.hidden} fp32, {CORES} cores, medians of {sizes.rounds}, taken in turns")
    print(f"extra memory {memory:.1%} of naive's (at most {MOST_MEMORY:.0%}), time {seconds:.2f}x (at most {MOST_TIME}x)")
    if not same_numbers(found):
        print(f"NOT THE SAME NUMBERS: {medians}")
    sys.exit(0 if same_numbers(found) and memory <= MOST_MEMORY and seconds <= MOST_TIME else 1)


if __name__ == "__main__":
    main()
