"""The one case both sides of `make bench` are measured on, and the words they speak with the driver.

Plain Python: imported in the project's environment and in TRL's. A side prints `BENCH {json}` lines; it takes one step
for every `step` line on its stdin and answers with the seconds it took.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

PROMPTS_PER_STEP, SAMPLES, COMPLETION_TOKENS = 8, 8, 32
WARM_UPS, STEPS = 2, 5
LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 1e-6, 3e-4, 4e-4
MARK = "BENCH "
# 22.6 M parameters; vocabulary and depth of a small real model, so that generation is not all overhead.
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def reward(token_ids: list[int]) -> float:
    """Share of odd ids: never the same for a whole group, computed from ids so that both sides agree."""
    return sum(token % 2 for token in token_ids) / len(token_ids)


def read_prompts(path: Path) -> list[list[dict[str, object]]]:
    """Prompts of every step: rendered text and its ids."""
    return json.loads(path.read_text())


def say(**values: object) -> None:
    """One answer to the driver."""
    print(MARK + json.dumps(values), flush=True)


def orders() -> Iterator[None]:
    """One item per `step` line, until stdin closes."""
    for line in sys.stdin:
        if line.strip() == "step":
            yield
