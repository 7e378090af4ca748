"""The teacher of a distillation: one more engine of the run's own, whose weights never change. Rank 0 only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.algorithms.divergence import TopList
from mcore_rl.config.device import uses_cuda
from mcore_rl.config.schema import RunConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.likeliest import likeliest, start_scorer
from mcore_rl.rollout.sampling import completion_of, generation_requests
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.types import Completion, Prompt, SamplingParams

TEACHER_VERSION = 0


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
        most, version = sampling.max_tokens, TEACHER_VERSION
        return [
            completion_of(
                prompt, index, output, max_tokens=most, version=version, where=f"{self.name}: {prompt.prompt_id}/{index}"
            )
            for (prompt, index), output in zip(owners, outputs, strict=True)
        ]

    def judge(self, completions: Sequence[Completion]) -> list[TopList]:
        """Its opinion of every sampled token. EngineRefused for a token that the student does not have."""
        found = likeliest(self.link, [(one.prompt_token_ids, one.token_ids) for one in completions], self._top_k)
        for completion, one in zip(completions, found, strict=True):
            if int(one.ids.max()) >= self.vocab_size:
                raise EngineRefused(
                    f"{self.name}: {completion.sample_id}: token {int(one.ids.max())} is among its {self._top_k} likeliest, but "
                    f"the student has {self.vocab_size} tokens; use a smaller distill.top_k"
                )
        return found

    def close(self) -> None:
        """End the process."""
        self.link.close()


def start_teacher(config: RunConfig, model: str, log_path: Path, *, vocab_size: int) -> Teacher:
    """An engine with `model` in it, as `config.distill` says; returns while it is still starting. vocab_size: the student's."""
    distill, device = config.distill, "cuda" if uses_cuda(config.device) else "cpu"
    rollout = replace(
        config.rollout,
        dtype=distill.teacher_dtype,
        tensor_parallel=distill.teacher_tensor_parallel,
        expert_parallel=False,
    )
    link = start_scorer(rollout, Path(model), distill.top_k, device=device, log_path=log_path, gpus=distill.teacher_gpus)
    return Teacher(link, max_model_len=rollout.max_model_len, top_k=distill.top_k, vocab_size=vocab_size)
