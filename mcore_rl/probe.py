"""The few fixed sequences that trainer and engine both score after every sync."""

from __future__ import annotations

import torch

from mcore_rl.seams import Task
from mcore_rl.types import TokenBatch


def probe_batch(task: Task, count: int, max_tokens: int) -> TokenBatch:
    """`count` validation prompts, every token after the first scored; cut at `max_tokens`.

    ValueError when the task has no validation prompt or one is a single token: nothing could be compared.
    """
    prompts = task.eval_prompts("val", count)
    ids = tuple(torch.tensor(prompt.token_ids[:max_tokens], dtype=torch.int64) for prompt in prompts)
    short = [prompt.prompt_id for prompt, row in zip(prompts, ids, strict=True) if row.numel() < 2]
    if not ids or short:
        raise ValueError(f"sync.probe_sequences={count}: {len(ids)} validation prompts, too short to score: {short[:3]}")
    masks = tuple(torch.arange(row.numel()) > 0 for row in ids)
    return TokenBatch(ids, masks, tuple(f"probe-{prompt.prompt_id}" for prompt in prompts))
