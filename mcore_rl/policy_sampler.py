"""rollout.engine=trainer: answers sampled from the trainer's own modules, so nothing lies between sampler and trainer.

No second copy of the weights, no sync, and delta is 0 by construction: a completion's log-probs are those of the policy's own
`old` pass over the finished sequences, and the same numbers stand as `old` in the update. There is no key-value cache:
every token costs a forward of all unfinished sequences from their beginning, at most max_tokens forwards a batch. Meant as
the reference that tells a sync's mistakes from the algorithm's, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.rollout.sampling import check_sampling, sample_seed
from mcore_rl.seams import RolloutEngine, WeightSource
from mcore_rl.types import Completion, Pass, Prompt, SamplingParams, SyncReport, TokenBatch, TokenValues
from parallel.collectives import broadcast_builtins, on_rank0

T = TypeVar("T")


class SampledPolicy(Protocol):
    """What sampling needs of the policy; every call is collective."""

    def last_logits(self, token_ids: Sequence[Tensor]) -> Tensor:
        """Logits [B, V] of the next token of each sequence, on every rank."""
        ...

    def logprobs(self, batch: TokenBatch, pass_name: Pass) -> TokenValues:
        """As seams.Policy."""
        ...

    def weights(self) -> WeightSource:
        """As seams.Policy."""
        ...


class TrainerSampler:
    """Implements seams.RolloutEngine on rank 0; the other ranks compute along inside `ask`."""

    def __init__(self, *, max_model_len: int) -> None:
        """It has no policy yet: see follow."""
        self._current: Callable[[], SampledPolicy] | None = None
        self._max_model_len = max_model_len

    def follow(self, policy: Callable[[], SampledPolicy]) -> None:
        """Sample from whatever `policy()` is at the moment of a call: a warm-up's policy, then the RL policy."""
        self._current = policy

    def _policy(self) -> SampledPolicy:
        if self._current is None:
            raise RuntimeError("the trainer's sampler was asked before it was given a policy")
        return self._current()

    @property
    def name(self) -> str:
        """For messages."""
        return "the trainer's own modules"

    @property
    def version(self) -> int:
        """The policy's: it samples with nothing else."""
        return self._policy().weights().version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """As RolloutEngine.generate. Rank 0 only, inside `ask`."""
        self._check(prompts, sampling)
        broadcast_builtins(("generate", [asdict(prompt) for prompt in prompts], asdict(sampling)))
        return self._generate(prompts, sampling)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """As RolloutEngine.score. Rank 0 only, inside `ask`."""
        broadcast_builtins(("score", [list(ids) for ids in token_ids]))
        return self._score(token_ids)

    def ask(self, question: Callable[[RolloutEngine], T]) -> T:
        """Rank 0's `question(self)` (builtins) on every rank, the others computing along. Collective."""
        if dist.get_rank() != 0:
            self._serve()
        return on_rank0(lambda: self._asked(question))

    def _asked(self, question: Callable[[RolloutEngine], T]) -> T:
        try:
            return question(self)
        finally:
            broadcast_builtins(("done",))

    def sync(self) -> SyncReport:
        """What stands for a weight sync: nothing is sent, since the sampler is the policy."""
        return SyncReport(self.version, 0, 0, 0, 0, 0.0, 0.0)

    def _serve(self) -> None:
        """Compute what rank 0 asks for until it is done. Every rank but 0."""
        while True:
            message: Any = broadcast_builtins(None)
            if message[0] == "generate":
                self._generate([Prompt(**row) for row in message[1]], SamplingParams(**message[2]))
            elif message[0] == "score":
                self._score(message[1])
            else:
                return

    @contextmanager
    def awake(self) -> Iterator[None]:
        """It is the trainer, so it always is."""
        yield

    def health(self) -> None:
        """It lives as long as the trainer."""

    def close(self) -> None:
        """Nothing to stop."""

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        owners = [(prompt, index) for prompt in prompts for index in range(sampling.samples_per_prompt)]
        made = _sample(self._policy(), owners, sampling)
        values = self._policy().logprobs(_as_batch(owners, made), Pass.OLD).logprobs
        version = self.version
        return [
            Completion(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt_token_ids=prompt.token_ids,
                token_ids=tuple(ids),
                logprobs=tuple(row[len(prompt.token_ids) :].tolist()),
                finish_reason="stop" if ids[-1] in sampling.stop_token_ids else "length",
                version=version,
            )
            for (prompt, index), ids, row in zip(owners, made, values, strict=True)
        ]

    def _check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        check_sampling(sampling)
        if sampling.top_p != 1.0 or sampling.top_k:
            raise ValueError(f"rollout.engine=trainer samples from the whole distribution; top_p={sampling.top_p} must be 1")
        for prompt in prompts:
            needed = len(prompt.token_ids) + sampling.max_tokens
            if not prompt.token_ids or needed > self._max_model_len:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} prompt tokens + max_tokens={sampling.max_tokens}"
                    f" must be between 1 and rollout.max_model_len={self._max_model_len}"
                )

    def _score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        ids = tuple(torch.tensor(row) for row in token_ids)
        masks = tuple(torch.arange(len(row)) > 0 for row in token_ids)
        values = self._policy().logprobs(TokenBatch(ids, masks, tuple(map(str, range(len(ids))))), Pass.PROBE)
        return [row[1:].tolist() for row in values.logprobs]


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token of softmax(logits / temperature) [V] by the inverse distribution function; the best one at temperature 0."""
    if temperature == 0.0:
        return int(logits.argmax())
    reached = (logits.double() / temperature).softmax(-1).cumsum(-1)
    threshold = torch.rand((), generator=generator, dtype=torch.float64) * reached[-1]
    return min(int(torch.searchsorted(reached, threshold, right=True)), logits.numel() - 1)


def _sample(policy: SampledPolicy, owners: Sequence[tuple[Prompt, int]], sampling: SamplingParams) -> list[list[int]]:
    """Response ids of every (prompt, sample). The same on every rank: each draws from the same logits with the same seeds."""
    seeds = [sample_seed(sampling.seed, prompt.prompt_id, index) for prompt, index in owners]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    made: list[list[int]] = [[] for _ in owners]
    for _ in range(sampling.max_tokens):
        open_ = [at for at, ids in enumerate(made) if not ids or ids[-1] not in sampling.stop_token_ids]
        if not open_:
            break
        logits = policy.last_logits([torch.tensor([*owners[at][0].token_ids, *made[at]]) for at in open_])
        for at, row in zip(open_, logits, strict=True):
            made[at].append(draw(row, sampling.temperature, generators[at]))
    return made


def _as_batch(owners: Sequence[tuple[Prompt, int]], made: Sequence[Sequence[int]]) -> TokenBatch:
    ids = tuple(torch.tensor([*prompt.token_ids, *answer]) for (prompt, _), answer in zip(owners, made, strict=True))
    masks = tuple(torch.arange(len(row)) >= len(prompt.token_ids) for row, (prompt, _) in zip(ids, owners, strict=True))
    return TokenBatch(ids, masks, tuple(f"{prompt.prompt_id}/{index}" for prompt, index in owners))
