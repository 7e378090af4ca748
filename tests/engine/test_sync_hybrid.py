"""Hybrids (GatedDeltaNet beside attention, shared experts) in bfloat16, the trainer in float32: synced, read back, exact."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import router_logits

from mcore_rl.rollout.route_reader import RouteReader
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.types import Prompt, SamplingParams, WeightMismatch

LINEAR = "model.layers.0.linear_attn"
PARTS = ("in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=6, stop_token_ids=(), samples_per_prompt=2, seed=1)
CLEAR = 0.01  # of two probabilities: bfloat16 does not turn their order
PROMPT = Prompt("p", tuple(range(3, 25)), "", "")


def test_every_tensor_of_a_hybrid_is_read_back_there_and_back(hybrid):
    """A_log is float32 in the engine and in the trainer; everything else is the trainer's value rounded once."""
    first = hybrid.sync("a", 0)
    names = set(hybrid.source("a").tensors)
    assert names >= {f"{LINEAR}.{part}" for part in PARTS}
    assert names >= {"model.layers.3.self_attn.q_norm.weight", "model.layers.1.mlp.shared_expert_gate.weight"}
    assert first.readback_tensors == first.tensors == len(names)
    scores, samples = hybrid.engine.score(hybrid.probe), hybrid.engine.generate([PROMPT], SAMPLING)
    hybrid.sync("b", 1)
    moved = hybrid.engine.score(hybrid.probe)
    hybrid.sync("a", 2)
    assert max(abs(a - b) for x, y in zip(scores, moved, strict=True) for a, b in zip(x, y, strict=True)) > 0.5
    assert hybrid.engine.score(hybrid.probe) == scores == hybrid.fresh
    again = hybrid.engine.generate([PROMPT], SAMPLING)
    assert [(c.token_ids, c.logprobs) for c in again] == [(c.token_ids, c.logprobs) for c in samples]


def test_the_engine_declares_its_dtypes(hybrid):
    layout = hybrid.engine.layout()
    assert {region[0] for region in layout[f"{LINEAR}.A_log"]["regions"]} == {"float32"}
    assert {region[0] for region in layout[f"{LINEAR}.dt_bias"]["regions"]} == {"bfloat16"}
    assert layout[f"{LINEAR}.conv1d.weight"]["shape"] == [512, 1, 4]
    assert [region[1:] for region in layout[f"{LINEAR}.conv1d.weight"]["regions"]] == [[0, 0, 128], [0, 128, 128], [0, 256, 256]]


@pytest.mark.parametrize("part", PARTS)
def test_one_bit_of_a_gated_delta_net_is_named(hybrid, part):
    """The lowest bit of the engine's own dtype: of A_log also the one that bfloat16 would have dropped."""
    name = f"{LINEAR}.{part}"
    hybrid.sync("a", 0)
    hybrid.damage("nudge" if part == "A_log" else "nudge_bf16", name)
    hybrid.session.request_full_readback()
    with pytest.raises(WeightMismatch, match=rf"1 of \d+ tensors read back differ from the trainer's: {name}"):
        hybrid.sync("b", 1)
    hybrid.heal()
    hybrid.sync("b", 1)


def test_a_rounded_decay_rate_is_named(hybrid):
    """bfloat16 on the wire where the engine keeps float32."""
    hybrid.damage("bf16", f"{LINEAR}.A_log")
    with pytest.raises(WeightMismatch, match=rf"1 of \d+ tensors read back differ from the trainer's: {LINEAR}.A_log"):
        hybrid.sync("b", 0)


def test_routes_are_those_of_transformers_row_for_row(hybrid):
    """All four layers, three with a recurrent state; tokens that are near no tie. A row further on the experts are others."""
    hybrid.sync("a", 0)
    engine = VllmEngine(hybrid.link, max_model_len=256, routes=RouteReader(hybrid.link, native=False))
    engine.commit(0)
    prompts = [Prompt(f"p{i}", tuple((j * 13 + i * 5) % 300 + 3 for j in range(14 + i)), "", "") for i in range(8)]
    model = copy.deepcopy(hybrid.models["a"])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    same, shifted, total = 0, 0, 0
    for completion in engine.generate(prompts, SAMPLING):
        ids = torch.tensor(completion.prompt_token_ids + completion.token_ids)
        routes = completion.routes.decoded(len(ids))
        assert routes.layers == (0, 1, 2, 3)
        assert routes.known.tolist() == [True] * (len(ids) - 1) + [False]
        for layer, logits in enumerate(router_logits(model, [ids])):
            ranked, order = logits.softmax(-1).sort(-1, descending=True)
            clear = (ranked[:, 1] - ranked[:, 2] > CLEAR)[:-1]
            wanted, found = order[:-1, :2].sort(-1).values, routes.of_layer(layer)[:-1].sort(-1).values
            same += int((found == wanted).all(-1)[clear].sum())
            shifted += int((found.roll(1, 0) == wanted).all(-1)[clear].sum())
            total += int(clear.sum())
    assert total > 500
    assert same >= 0.99 * total
    assert shifted < 0.5 * total
