"""Routes of a real vLLM engine, and what replaying them does to the mismatch between engine and trainer."""

from __future__ import annotations

import hf_trainer
import pytest
import torch
from replay_ranks import scored_against_engine
from transformers import Qwen3MoeConfig

from mcore_rl.batching import build_rollout_batch, train_batch
from mcore_rl.config.schema import Aggregation, AlgorithmConfig, DType, RolloutConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.route_reader import RouteReader
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.statistics import paired_bootstrap
from mcore_rl.types import Prompt, SamplingParams, Score
from parallel.layout import ParallelLayout

SAMPLING = SamplingParams(temperature=1.0, max_tokens=16, stop_token_ids=(2,), samples_per_prompt=4, seed=11)
PROMPTS = [Prompt(f"p{i}", tuple((j * 13 + i * 5) % 300 + 3 for j in range(14 + i % 7)), "", "") for i in range(12)]


def many_experts() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        num_experts=512,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(folder, engine): 512 experts, a bf16 engine; the trainer's fp32 weights are the same numbers."""
    folder = tmp_path_factory.mktemp("wide")
    model = hf_trainer.build(many_experts(), seed=3)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    path = hf_trainer.save(model, folder / "model")
    rollout = RolloutConfig(max_num_seqs=64, dtype=DType.bfloat16)
    link = OwnedLink(
        engine_arguments(rollout, str(path), device="cpu", routes=True),
        engine_environment(rollout, device="cpu"),
        log_path=folder / "engine.log",
        start_timeout_s=900,
        request_timeout_s=200,
    )
    engine = VllmEngine(link, max_model_len=256, routes=RouteReader(link, native=False))
    engine.commit(0)
    yield path, engine
    engine.close()


def sampled(engine: VllmEngine, version: int):
    """A rollout batch of the engine's as one update, advantages at random."""
    completions = engine.generate(PROMPTS, SAMPLING)
    scores = [Score(float(i % 3), i % 3 == 2, "", True, False) for i in range(len(completions))]
    algorithm = AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean)
    rollout = build_rollout_batch(PROMPTS, completions, scores, algorithm=algorithm, version=version, samples_per_prompt=4)
    return train_batch(rollout, range(len(completions)), algorithm, old=None)


def as_sets(experts, count):
    """[tokens, layers, experts] bool."""
    return torch.zeros(*experts.shape[:2], count, dtype=torch.bool).scatter(2, experts.long(), True)


def mean_gaps(found, batch):
    """Mean |trainer - sampler| of each sequence."""
    gaps = zip(found, batch.sampler_logprobs, batch.tokens.loss_mask, strict=True)
    return [float((ours - engines)[mask].abs().mean()) for ours, engines, mask in gaps]


def check_used(found, batch, count):
    """Every covered token used the engine's experts in every layer; exactly the last token of a sequence is not covered."""
    known = torch.cat([routes.known for routes in batch.tokens.routes])
    assert all(routes.known.tolist() == [True] * (len(routes.known) - 1) + [False] for routes in batch.tokens.routes)
    engines = as_sets(torch.cat([routes.experts for routes in batch.tokens.routes]), count)
    assert torch.equal(found["used"][known], engines[known])
    assert found["metrics"]["route_coverage"] == pytest.approx(float(known.double().mean()))
    assert all(layer["replayed_tokens"] == int(known.sum()) for layer in found["routing"])
    return (as_sets(found["own"], count)[known] == engines[known]).all(-1)


def test_an_fp32_engine_routes_as_the_trainer_does_and_replay_uses_every_route(moe_ready, ranks, tmp_path):
    moe_ready.renew()
    moe_ready.sync("a", version=5)
    engine = VllmEngine(moe_ready.link, max_model_len=256, routes=RouteReader(moe_ready.link, native=False))
    engine.commit(5)
    batch = sampled(engine, 5)
    folder = hf_trainer.save(moe_ready.models["a"], tmp_path / "model")
    (found,) = ranks.run(scored_against_engine, ParallelLayout(), str(folder), batch)
    same = check_used(found, batch, 8)
    assert bool(same.all())
    assert all((layer["top1_flip"], layer["topk_jaccard"]) == (0.0, 1.0) for layer in found["routing"])
    assert max(mean_gaps(found["replayed"], batch)) < 1e-5


def test_a_bf16_engine_of_512_experts_is_closer_to_the_trainer_with_replay(wide, ranks):
    folder, engine = wide
    batch = sampled(engine, 0)
    assert batch.tokens.routes is not None
    assert batch.tokens.routes[0].experts.dtype is torch.int16
    assert max(int(routes.experts.max()) for routes in batch.tokens.routes) > 255
    (found,) = ranks.run(scored_against_engine, ParallelLayout(), str(folder), batch)
    same = check_used(found, batch, 512)
    assert 0.3 < float(same.double().mean()) < 1.0
    assert all(0.0 < layer["top1_flip"] < 0.3 and 0.8 < layer["topk_jaccard"] < 1.0 for layer in found["routing"])
    gain = paired_bootstrap(mean_gaps(found["replayed"], batch), mean_gaps(found["live"], batch))
    assert gain.low > 0


def test_capture_with_prefix_caching_is_refused(dense_ready):
    with pytest.raises(EngineRefused, match="prefix caching: cached tokens are not routed again"):
        dense_ready.link.rpc("mcore_capture_routes", [])
