"""Generation and scoring by a real vLLM engine that the run owns."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import hf_trainer
import pytest
import torch
from sync_breakage import flip

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.match import check_facts, compare_facts, trainer_facts
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.sync.digest import wire_digest
from mcore_rl.types import Prompt, SamplingParams, StaleRollout, WeightMismatch
from models.registry import read_spec

SAMPLING = SamplingParams(temperature=1.0, max_tokens=12, stop_token_ids=(2,), samples_per_prompt=4, seed=7)


def prompts(count: int, length: int = 20) -> list[Prompt]:
    return [Prompt(f"p{i}", tuple((j * 13 + i * 5) % 300 + 3 for j in range(length + i % 3)), "", "") for i in range(count)]


@pytest.fixture(scope="module")
def synced(moe_ready):
    """The MoE engine with model `a` at version 3."""
    moe_ready.renew()
    moe_ready.sync("a", version=3)
    return moe_ready


def test_the_engine_process_is_no_trainer(moe_ready):
    [info] = moe_ready.link.rpc("mcore_info", [])
    assert info["pid"] == moe_ready.link.pid
    assert info["megatron"] is False
    assert info["cpu_megatron"] is False
    assert info["threads"] == 1


def test_the_engine_says_which_model_it_runs(moe_ready, dense_ready):
    """As its own modules and configuration have it, and as the trainer reads it from the same folder."""
    facts = moe_ready.engine.facts()
    folder = Path(facts["model_folder"])
    found = compare_facts(trainer_facts(read_spec(folder), folder, RolloutConfig()), facts)
    check_facts("moe", found)
    assert {fact.name for fact in found if fact.verdict == "same"} >= {
        *("architecture", "layers", "vocabulary", "precision", "max_length", "moe_layers", "experts", "top_k"),
        *("norm_topk_prob", "scoring", "router_dtype"),
    }
    assert (facts["expert_parallel"], facts["expert_placement"]) == (1, "linear")
    folder = Path(dense_ready.engine.facts()["model_folder"])
    dense = trainer_facts(read_spec(folder), folder, RolloutConfig())
    check_facts("dense", compare_facts(dense, dense_ready.engine.facts()))
    with pytest.raises(ValueError, match=r"runs another model: architecture is Qwen3MoeForCausalLM in the engine"):
        check_facts("moe", compare_facts(dense, facts))


def test_an_engine_without_proved_weights_refuses_to_sample(moe_ready):
    unproved = VllmEngine(moe_ready.link, max_model_len=256)
    with pytest.raises(StaleRollout, match="no proved weights"):
        unproved.generate(prompts(1), SAMPLING)


def test_scores_are_those_of_transformers(synced):
    ours = synced.engine.score(synced.probe)
    reference = synced.trainer_logprobs("a")
    assert [len(row) for row in ours] == [len(ids) - 1 for ids in synced.probe]
    assert max(abs(a - b) for x, y in zip(ours, reference, strict=True) for a, b in zip(x, y, strict=True)) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_those_of_the_untouched_logits(synced, temperature):
    completions = synced.engine.generate(prompts(3), replace(SAMPLING, temperature=temperature))
    whole = [completion.prompt_token_ids + completion.token_ids for completion in completions]
    reference = hf_trainer.hf_logprobs(synced.models["a"], whole)
    for completion, row in zip(completions, reference, strict=True):
        assert completion.logprobs == pytest.approx(row[-len(completion.token_ids) :], abs=1e-5)


def test_greedy_takes_the_most_likely_token(synced):
    greedy = replace(SAMPLING, temperature=0.0, samples_per_prompt=1)
    for completion in synced.engine.generate(prompts(2), greedy):
        whole = completion.prompt_token_ids + completion.token_ids
        best = hf_trainer.hf_best_tokens(synced.models["a"], whole)
        assert completion.token_ids == tuple(best[len(completion.prompt_token_ids) - 1 : -1])


def test_order_identity_and_version(synced):
    asked = prompts(5)
    completions = synced.engine.generate(asked, SAMPLING)
    assert [(c.prompt_id, c.sample_index) for c in completions] == [(p.prompt_id, i) for p in asked for i in range(4)]
    assert all(c.prompt_token_ids == p.token_ids for c, p in zip(completions, [p for p in asked for _ in range(4)], strict=True))
    assert {c.version for c in completions} == {3}
    assert all(1 <= len(c.token_ids) <= 12 and len(c.token_ids) == len(c.logprobs) for c in completions)


def test_samples_do_not_depend_on_the_batch(synced):
    """120 seeded requests of 2,500 prompt tokens against 256 tokens a step: many are prefilled in pieces."""
    asked = prompts(30)
    together = synced.engine.generate(asked, SAMPLING)
    assert synced.engine.generate(asked, SAMPLING) == together
    assert synced.engine.generate(asked[17:18], SAMPLING) == together[17 * 4 : 18 * 4]
    assert synced.engine.generate(asked[::-1], SAMPLING) == [c for i in range(29, -1, -1) for c in together[i * 4 : i * 4 + 4]]


def test_samples_of_a_group_and_of_another_seed_differ(synced):
    first = synced.engine.generate(prompts(1), SAMPLING)
    other = synced.engine.generate(prompts(1), replace(SAMPLING, seed=8))
    assert len({c.token_ids for c in first + other}) == 8


def test_the_stop_token_ends_and_stays(synced):
    free = synced.engine.generate(prompts(1), replace(SAMPLING, stop_token_ids=()))[0]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 12
    stop = free.token_ids[4]
    stopped = synced.engine.generate(prompts(1), replace(SAMPLING, stop_token_ids=(stop,)))[0]
    cut = free.token_ids.index(stop) + 1
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:cut]
    assert stopped.logprobs == pytest.approx(free.logprobs[:cut], abs=1e-6)


def test_a_prompt_without_room_for_its_answer_is_refused(synced):
    with pytest.raises(ValueError, match=r"prompt p0: 250 prompt tokens .* rollout.max_model_len=256"):
        synced.engine.generate(prompts(1, length=250), SAMPLING)
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens"):
        synced.engine.score([[1, 2], [3]])


def test_another_label_than_the_proved_version_is_stale(synced):
    synced.link.set_version("4")
    with pytest.raises(StaleRollout, match=r"p0/0 was sampled with weights \['4'\], version 3 was proved"):
        synced.engine.generate(prompts(1), SAMPLING)
    synced.link.set_version("3")
    assert synced.engine.generate(prompts(1), SAMPLING)


def refused(link, step, payload):
    """vLLM's answer is that of a success, so that no worker's answer is left for its next call."""
    assert link.native(step, payload) is None
    return link.rpc("mcore_outcome", [step])[0]["error"]


def test_a_worker_keeps_its_refusals_until_it_is_asked(dense):
    """A refused update is never put to use, whatever comes after the refusal."""
    dense.sync("a", 0)
    engine, link = dense.engine, dense.link
    before = engine.score(dense.probe)
    wrong = ["model.norm.wait", "float32", [64], 0, wire_digest(torch.zeros(64))]
    reason = "unknown tensor 'model.norm.wait': the engine's model has no such weight"
    engine.begin()
    assert refused(link, "update", {"slot": 0, "tensors": [wrong]}) == reason
    assert refused(link, "update", {"slot": 0, "tensors": []}) == reason
    assert refused(link, "finish", {}) == reason
    assert link.rpc("mcore_status", [])[0]["active"] is False
    engine.abort()
    assert engine.score(dense.probe) == before
    engine.begin()
    assert "segment /nowhere does not exist here" in refused(link, "init", {"path": "/nowhere", "slot_bytes": 1})
    assert refused(link, "update", {"slot": 0, "tensors": []}) == "an update arrived before init_weight_transfer_engine"
    with pytest.raises(WeightMismatch, match="before init_weight_transfer_engine"):
        engine.finish()
    with pytest.raises(EngineRefused, match="KeyError"):
        engine.readback(["model.norm.wait"])
    dense.renew()
    assert dense.sync("b", 1).version == 1


def test_an_engine_of_two_workers_names_what_it_refuses_and_goes_on(two_workers, monkeypatch):
    two_workers.sync("a", 0)
    flip(two_workers, monkeypatch)
    with pytest.raises(WeightMismatch, match=r"worker 0 of 2: tensor 'model\.\S+' was damaged on the way"):
        two_workers.sync("b", 1)
    monkeypatch.undo()
    assert len({worker["pid"] for worker in two_workers.link.rpc("mcore_info", [])}) == 2
    assert two_workers.sync("b", 2).version == 2


@pytest.mark.parametrize(("kind", "worker"), [("memory", 0), ("memory@1", 1)])
def test_a_worker_without_memory_is_a_refusal_that_names_it(two_workers, kind, worker):
    """A MemoryError in one worker of two or in both: raised through vLLM it would leave answers behind for ever."""
    two_workers.sync("a", 0)
    two_workers.damage(kind, "model.norm.weight")
    started = time.monotonic()
    message = rf"worker {worker} of 2: MemoryError: no memory for model\.norm\.weight"
    with pytest.raises(WeightMismatch, match=message):
        two_workers.sync("b", 1)
    assert time.monotonic() - started < 30
    assert two_workers.engine.version is None
    two_workers.heal()
    assert len({worker["pid"] for worker in two_workers.link.rpc("mcore_info", [])}) == 2
    assert two_workers.sync("b", 2).version == 2
