"""One distillation update: transformers' gradient on one rank, and the same however the batch is cut and on every layout."""

from dataclasses import replace

import policy_ranks
import pytest
import torch
from policy_cases import rollouts, save_checkpoint
from policy_reference import reference_gradients

from mcore_rl.types import TeacherTopK
from parallel.layout import ParallelLayout

ONE = ParallelLayout()
K, VOCAB, ENTROPY = 5, 320, 0.05
OPTIONS = {"sgd": 0.1, "distill": ENTROPY}
CUTS = {
    "one_a_row": (ONE, 34),
    "dp2": (ParallelLayout(world=2), 64),
    "tp2_sp": (ParallelLayout(world=2, tp=2, sp=True), 64),
    "cp2": (ParallelLayout(world=2, cp=2), 64),
    "pp2": (ParallelLayout(world=2, pp=2), 64),
    "ep2": (ParallelLayout(world=2, ep=2), 64),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folder, transformers' model in float64, and a batch with a made-up teacher's K likeliest tokens."""
    folder = tmp_path_factory.mktemp("student")
    model = save_checkpoint(folder).double()
    batch = rollouts()
    generator = torch.Generator().manual_seed(8)
    tables = [(2.0 * torch.randn(ids.numel(), VOCAB, generator=generator)).log_softmax(-1) for ids in batch.tokens.token_ids]
    best = [table.topk(K, -1) for table in tables]
    teacher = TeacherTopK(tuple(one.indices for one in best), tuple(one.values for one in best))
    return folder, model, replace(batch, teacher=teacher)


@pytest.fixture(scope="module")
def one_rank(ranks, case):
    folder, _, batch = case
    (found,) = ranks.run(policy_ranks.one_update, ONE, folder, batch, {**OPTIONS, "tokens_per_micro_batch": 1000})
    return found


def by_definition(model, batch):
    """Sum of weight x (KL over the teacher's list and a bucket for the rest - ENTROPY x entropy), in float64."""
    total = 0.0
    rows = zip(
        batch.tokens.token_ids, batch.tokens.loss_mask, batch.token_weights, batch.teacher.ids, batch.teacher.logprobs, strict=True
    )
    for ids, mask, weights, chosen, theirs in rows:
        table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for t in mask.nonzero()[:, 0].tolist():
            ours, q = table[t - 1], theirs[t].double().exp()
            p = ours[chosen[t]].exp()
            p_rest, q_rest = 1 - p.sum(), 1 - q.sum()
            divergence = (p * (p / q).log()).sum() + p_rest * (p_rest / q_rest).log()
            total = total + float(weights[t]) * (divergence + ENTROPY * (ours.exp() * ours).sum())
    return total


def test_one_rank_is_the_definition(case, one_rank):
    _, model, batch = case
    loss = by_definition(model, batch)
    loss.backward()
    gradients = reference_gradients(model)
    norm = sum(float(grad.double().square().sum()) for grad in gradients.values()) ** 0.5
    policy_ranks.assert_same_gradients(one_rank, {"loss": loss.item(), "grad_norm": norm, "gradients": gradients})


@pytest.mark.parametrize("cut", CUTS)
def test_however_the_batch_is_cut(ranks, case, one_rank, cut):
    folder, _, batch = case
    layout, budget = CUTS[cut]
    for got in ranks.run(policy_ranks.one_update, layout, folder, batch, {**OPTIONS, "tokens_per_micro_batch": budget}):
        policy_ranks.assert_same_gradients(got, one_rank)
        policy_ranks.assert_same_updates(got, one_rank)
        for name in ("teacher_kl_nats", "mass_outside_teacher_k"):
            assert got["metrics"][name] == pytest.approx(one_rank["metrics"][name], rel=1e-5)
