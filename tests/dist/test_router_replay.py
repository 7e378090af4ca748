"""Routing replay: recorded experts are used in the layer, for the token and in the pass they belong to; weights are live."""

from dataclasses import replace

import pytest
import torch
from policy_cases import rollouts
from policy_ranks import assert_same_gradients
from replay_ranks import (
    live_routes_replayed,
    random_routes,
    refusals,
    replay_update,
    replayed_beside_others,
    weights_of_one_token,
)
from tiny_models import VOCAB, router_logits, write_tiny

from models.routes import Routes
from parallel.layout import ParallelLayout

ONE = ParallelLayout()
TP2_SP = ParallelLayout(world=2, tp=2, sp=True)
PP2 = ParallelLayout(world=2, pp=2)
CP2 = ParallelLayout(world=2, cp=2)
LAYOUTS = [
    (TP2_SP, False),
    (ParallelLayout(world=2, ep=2), False),
    (PP2, False),
    (ParallelLayout(world=2, pp=2, vpp=2), False),
    (CP2, False),
    (ParallelLayout(world=4, tp=2, cp=2, sp=True), False),
    (ONE, True),
    (PP2, True),
]
LENGTHS = (9, 11, 12, 10, 12, 8, 12, 7)
EXPERTS, TOP_K = 6, 2
SPARSE = (0, 1, 3)
UNKNOWN = {(index, length - 1) for index, length in enumerate(LENGTHS)} | {(2, 0), (2, 5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Layer 2 is dense; probabilities are of the softmax over all experts."""
    path = tmp_path_factory.mktemp("moe_mixed")
    write_tiny(path, "qwen3_moe_mixed")
    return str(path)


@pytest.fixture(scope="module")
def batch():
    """Every sequence's last token, and two more, were not recorded."""
    plain = rollouts(LENGTHS, vocab=VOCAB)
    routes = random_routes(LENGTHS, SPARSE, EXPERTS, TOP_K, unknown=UNKNOWN)
    return replace(plain, tokens=replace(plain.tokens, routes=routes))


@pytest.fixture(scope="module")
def one_rank(ranks, folder, batch):
    """One rank, one micro-batch."""
    (result,) = ranks.run(replay_update, ONE, folder, batch, False, 96)
    assert result["metrics"]["micro_batches"] == 1
    return result


def assert_same(got, expected):
    assert_same_gradients(got, expected)
    for name in ("old", "logprobs"):
        for ours, wanted in zip(got[name], expected[name], strict=True):
            assert float((ours - wanted).abs().max()) <= 1e-5


@pytest.mark.parametrize(("layout", "recompute"), LAYOUTS, ids=str)
def test_every_layout_replays_as_one_rank(ranks, folder, batch, one_rank, layout, recompute):
    for result in ranks.run(replay_update, layout, folder, batch, recompute, 48):
        assert_same(result, one_rank)
        assert not result["left"]
        assert [row["layer"] for row in result["routing"]] == list(SPARSE)
        for ours, wanted in zip(result["routing"], one_rank["routing"], strict=True):
            assert ours["load_E"] == wanted["load_E"]
            assert ours["replayed_tokens"] == wanted["replayed_tokens"] == sum(LENGTHS) - len(UNKNOWN)
            assert ours["top1_flip"] == wanted["top1_flip"]


@pytest.mark.parametrize(
    ("layout", "recompute", "budget", "count"), [(ONE, False, 48, 2), (ONE, False, 12, 8), (PP2, True, 24, 4)], ids=str
)
def test_any_number_of_micro_batches_is_the_same_replay(ranks, folder, batch, one_rank, layout, recompute, budget, count):
    """With four on two stages a stage goes forward with one while others still wait to be recomputed."""
    for result in ranks.run(replay_update, layout, folder, batch, recompute, budget):
        assert result["metrics"]["micro_batches"] == count
        assert_same(result, one_rank)
        assert not result["left"]


def test_other_models_of_the_process_neither_take_nor_lose_routes(ranks, folder, batch, one_rank):
    """One that is gone, after it replayed, and a reference that lives beside the replaying one and never replays."""
    (found,) = ranks.run(replayed_beside_others, ONE, folder, batch)
    assert [row["layer"] for row in found["routing"]] == list(SPARSE)
    assert [row["replayed_tokens"] for row in found["routing"]] == [sum(LENGTHS) - len(UNKNOWN)] * len(SPARSE)
    assert_same(found, one_rank)
    assert not found["left"]
    assert all(torch.equal(one, other) for one, other in zip(found["reference"], found["alone"], strict=True))
    assert any(float((a - b).abs().max()) > 0.1 for a, b in zip(found["reference"], found["old"], strict=True))


def test_the_recorded_experts_are_the_ones_used_and_the_rest_is_counted(ranks, folder, batch, one_rank):
    assert one_rank["metrics"]["route_coverage"] == (sum(LENGTHS) - len(UNKNOWN)) / sum(LENGTHS)
    plain = replace(batch, tokens=replace(batch.tokens, routes=random_routes(LENGTHS, SPARSE, EXPERTS, TOP_K)))
    (result,) = ranks.run(replay_update, ONE, folder, plain, False, 96)
    mask = torch.cat(plain.tokens.loss_mask)
    experts = torch.cat([routes.experts for routes in plain.tokens.routes]).long()
    assert result["metrics"]["route_coverage"] == 1.0
    for row, layer in enumerate(result["routing"]):
        assert list(layer["load_E"]) == torch.bincount(experts[mask][:, row].flatten(), minlength=EXPERTS).tolist()
        assert 0.5 < layer["top1_flip"] <= 1.0
    assert any(float((a - b).abs().max()) > 0.1 for a, b in zip(result["logprobs"], one_rank["logprobs"], strict=True))


@pytest.mark.parametrize("layout", [ONE, TP2_SP, PP2, CP2], ids=str)
def test_replaying_the_live_routes_changes_no_bit(ranks, tmp_path, layout):
    model = write_tiny(tmp_path, "qwen3_moe")
    plain = rollouts(LENGTHS, vocab=VOCAB)
    logits = router_logits(model, list(plain.tokens.token_ids))
    for routes, (live, replayed) in ranks.run(live_routes_replayed, layout, str(tmp_path), plain):
        for layer, wanted in enumerate(logits):
            found = torch.cat([one.experts for one in routes])[:, layer].long()
            assert torch.equal(found, wanted.topk(TOP_K).indices)
        for name in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(live[name], replayed[name], strict=True))
        assert all(torch.equal(grad, replayed[2][name]) for name, grad in live[2].items())
        for layer in replayed[3]:
            assert (layer["replayed_tokens"], layer["top1_flip"], layer["topk_jaccard"]) == (sum(LENGTHS), 0.0, 1.0)


@pytest.mark.parametrize(("family", "chosen_sum"), [("qwen3_moe", 4.0), ("qwen3_moe_mixed", 21.0)])
def test_weights_are_those_of_the_live_logits_by_hand(ranks, tmp_path, family, chosen_sum):
    """Logits log(1) to log(6), experts 0 and 2: weights 1 and 3 over their own sum, or over 21 where all six are in it."""
    write_tiny(tmp_path, family)
    ((weights, experts, _),) = ranks.run(weights_of_one_token, ONE, str(tmp_path), None)
    assert experts == [4, 5]
    assert weights[4:] == pytest.approx([5 / 11, 6 / 11] if family == "qwen3_moe" else [5 / 21, 6 / 21])
    ((weights, experts, gradient),) = ranks.run(weights_of_one_token, ONE, str(tmp_path), [2, 0])
    assert experts == [0, 2]
    assert weights == pytest.approx([1 / chosen_sum, 0, 3 / chosen_sum, 0, 0, 0])
    p = 1 / chosen_sum
    others = [3.0, 0.0] if family == "qwen3_moe" else [3.0, 2.0]
    assert gradient[:1] + gradient[2:0:-1] == pytest.approx([p * (1 - p), *(-p * other / chosen_sum for other in others)])


def test_wrong_routes_are_refused_by_name(ranks, folder, batch):
    def changed(index, make):
        routes = list(batch.tokens.routes)
        routes[index] = make(routes[index])
        return tuple(routes)

    def with_row(row):
        def make(one):
            experts = one.experts.clone()
            experts[3, 1] = torch.tensor(row)
            return Routes(one.layers, experts, one.known)

        return make

    cases = [
        changed(4, with_row([1, 1])),
        changed(5, with_row([1, 6])),
        changed(0, lambda one: Routes((0, 1, 2), one.experts, one.known)),
        changed(1, lambda one: Routes(one.layers, one.experts[..., :1], one.known)),
        batch.tokens.routes,
    ]
    bare = replace(batch, tokens=replace(batch.tokens, routes=None))
    (said,) = ranks.run(refusals, ONE, folder, bare, cases)
    wanted = [
        "sample s4: routes: a token names the same expert twice",
        "sample s5: routes: experts 0 to 6, the model has 6",
        "sample s0: routes: 2 experts in layers (0, 1, 2); the model has 2 in layers (0, 1, 3)",
        "sample s1: routes: 1 experts in layers (0, 1, 3)",
        "router.mode = plain does not replay them",
    ]
    assert len(said) == len(wanted)
    assert all(part in message for part, message in zip(wanted, said, strict=True))
