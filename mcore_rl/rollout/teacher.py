"""The teacher of a distillation: one more engine of the run's own, whose weights never change. Rank 0 only."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.config.device import uses_cuda
from mcore_rl.config.schema import DType, RunConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.sampling import completion_of, generation_requests, top_sampling
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.types import Completion, Prompt, SamplingParams

TEACHER_VERSION = 0


@dataclass(frozen=True)
class Judged:
    """The teacher's K likeliest tokens after every prefix of an answer, likeliest first: [n, K] ids and log-probs (nats)."""

    ids: Tensor
    logprobs: Tensor


class Teacher:
    """Answers prompts, and says what it would have chosen in place of each token of an answer."""

    def __init__(self, link: OwnedLink, *, max_model_len: int, top_k: int, vocab_size: int) -> None:
        """The engine may still be starting. max_model_len: longest prompt and answer together. vocab_size: the student's."""
        self.link = link
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._top_k = top_k

    @property
    def name(self) -> str:
        """Placement and log."""
        return f"teacher, {self.link.name}"

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """samples_per_prompt completions per prompt, in (prompt, sample) order, of version TEACHER_VERSION."""
        outputs = self.link.generate(generation_requests(prompts, sampling, self._max_model_len))
        owners = [(prompt, index) for prompt in prompts for index in range(sampling.samples_per_prompt)]
        return [
            completion_of(prompt, index, output, version=TEACHER_VERSION, where=f"{self.name}: {prompt.prompt_id}/{index}")
            for (prompt, index), output in zip(owners, outputs, strict=True)
        ]

    def judge(self, completions: Sequence[Completion]) -> list[Judged]:
        """Its opinion of every sampled token. EngineRefused when an answer of another size, or no number, comes back."""
        sampling = top_sampling(self._top_k)
        requests = [
            {"token_ids": [*c.prompt_token_ids, *c.token_ids], "start": len(c.prompt_token_ids), "sampling": sampling}
            for c in completions
        ]
        found = [_judged(row) for row in self.link.top_logprobs(requests)]
        for completion, one in zip(completions, found, strict=True):
            wanted = (len(completion.token_ids), self._top_k)
            if tuple(one.ids.shape) != wanted or tuple(one.logprobs.shape) != wanted:
                raise EngineRefused(f"{self.name}: {completion.sample_id}: {tuple(one.ids.shape)} judged, {wanted} asked")
            if int(one.ids.max()) >= self.vocab_size:
                raise EngineRefused(
                    f"{self.name}: {completion.sample_id}: token {int(one.ids.max())} is among its {self._top_k} likeliest, but "
                    f"the student has {self.vocab_size} tokens; use a smaller distill.top_k"
                )
            if not bool(one.logprobs.isfinite().all()):
                raise EngineRefused(f"{self.name}: {completion.sample_id}: a teacher log-prob is not finite")
        return found

    def close(self) -> None:
        """End the process."""
        self.link.close()


def start_teacher(config: RunConfig, model: str, log_path: Path, *, vocab_size: int) -> Teacher:
    """An engine with `model` in it, as `config.distill` says; returns while it is still starting. vocab_size: the student's."""
    distill, device = config.distill, "cuda" if uses_cuda(config.device) else "cpu"
    longest = config.rollout.max_model_len
    rollout = replace(
        config.rollout,
        dtype=DType(distill.teacher_dtype.value),
        tensor_parallel=distill.teacher_tensor_parallel,
        expert_parallel=False,
        max_model_len=longest + 1,  # judging draws one token, which nobody reads
        sleep_level=0,
    )
    arguments = engine_arguments(rollout, model, device=device)
    del arguments["worker_extension_cls"], arguments["weight_transfer_config"]
    environment = engine_environment(rollout, device=device)
    if distill.teacher_gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = distill.teacher_gpus
    link = OwnedLink(
        {**arguments, "max_logprobs": distill.top_k},
        environment,
        log_path=log_path,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
    )
    return Teacher(link, max_model_len=longest, top_k=distill.top_k, vocab_size=vocab_size)


def _judged(row: dict[str, Any]) -> Judged:
    ids, logprobs = (np.load(io.BytesIO(base64.b64decode(row[name])), allow_pickle=False) for name in ("ids", "logprobs"))
    return Judged(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs))
