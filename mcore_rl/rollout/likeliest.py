"""What an engine would have chosen in place of each token of an answer: asked of an owned engine, without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.algorithms.divergence import TopList
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.route_reader import read_array
from mcore_rl.rollout.sampling import top_sampling
from mcore_rl.rollout.vllm_owned import OwnedLink
from models.registry import read_spec

Answer = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and the ids of what was answered."""


def start_scorer(
    rollout: RolloutConfig, model: Path, count: int, *, device: str, log_path: Path, gpus: str | None = None
) -> OwnedLink:
    """An engine for `likeliest`, with `model` in it as it is; returns while it starts. device: cpu or cuda.

    gpus: as CUDA_VISIBLE_DEVICES has them; None leaves that to the environment.
    """
    # Scoring draws one token more, which nobody reads.
    longest = min(rollout.max_model_len + 1, read_spec(model).max_positions)
    config = replace(rollout, max_model_len=longest, sleep_level=0)
    arguments = engine_arguments(config, str(model), device=device)
    del arguments["worker_extension_cls"], arguments["weight_transfer_config"]  # nobody changes its weights
    chosen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return OwnedLink(
        {**arguments, "max_logprobs": count},
        {**engine_environment(config, device=device), **chosen},
        log_path=log_path,
        start_timeout_s=config.start_timeout_s,
        request_timeout_s=config.request_timeout_s,
    )


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
    ids, logprobs = (read_array(row[name]) for name in ("ids", "logprobs"))
    return TopList(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs))
