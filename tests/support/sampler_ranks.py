"""What a rank does in the tests of sampling from the trainer. Imported inside the ranks."""

from dataclasses import asdict

import torch
from policy_ranks import make_policy

from mcore_rl.policy_sampler import TrainerSampler
from mcore_rl.types import Pass, Prompt, SamplingParams, TokenBatch


def sample_on_ranks(groups, device, folder, prompts, sampling, sequences):
    """Completions and scores as rank 0 gets them while the others serve, and the policy's `old` of the completions."""
    policy = make_policy(groups, folder)
    sampler = TrainerSampler(max_model_len=64)
    sampler.follow(lambda: policy)
    rows = [Prompt(f"p{i}", ids, "", "") for i, ids in enumerate(prompts)]

    def question(engine):
        made = engine.generate(rows, SamplingParams(**sampling))
        return [[asdict(one) for one in made], engine.score(sequences)]

    made, scores = sampler.ask(question)
    assert sampler.sync().version == sampler.version == 0
    ids = tuple(torch.tensor([*one["prompt_token_ids"], *one["token_ids"]]) for one in made)
    masks = tuple(torch.arange(len(row)) >= len(one["prompt_token_ids"]) for row, one in zip(ids, made, strict=True))
    names = tuple(f"{one['prompt_id']}/{one['sample_index']}" for one in made)
    old = policy.logprobs(TokenBatch(ids, masks, names), Pass.OLD).logprobs
    return made, scores, old, policy.last_logits(ids)
