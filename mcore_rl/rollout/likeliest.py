"""What an engine would have chosen in place of each token of an answer: asked of an owned engine, without sampling."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mcore_rl.algorithms.divergence import TopList
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.sampling import top_sampling
from mcore_rl.rollout.vllm_owned import OwnedLink

Answer = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and the ids of what was answered."""


def likeliest(link: OwnedLink, answers: Sequence[Answer], count: int) -> list[TopList]:
    """The `count` likeliest tokens, likeliest first, at every place of each answer, given the prompt and the answer before it.

    EngineRefused when a list of another size, or a log-prob that is no number, comes back.
    """
    sampling = top_sampling(count)
    requests = [{"token_ids": [*prompt, *answer], "start": len(prompt), "sampling": sampling} for prompt, answer in answers]
    found = [_list(row) for row in link.top_logprobs(requests)]
    for (_, answer), one in zip(answers, found, strict=True):
        wanted = (len(answer), count)
        if tuple(one.ids.shape) != wanted or tuple(one.logprobs.shape) != wanted:
            raise EngineRefused(f"{link.name}: likeliest tokens of shape {tuple(one.ids.shape)} came back, {wanted} were asked")
        if not bool(one.logprobs.isfinite().all()):
            raise EngineRefused(f"{link.name}: the log-prob of a likeliest token is not finite")
    return found


def _list(row: dict[str, Any]) -> TopList:
    ids, logprobs = (np.load(io.BytesIO(base64.b64decode(row[name])), allow_pickle=False) for name in ("ids", "logprobs"))
    return TopList(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs))
