"""How full the packed rows are and how even the load: 4,096 answers of long-tailed lengths over 8 data-parallel ranks.

python tools/bench_packing.py
"""

from __future__ import annotations

import random
import sys
import time

from parallel.packing import plan_micro_batches

SAMPLES, RANKS, BUDGET, LONGEST = 4096, 8, 16_384, 8_192
LEAST_FULL, MOST_UNEVEN, MOST_SECONDS = 0.95, 0.03, 1.0


def long_tailed(seed: int) -> list[int]:
    """Log-normal lengths with a median of 400 tokens, cut off at LONGEST, where about one in a hundred ends."""
    generator = random.Random(seed)
    return [min(LONGEST, max(1, int(generator.lognormvariate(6.0, 1.3)))) for _ in range(SAMPLES)]


def main() -> None:
    """Plan three batches, print the worst figures, exit 1 when one misses its bound."""
    full, uneven, slow = 1.0, 0.0, 0.0
    for seed in range(3):
        lengths = long_tailed(seed)
        start = time.perf_counter()
        plan = plan_micro_batches(lengths, dp_size=RANKS, token_budget=BUDGET)
        seconds = time.perf_counter() - start
        loads = [sum(lengths[i] for row in rank for i in row) for rank in plan]
        full = min(full, sum(lengths) / (BUDGET * sum(len(rank) for rank in plan)))
        uneven = max(uneven, max(loads) / (sum(loads) / RANKS) - 1.0)
        slow = max(slow, seconds)
        print(f"seed {seed}: {sum(lengths):,} tokens, longest {max(lengths):,}, {len(plan[0])} rows a rank, {seconds:.3f} s")
    print(f"{SAMPLES} answers on {RANKS} ranks, rows of {BUDGET:,} tokens; the worst of 3:")
    print(
        f"rows {full:.1%} full (at least {LEAST_FULL:.0%}), heaviest rank {uneven:.2%} above the mean (at most {MOST_UNEVEN:.0%})"
    )
    sys.exit(0 if full >= LEAST_FULL and uneven <= MOST_UNEVEN and slow < MOST_SECONDS else 1)


if __name__ == "__main__":
    main()
