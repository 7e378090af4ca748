"""Completions and scores -> training batches. Trained ids are the sampled ids; nothing is tokenised here.

B sequences, T_b tokens of one: prompt ids, then the sampled ids with the stop token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages import Advantages, compute_advantages, group_indices
from mcore_rl.algorithms.aggregate import token_weights
from mcore_rl.config.schema import Aggregation, AlgorithmConfig
from mcore_rl.routes import batch_routes
from mcore_rl.selecting import usable_samples
from mcore_rl.types import Completion, Prompt, Score, StaleRollout, TokenBatch, TokenValues, TrainBatch


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch as sequences, in the order of the completions.

    sampler_logprobs: B fp32 [T_b] as the engine recorded them, 0 on the prompt. facts: what selection did, as logged.
    """

    tokens: TokenBatch
    prompt_ids: tuple[str, ...]
    sampler_logprobs: tuple[Tensor, ...]
    advantages: Advantages
    facts: Mapping[str, float] = field(default_factory=dict[str, float])


def build_rollout_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    scores: Sequence[Score],
    *,
    algorithm: AlgorithmConfig,
    version: int,
    samples_per_prompt: int,
) -> RolloutBatch:
    """Check what came back against what was sent, then lay it out for training.

    A sample whose reward failed, or that is filtered as overlong, keeps its place with no trained token and advantage 0;
    its group's baseline is that of the others alone.

    StaleRollout: sampled with weights of another version. ValueError names the sample that is malformed, lost or doubled.
    """
    check_completions(prompts, completions, version=version, samples_per_prompt=samples_per_prompt)
    if len(scores) != len(completions):
        raise ValueError(f"{len(completions)} completions but {len(scores)} scores")
    names = [c.sample_id for c in completions]
    tokens = response_batch([c.prompt_token_ids for c in completions], [c.token_ids for c in completions], names)
    routes = batch_routes([c.routes for c in completions], [ids.numel() for ids in tokens.token_ids], names)
    tokens = replace(tokens, routes=routes)
    usable = usable_samples(scores, algorithm.selection)
    tokens = only_usable(tokens, usable)
    prompt_ids = tuple(c.prompt_id for c in completions)
    kept = [i for i in scored_positions(scores) if usable[i]]
    found = compute_advantages(
        [scores[i].reward for i in kept],
        [prompt_ids[i] for i in kept],
        [tokens.sample_ids[i] for i in kept],
        baseline=algorithm.baseline,
        ddof=algorithm.ddof,
    )
    values = torch.zeros(len(scores))
    values[kept] = found.values
    advantages = replace(found, values=values)
    sampler = tuple(torch.tensor([0.0] * len(c.prompt_token_ids) + list(c.logprobs)) for c in completions)
    return RolloutBatch(tokens, prompt_ids, sampler, advantages)


def scored_positions(scores: Sequence[Score]) -> list[int]:
    """Positions of the samples that have a reward. ValueError when none has."""
    kept = [position for position, score in enumerate(scores) if score.failure is None]
    if not kept:
        raise ValueError(f"none of the {len(scores)} samples of this batch has a reward: every reward call failed")
    return kept


def only_usable(tokens: TokenBatch, usable: Sequence[bool]) -> TokenBatch:
    """The same sequences, the unusable ones without a trained token."""
    pairs = zip(tokens.loss_mask, usable, strict=True)
    return replace(tokens, loss_mask=tuple(mask if ok else torch.zeros_like(mask) for mask, ok in pairs))


def response_batch(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], names: Sequence[str]
) -> TokenBatch:
    """B sequences prompt + response; every response token, the stop token included, is trained."""
    ids, masks = [], []
    for prompt, response, name in zip(prompt_ids, response_ids, names, strict=True):
        if not prompt or not response:
            raise ValueError(f"sample {name}: {len(prompt)} prompt and {len(response)} response tokens; both need at least 1")
        ids.append(torch.tensor([*prompt, *response], dtype=torch.int64))
        masks.append(torch.tensor([False] * len(prompt) + [True] * len(response)))
    return TokenBatch(tuple(ids), tuple(masks), tuple(names))


def sft_batch(
    demonstrations: Sequence[tuple[Prompt, tuple[int, ...]]], aggregation: Aggregation = Aggregation.token_mean
) -> TrainBatch:
    """Demonstrations as one supervised update: response-only loss, stop token trained."""
    names = [f"{index}:{prompt.prompt_id}" for index, (prompt, _) in enumerate(demonstrations)]
    tokens = response_batch([p.token_ids for p, _ in demonstrations], [r for _, r in demonstrations], names)
    weights = token_weights(tokens.loss_mask, aggregation).weights
    return TrainBatch(tokens, weights, torch.zeros(len(tokens)))


def check_completions(
    prompts: Sequence[Prompt], completions: Sequence[Completion], *, version: int, samples_per_prompt: int
) -> None:
    """Every prompt has all its samples; each was made from the ids that were sent, at `version`, with a log-prob per token."""
    sent = {prompt.prompt_id: prompt for prompt in prompts}
    if len(sent) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts carry only {len(sent)} different prompt_ids; each occurrence needs its own")
    returned: dict[str, set[int]] = {name: set() for name in sent}
    for completion in completions:
        _check_one(sent, completion, version)
        if completion.sample_index in returned[completion.prompt_id]:
            raise ValueError(f"sample {completion.sample_id} came back twice")
        returned[completion.prompt_id].add(completion.sample_index)
    lost = [f"{name} ({len(got)})" for name, got in returned.items() if len(got) != samples_per_prompt]
    if lost:
        raise ValueError(f"{len(lost)} prompts do not have {samples_per_prompt} completions, first {lost[0]}")


def _check_one(sent: Mapping[str, Prompt], completion: Completion, version: int) -> None:
    name = completion.sample_id
    prompt = sent.get(completion.prompt_id)
    if prompt is None:
        raise ValueError(f"sample {name} belongs to no prompt of this batch")
    if completion.version != version:
        raise StaleRollout(f"sample {name} was sampled with version {completion.version}; the trainer holds {version}")
    if completion.prompt_token_ids != prompt.token_ids:
        raise ValueError(f"sample {name}: the engine's prompt ids differ from the ids that were sent")
    if len(completion.logprobs) != len(completion.token_ids):
        raise ValueError(f"sample {name}: {len(completion.token_ids)} token ids but {len(completion.logprobs)} log-probs")
    if not all(math.isfinite(value) for value in completion.logprobs):
        raise ValueError(f"sample {name}: a sampler log-prob is not finite")


def split_updates(
    prompt_ids: Sequence[str], updates: int, *, seed: int, step: int, keep: Collection[str] | None = None
) -> list[list[int]]:
    """Positions of the samples of each optimizer update: whole groups, drawn by (seed, step) and the prompt ids alone.

    keep: the groups to deal out, None for all. ValueError when there are fewer than updates or they do not divide evenly.
    """
    groups = {name: index for name, index in group_indices(prompt_ids).items() if keep is None or name in keep}
    if updates < 1 or len(groups) % updates:
        raise ValueError(f"train.updates_per_batch={updates} does not divide the {len(groups)} groups of a rollout batch evenly")
    names = sorted(groups)
    random.Random(f"{seed}/{step}/updates").shuffle(names)
    size = len(names) // updates
    parts = [names[k * size : (k + 1) * size] for k in range(updates)]
    return [sorted(position for name in part for position in groups[name]) for part in parts]


def train_batch(
    rollout: RolloutBatch, positions: Sequence[int], algorithm: AlgorithmConfig, *, old: TokenValues | None
) -> TrainBatch:
    """One optimizer update on the samples at `positions`; token weights are computed on exactly these.

    old: log-probs of the whole rollout batch at the weights that sampled it; None when this update's own forward
    computes them (the first update of a batch, no jitter).
    """
    tokens = rollout.tokens.select(positions)
    weights = token_weights(tokens.loss_mask, algorithm.aggregation, length_norm_tokens=algorithm.length_norm_tokens)
    return TrainBatch(
        tokens=tokens,
        token_weights=weights.weights,
        advantages=rollout.advantages.values[list(positions)],
        old_logprobs=None if old is None else tuple(old.logprobs[i] for i in positions),
        sampler_logprobs=tuple(rollout.sampler_logprobs[i] for i in positions),
    )
