"""How a batch is cut, ordered, packed or padded does not change an update; unanimous groups and padding do nothing."""

from dataclasses import replace

import policy_ranks
import pytest
import torch
from policy_cases import rollouts, save_checkpoint, with_old

from mcore_rl import policy_rows
from mcore_rl.algorithms.losses import sft_loss
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.types import Pass, StopRun, TokenBatch
from models.registry import read_spec
from models.router_policy import RouterPolicy
from models.weights import export_checkpoint
from parallel.layout import ParallelLayout
from parallel.packing import DUMMY, pack_micro_batch

ONE = ParallelLayout()
TWO = ParallelLayout(world=2)
CP2 = ParallelLayout(world=2, cp=2)
CP2_DP2 = ParallelLayout(world=4, cp=2)
SGD = {"sgd": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_moe")
    save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def batch(ranks, folder):
    tokens = rollouts().tokens
    (values,) = ranks.run(policy_ranks.scoring, ONE, folder, tokens, Pass.OLD)
    return with_old(rollouts(), values[0])


@pytest.fixture(scope="module")
def expected(ranks, folder, batch):
    return ranks.run(policy_ranks.one_update, ONE, folder, batch, SGD)[0]


def take(batch, order):
    """The same batch with its sequences in another order."""
    return replace(
        batch,
        tokens=batch.tokens.select(order),
        token_weights=tuple(batch.token_weights[i] for i in order),
        advantages=batch.advantages[list(order)],
        old_logprobs=None if batch.old_logprobs is None else tuple(batch.old_logprobs[i] for i in order),
    )


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ONE, {"tokens_per_micro_batch": 34}),
        (ONE, {"tokens_per_micro_batch": 1000}),
        (ONE, {"multiple": 16}),
        (CP2, {"tokens_per_micro_batch": 36}),
        (CP2_DP2, {"tokens_per_micro_batch": 1000}),
    ],
    ids=str,
)
def test_micro_batch_size_and_padding(ranks, folder, batch, expected, layout, options):
    for got in ranks.run(policy_ranks.one_update, layout, folder, batch, {**SGD, **options}):
        policy_ranks.assert_same_gradients(got, expected)
        policy_ranks.assert_same_updates(got, expected)
        for name in ("tokens", "clip_frac", "ratio_mean", "policy_entropy_nats"):
            assert got["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5)
        for ours, theirs in zip(got["routing"], expected["routing"], strict=True):
            assert (ours["tokens"], ours["load_E"]) == (theirs["tokens"], theirs["load_E"])


@pytest.mark.parametrize("layout", [ONE, CP2], ids=str)
def test_order_of_the_batch(ranks, folder, batch, expected, layout):
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    got = ranks.run(policy_ranks.one_update, layout, folder, take(batch, order), SGD)[0]
    policy_ranks.assert_same_gradients(got, expected)
    for place, index in enumerate(order):
        torch.testing.assert_close(got["logprobs"][place], expected["logprobs"][index], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "index"), [(TWO, 4), (CP2_DP2, 4), (CP2, 6)], ids=str)
def test_more_ranks_than_sequences(ranks, folder, batch, layout, index):
    """One sequence on two data-parallel ranks: the other runs a dummy micro-batch that weighs nothing.

    Sequence 6 trains one token: one of two context-parallel ranks has nothing to score and still joins in.
    """
    one = take(batch, [index])
    trained = int(batch.tokens.loss_mask[index].sum())
    assert trained == (14 if index == 4 else 1)
    (alone,) = ranks.run(policy_ranks.one_update, ONE, folder, one, SGD)
    for got in ranks.run(policy_ranks.one_update, layout, folder, one, SGD):
        policy_ranks.assert_same_gradients(got, alone)
        assert got["metrics"]["ratio_mean"] == pytest.approx(alone["metrics"]["ratio_mean"], rel=1e-6)
        assert [layer["tokens"] for layer in got["routing"]] == [trained] * 4


def test_auxiliary_loss_of_a_row_that_ranks_share(ranks, folder, batch):
    """Its load is that of the whole row, wherever the row's tokens are; one row, so that both layouts cut alike."""
    options = {**SGD, "aux_loss_coef": 0.5, "tokens_per_micro_batch": 1000}
    (alone,) = ranks.run(policy_ranks.one_update, ONE, folder, batch, options)
    (without,) = ranks.run(policy_ranks.one_update, ONE, folder, batch, {**options, "aux_loss_coef": 0.0})
    assert abs(alone["grad_norm"] - without["grad_norm"]) > 1e-3 * without["grad_norm"]
    for got in ranks.run(policy_ranks.one_update, CP2, folder, batch, options):
        policy_ranks.assert_same_gradients(got, alone)


def packed_and_alone(groups, device, folder, tokens):
    policy = policy_ranks.make_policy(groups, folder)
    together = policy.logprobs(tokens, Pass.EVAL)
    alone = [policy.logprobs(tokens.select([i]), Pass.EVAL) for i in range(len(tokens))]
    return together.logprobs, [values.logprobs[0] for values in alone]


def test_packed_equals_alone(ranks, folder, batch):
    ((together, alone),) = ranks.run(packed_and_alone, ONE, folder, batch.tokens)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def neighbours(groups, device, folder, tokens):
    policy = policy_ranks.make_policy(groups, folder, tokens_per_micro_batch=1000)
    changed = tuple(ids if i == 3 else (ids + 7) % 300 for i, ids in enumerate(tokens.token_ids))
    other = TokenBatch(changed, tokens.loss_mask, tokens.sample_ids)
    return [policy.logprobs(one, Pass.EVAL).logprobs[3] for one in (tokens, other)]


@pytest.mark.parametrize("layout", [ONE, CP2], ids=str)
def test_neighbours_in_a_row_are_not_seen(ranks, folder, batch, layout):
    """Neither as context nor, one place on, as what the last token is scored by."""
    for one, other in ranks.run(neighbours, layout, folder, batch.tokens):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def noisy_padding(groups, device, folder, batch):
    """The same update with other token ids in the padding segments."""

    def pack(token_ids, indices, **multiples):
        row = pack_micro_batch(token_ids, indices, **multiples)
        assert DUMMY in row.segments and not row.real.all()
        return replace(row, token_ids=torch.where(row.real, row.token_ids, 17 + 3 * torch.arange(row.num_tokens)))

    original, policy_rows.pack_micro_batch = policy_rows.pack_micro_batch, pack
    try:
        return policy_ranks.one_update(groups, device, folder, batch, {**SGD, "multiple": 32})
    finally:
        policy_rows.pack_micro_batch = original


@pytest.mark.parametrize("layout", [ONE, CP2], ids=str)
def test_content_of_padding(ranks, folder, batch, expected, layout):
    """Under context parallelism every sequence has padding of its own behind it, in its segment."""
    got = ranks.run(noisy_padding, layout, folder, batch)[0]
    policy_ranks.assert_same_gradients(got, expected)
    assert [layer["load_E"] for layer in got["routing"]] == [layer["load_E"] for layer in expected["routing"]]


def test_old_equal_to_current_is_a_ratio_of_exactly_one(ranks, folder):
    batch = rollouts()
    (itself,) = ranks.run(policy_ranks.one_update, ONE, folder, batch, SGD)
    (values,) = ranks.run(policy_ranks.scoring, ONE, folder, batch.tokens, Pass.OLD)
    (explicit,) = ranks.run(policy_ranks.one_update, ONE, folder, replace(batch, old_logprobs=values[0]), SGD)
    for got in (itself, explicit):
        assert (got["metrics"]["ratio_min"], got["metrics"]["ratio_max"], got["metrics"]["clip_frac"]) == (1.0, 1.0, 0.0)
        assert got["loss"] == pytest.approx(-float(batch.advantages.mean()), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(values[0], itself["logprobs"], strict=True))
    assert all(torch.equal(itself["gradients"][name], grad) for name, grad in explicit["gradients"].items())


def test_unanimous_group_gives_no_gradient(ranks, folder, batch):
    """Advantage 0 on half of the batch: the gradient is that of the other half at the same weights; all 0: exactly 0."""
    half = replace(batch, advantages=torch.where(torch.arange(8) < 4, batch.advantages, 0.0))
    (got,) = ranks.run(policy_ranks.one_update, ONE, folder, half, SGD)
    (alone,) = ranks.run(policy_ranks.one_update, ONE, folder, take(half, [0, 1, 2, 3]), SGD)
    policy_ranks.assert_same_gradients(got, alone)
    (nothing,) = ranks.run(policy_ranks.one_update, ONE, folder, replace(batch, advantages=torch.zeros(8)), SGD)
    assert nothing["grad_norm"] == 0.0 and nothing["loss"] == 0.0
    assert all(torch.equal(nothing["before"][name], weight) for name, weight in nothing["after"].items())


def stages(groups, device, folder, batch, target):
    """Three supervised steps, an export, and one RL step of a new policy over the same modules."""
    chunks = policy_ranks.build_chunks(groups, folder)
    policy = policy_ranks.make_policy(groups, folder, chunks=chunks, loss=sft_loss, first_version=-3)
    versions, losses = [policy.weights().version], []
    for _ in range(3):
        losses.append(policy.update(replace(batch, old_logprobs=None)).loss)
        versions.append(policy.weights().version)
    export_checkpoint(policy._weights._model, read_spec(folder), source=folder, target=target)
    del policy
    second = policy_ranks.make_policy(groups, folder, chunks=chunks)
    before = policy_ranks.full_tensors(second.weights())
    report = second.update(batch)
    after = policy_ranks.full_tensors(second.weights())
    gradients = policy_ranks.full_gradients(second)
    versions.append(second.version)
    run = {"loss": report.loss, "grad_norm": report.grad_norm, "gradients": gradients, "before": before, "after": after}
    return versions, losses, run


def test_a_second_stage_over_the_same_modules(ranks, folder, batch, tmp_path):
    """As a policy over freshly loaded modules: nothing of the first stage's optimizer or gradient buffers is left."""
    versions, losses, got = ranks.run(stages, TWO, folder, batch, tmp_path / "after_sft")[0]
    assert versions == [-3, -2, -1, 0, 1]
    assert losses[0] > losses[1] > losses[2]
    fresh = ranks.run(policy_ranks.one_update, TWO, tmp_path / "after_sft", batch, {})[0]
    policy_ranks.assert_same_gradients(got, fresh)
    policy_ranks.assert_same_updates(got, fresh)


def not_finite(groups, device, folder, batch):
    policy = policy_ranks.make_policy(groups, folder)
    before = policy_ranks.full_tensors(policy.weights())
    messages = []
    for poison in (float("nan"), 3e38):
        advantages = batch.advantages.clone()
        advantages[3] = poison
        try:
            policy.update(replace(batch, advantages=advantages, old_logprobs=None))
        except StopRun as stop:
            messages.append(str(stop))
    same = all(torch.equal(before[name], tensor) for name, tensor in policy.weights())
    return messages, same, policy.version


def test_what_is_not_finite_stops_before_the_step(ranks, folder, batch):
    for messages, same, version in ranks.run(not_finite, TWO, folder, batch):
        assert "loss is nan; no optimizer step was taken" in messages[0]
        assert len(messages) == 2 and "no optimizer step was taken" in messages[1]
        assert same and version == 0


def schedule(groups, device, folder, batch):
    config = OptimizerConfig(lr=1e-4, warmup_steps=2)
    policy = policy_ranks.make_policy(groups, folder, optimizer=config)
    rates = [policy.update(replace(batch, old_logprobs=None)).metrics["lr"] for _ in range(3)]
    used = [group["lr"] for group in policy._optimizer.megatron.param_groups]
    return rates, used


def test_learning_rate_follows_the_schedule(ranks, folder, batch):
    ((rates, used),) = ranks.run(schedule, ONE, folder, batch)
    assert rates == [5e-5, 1e-4, 1e-4] and set(used) == {1e-4}


def frozen(groups, device, folder, batch, mode):
    policy_of = RouterPolicy(mode=mode)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)
    chunks = policy_ranks.build_chunks(groups, folder, policy_of)
    policy = policy_ranks.make_policy(groups, folder, chunks=chunks, optimizer=config)
    before = policy_ranks.full_tensors(policy.weights())
    norm = policy.update(replace(batch, old_logprobs=None)).grad_norm
    gradients = policy_ranks.full_gradients(policy)
    for _ in range(2):
        policy.update(replace(batch, old_logprobs=None))
    after = policy_ranks.full_tensors(policy.weights())
    same = {name: torch.equal(before[name], after[name]) for name in before}
    return same, norm, gradients


def test_freeze_leaves_the_gate_alone(ranks, folder, batch):
    """Three steps with weight decay. Its gradient leaves the norm; what passes through it to the layers below is all there."""
    (plain, norm, gradients), *_ = ranks.run(frozen, TWO, folder, batch, "plain")
    gates = {name for name in plain if name.endswith("mlp.gate.weight")}
    of_gates = sum(float(gradients[name].double().square().sum()) for name in gates)
    assert of_gates > 1e-3 * norm**2
    for same, frozen_norm, rest in ranks.run(frozen, TWO, folder, batch, "freeze"):
        assert {name for name, unchanged in same.items() if unchanged} == gates
        assert frozen_norm == pytest.approx((norm**2 - of_gates) ** 0.5, rel=1e-6)
        assert all(torch.equal(rest[name], grad) for name, grad in gradients.items() if name not in gates)
        assert not any(rest[name].any() for name in gates)
    assert not any(plain.values())


def test_train_pass_belongs_to_update(ranks, folder, batch):
    with pytest.raises(AssertionError, match="logprobs\\(pass_name=train\\)"):
        ranks.run(policy_ranks.scoring, ONE, folder, batch.tokens, Pass.TRAIN)
