"""Algorithms to train a small tied Qwen3 with, the update that each makes of fixed rollouts, and what ranks do with it."""

from __future__ import annotations

from dataclasses import replace

import torch
from policy_ranks import build_chunks, full_gradients, full_tensors, make_policy, use_sgd
from transformers import Qwen3Config, Qwen3ForCausalLM

from mcore_rl.algorithms.advantages import compute_advantages
from mcore_rl.algorithms.losses import policy_loss
from mcore_rl.batching import RolloutBatch, train_batch
from mcore_rl.config.algorithm import (
    Clip,
    CorrectionConfig,
    Denominator,
    KlConfig,
    KlEstimator,
    KlPlacement,
    SequenceCorrection,
    TokenCorrection,
)
from mcore_rl.config.compose import compose_config, config_groups
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.types import TokenBatch
from mcore_rl.update_terms import with_chosen_tokens, with_correction, with_kl_reward

RESPONSES = (1, 2, 3, 5, 8, 13, 21, 34)
PROMPT, VOCAB, LR = 2, 131, 0.1


def save_checkpoint(folder, seed=5):
    """Qwen3ForCausalLM, fp32: 2 layers, tied embeddings, a vocabulary that tensor parallelism has to pad."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.15)
    model.save_pretrained(folder)


def tokens():
    """Eight answers of RESPONSES tokens to prompts of 2."""
    generator = torch.Generator().manual_seed(1)
    lengths = [PROMPT + n for n in RESPONSES]
    return TokenBatch(
        tuple(torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths),
        tuple(torch.arange(n) >= PROMPT for n in lengths),
        tuple(f"p{i // 4}/{i % 4}" for i in range(len(lengths))),
    )


def algorithms():
    """Name -> configuration: every preset, and every further term on one that takes it."""
    presets = {name: compose_config([f"algorithm={name}"]).algorithm for name in config_groups()["algorithm"]}
    grpo, gspo = presets["grpo"], presets["gspo"]
    found = {
        **presets,
        "grpo_pp": replace(presets["grpo_pp"], clip_cov=replace(presets["grpo_pp"].clip_cov, fraction=0.1, low=0.01)),
    }
    found["dual"] = replace(grpo, clip=Clip.dual, dual_clip=1.1)
    found["entropy"] = replace(gspo, entropy_coef=0.05)
    found["kl_reward"] = replace(presets["gspo_token"], kl=KlConfig(0.1))
    for estimator in (KlEstimator.k2, KlEstimator.k3):
        found[f"kl_{estimator.value}"] = replace(gspo, kl=KlConfig(0.1, KlPlacement.loss, estimator))
    for denominator in Denominator:
        for token in TokenCorrection:
            sequence = SequenceCorrection.mean if token is TokenCorrection.mask else SequenceCorrection.sum
            bound = 0.05 if token is TokenCorrection.mask else 0.3
            settings = CorrectionConfig(True, denominator, token, token_cap=1.1, token_floor=0.9, sequence=sequence)
            name = f"{denominator.value}_{token.value}"
            found[name] = replace(grpo, correction=replace(settings, sequence_max_nats=bound))
    return found


def noisy(logprobs, scale, seed):
    """Log-probs a little away from the given ones; the noise of a token does not depend on the order of the batch."""
    found = []
    for values in logprobs:
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed + len(values)))
        found.append(torch.where(values != 0.0, values + scale * noise, 0.0))
    return tuple(found)


def make_update(batch, logprobs, config, *, masked=()):
    """The update as the stages make it, from log-probs of the policy: old, sampler and reference are a little off it.

    masked: positions of answers without a trained token.
    """
    masks = tuple(torch.zeros_like(m) if i in masked else m for i, m in enumerate(batch.loss_mask))
    batch = replace(batch, loss_mask=masks)
    groups = tuple(name.split("/")[0] for name in batch.sample_ids)
    lengths = [float(mask.sum() % 3) for mask in batch.loss_mask]
    advantages = compute_advantages(lengths, groups, batch.sample_ids, baseline=config.baseline, ddof=config.ddof)
    spread = 5e-4 if config.clip_high < 1e-2 and config.clip is not Clip.sapo else 0.2
    old = noisy(logprobs, spread, 100)
    rollout = RolloutBatch(batch, groups, noisy(old, 0.08, 200), advantages)
    update = replace(train_batch(rollout, range(len(batch)), config, old=None), old_logprobs=old)
    update = replace(update, reference_logprobs=noisy(old, 0.3, 300)) if config.kl.coef else update
    update = with_correction(with_kl_reward(update, config), config)
    return with_chosen_tokens(update, logprobs, config, seed=3, step=4)


def updates(groups, device, folder, cases, options):
    """Name -> what one SGD step of each (config, batch) did, always from the checkpoint's weights. On every rank."""
    chunks = build_chunks(groups, folder)
    policy = make_policy(groups, folder, chunks=chunks, optimizer=OptimizerConfig(lr=LR, clip_grad=0.0), **options)
    use_sgd(policy, groups, LR)
    parameters = [parameter for chunk in policy._chunks for parameter in chunk.parameters()]
    start, before, found = [p.detach().clone() for p in parameters], full_tensors(policy.weights()), {}
    for name, (config, batch) in cases.items():
        policy.settings = replace(policy.settings, loss=policy_loss(config))
        report = policy.update(batch)
        found[name] = {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "metrics": report.metrics,
            "gradients": full_gradients(policy),
            "before": before,
            "after": full_tensors(policy.weights()),
        }
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
    return found
