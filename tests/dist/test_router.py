"""The router policy acts where it belongs and nowhere else, and the taps count every response token once."""

import pytest
import torch
from router_ranks import (
    aux_gradients,
    frozen_dense,
    large_counts,
    jitter_on_rank,
    outside_any_pass,
    recomputed_gradients,
    routing_on_rank,
    train_on_rank,
    watched_inputs,
)
from tiny_models import sequences, write_tiny

from parallel.layout import ParallelLayout

ONE = ParallelLayout()
TP2_SP = ParallelLayout(world=2, tp=2, sp=True)
EP2 = ParallelLayout(world=2, ep=2)
PP2 = ParallelLayout(world=2, pp=2)
TOP_K, EXPERTS, LAYERS = 2, 6, 4
MICRO_BATCHES = [[17, 3, 30], [5, 9], [4, 23, 6], [11]]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    return folder, write_tiny(folder, "qwen3_moe")


def micro_batches(layout):
    """Lists of sequences, dealt to the data-parallel ranks."""
    rows = [sequences(lengths, seed=number) for number, lengths in enumerate(MICRO_BATCHES)]
    return [rows[rank :: layout.dp] for rank in range(layout.dp)]


def masked_router_logits(model, rows):
    """Per layer [n, E]: transformers' router logits at the response tokens of these sequences."""
    layers = [[] for _ in range(LAYERS)]
    for row in rows:
        for layer, logits in zip(layers, model(row[None], output_router_logits=True).router_logits, strict=True):
            layer.append(logits[2:])
    return [torch.cat(layer) for layer in layers]


def test_a_forward_outside_any_pass_is_refused(ranks, moe):
    (message,) = ranks.run(outside_any_pass, ONE, str(moe[0]), sequences([5]))
    assert "outside any named pass" in message


@pytest.mark.parametrize(
    ("layout", "recompute"), [(ONE, False), (TP2_SP, False), (EP2, False), (PP2, False), (ONE, True), (EP2, True)], ids=str
)
@torch.no_grad()
def test_taps_are_transformers_routing_counted_once(ranks, moe, layout, recompute):
    folder, model = moe
    batches = micro_batches(layout)
    rows = [row for of_rank in batches for batch in of_rank for row in batch]
    logits = masked_router_logits(model, rows)
    for first, second in ranks.run(routing_on_rank, layout, str(folder), batches, recompute):
        assert first["layers"] == tuple(range(LAYERS))
        assert float(second["tokens_L"].sum()) == 0.0
        for layer in range(LAYERS):
            p = torch.softmax(logits[layer].double(), -1)
            ranked, order = p.sort(-1, descending=True)
            assert float((ranked[:, 1] - ranked[:, 2]).min()) > 1e-4
            assert first["tokens_L"][layer] == len(p) == sum(len(row) - 2 for row in rows)
            assert first["entropy_L"][layer] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)
            assert first["margin_L"][layer] == pytest.approx(float((ranked[:, 1] - ranked[:, 2]).sum()), rel=1e-4)
            assert first["load_LE"][layer].tolist() == torch.bincount(order[:, :TOP_K].flatten(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize("layout", [ONE, TP2_SP], ids=str)
def test_jitter_acts_in_training_passes_only(ranks, moe, layout):
    for quiet, noisy in ranks.run(jitter_on_rank, layout, str(moe[0]), sequences([17, 30, 9, 4])):
        assert all(torch.equal(logits, quiet["plain"]) for logits in quiet.values())
        assert not torch.equal(noisy["train"], quiet["plain"])
        assert torch.equal(noisy["train"], noisy["again"])
        assert not torch.equal(noisy["train"], noisy["next_step"])
        assert not torch.equal(noisy["train"], noisy["next_micro_batch"])


def test_jitter_reaches_the_gate_and_not_the_experts(ranks, moe):
    (seen,) = ranks.run(watched_inputs, ONE, str(moe[0]), sequences([17, 30, 9, 4]))
    ratio = seen["gate"] / seen["layer"]
    assert 0.9 - 1e-5 <= float(ratio.min()) < 0.91
    assert 1.09 < float(ratio.max()) <= 1.1 + 1e-5
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.01)
    rows = {tuple(row) for row in seen["layer"].tolist()}
    dispatched = [tuple(row) for row in seen["experts"].tolist()]
    assert len(dispatched) == TOP_K * len(rows)
    assert set(dispatched) == rows


@pytest.mark.parametrize("layout", [ONE, EP2], ids=str)
def test_a_frozen_gate_keeps_its_bits(ranks, moe, layout):
    rows = sequences([17, 30, 9, 4])
    gates = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}
    changed = {mode: set(ranks.run(train_on_rank, layout, str(moe[0]), rows, mode, 3)[0]) for mode in ("plain", "freeze")}
    assert gates <= changed["plain"]
    assert changed["freeze"] == changed["plain"] - gates
    experts = {name for name in changed["freeze"] if ".experts." in name}
    assert len(experts) == LAYERS * EXPERTS * 3


def test_freezing_a_dense_model_is_refused(ranks, tmp_path):
    write_tiny(tmp_path, "qwen3")
    (message,) = ranks.run(frozen_dense, ONE, str(tmp_path))
    assert "router.mode = freeze needs a mixture-of-experts model" in message


def expected_aux_gradients(model, batches, coef):
    """coef x mean over layers of E x sum_e load_e x mean p_e, load and mean per micro-batch, weighted by its tokens."""
    model.zero_grad()
    flat = [batch for of_rank in batches for batch in of_rank]
    total = sum(len(row) - 2 for batch in flat for row in batch)
    loss = torch.zeros(())
    for batch in flat:
        for logits in masked_router_logits(model, batch):
            p = logits.softmax(-1)
            load = torch.bincount(p.topk(TOP_K).indices.flatten(), minlength=EXPERTS) / (TOP_K * len(p))
            loss = loss + coef * EXPERTS / LAYERS * (load * p.mean(0)).sum() * len(p) / total
    loss.backward()
    return {
        f"decoder.layers.{layer}.mlp.router.weight": model.model.layers[layer].mlp.gate.weight.grad.clone()
        for layer in range(LAYERS)
    }


@pytest.mark.parametrize("layout", [ONE, TP2_SP, EP2, PP2], ids=str)
def test_auxiliary_loss_gradient(ranks, moe, layout):
    folder, model = moe
    batches = micro_batches(layout)
    want = expected_aux_gradients(model, batches, 0.5)
    results = ranks.run(aux_gradients, layout, str(folder), batches, 0.5)
    for got in results:
        for name, gradient in got.items():
            assert float(want[name].norm()) > 1e-4
            assert float((gradient - want[name]).norm()) <= 1e-4 * float(want[name].norm())
    assert {name for got in results for name in got} == want.keys()


def test_recomputation_draws_the_same_noise(ranks, moe):
    rows = sequences([17, 30, 9, 4])
    (plain,) = ranks.run(recomputed_gradients, ONE, str(moe[0]), rows, False)
    (again,) = ranks.run(recomputed_gradients, ONE, str(moe[0]), rows, True)
    assert len(plain) == LAYERS + 1
    for want, got in zip(plain, again, strict=True):
        assert float((got - want).norm()) <= 1e-5 * float(want.norm())


def test_large_counts_add_up_exactly_over_ranks(ranks):
    for load in ranks.run(large_counts, EP2):
        assert load == [2 * 40_840 + 1, 2 * 40_960]
