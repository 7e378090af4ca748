"""A small Qwen3-MoE checkpoint and fixed rollouts for it."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_rl.algorithms.aggregate import token_weights
from mcore_rl.config.compose import compose_config
from mcore_rl.config.schema import Aggregation
from mcore_rl.types import TokenBatch, TrainBatch

LENGTHS = (3, 5, 8, 13, 21, 34, 2, 9)
VOCAB = 320


def quickstart_model():
    """Hugging Face settings of the model that `make quickstart` trains: hidden 128, 4 layers, 8 experts top-2, GQA, qk-norm."""
    build = compose_config(["experiment=quickstart"]).model.build
    assert build is not None
    assert build.hf_config["vocab_size"] == VOCAB
    return build.hf_config


def save_checkpoint(folder, seed=5):
    """The quickstart's Qwen3-MoE in fp32, with weights large enough to route clearly."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**quickstart_model())
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15 if name.endswith("mlp.gate.weight") else 0.08)
    model.save_pretrained(folder)
    # torch's grouped matmul knows no float64
    model.config._experts_implementation = "eager"
    return model.eval()


def rollouts(lengths=LENGTHS, seed=1, advantages=None, vocab=VOCAB):
    """Fixed sequences with advantages; the first third of each is prompt; `old` is the update's own forward."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, vocab, (n,), generator=generator) for n in lengths)
    masks = tuple(torch.arange(n) >= max(1, n // 3) for n in lengths)
    tokens = TokenBatch(ids, masks, tuple(f"s{i}" for i in range(len(lengths))))
    if advantages is None:
        advantages = torch.randn(len(lengths), generator=generator)
    weights = token_weights(masks, Aggregation.seq_mean_token_mean).weights
    return TrainBatch(tokens, weights, advantages)


def with_old(batch, logprobs, scale=4e-3, seed=2):
    """`batch` with old log-probs a little away from `logprobs`, so that some sequences are clipped and some are not."""
    generator = torch.Generator().manual_seed(seed)
    old = tuple(
        torch.where(mask, values.detach() + scale * torch.randn(values.shape, generator=generator), 0.0)
        for values, mask in zip(logprobs, batch.tokens.loss_mask, strict=True)
    )
    return TrainBatch(batch.tokens, batch.token_weights, batch.advantages, old)
