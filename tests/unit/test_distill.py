"""Reverse KL with a bucket against its definition, the flat rule, the gate's KL, and teachers that are refused."""

import json
import math
import shutil

import pytest
import torch

from mcore_rl.algorithms.distill import distill_loss, reverse_kl
from mcore_rl.algorithms.divergence import TopList, rest_of
from mcore_rl.algorithms.losses import LossInputs
from mcore_rl.config.compose import compose_config
from mcore_rl.config.distill import DistillConfig
from mcore_rl.config.validate import validate
from mcore_rl.data.tokenizer import build_tokenizer
from mcore_rl.distill import Flatness, _aligned
from mcore_rl.distill_gate import mean_kl
from mcore_rl.tiny_model import build_tiny

VOCAB, TOKENS = 11, 7


def logits(seed, scale=2.0):
    return scale * torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full_kl(student, teacher):
    """sum_v p_s (log p_s - log p_t), by definition."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def top_k(student, teacher, k):
    """Log-probs of both at the teacher's K likeliest tokens."""
    theirs = teacher.log_softmax(-1)
    values, ids = theirs.topk(k, -1)
    return student.log_softmax(-1).gather(1, ids), values


def test_the_whole_vocabulary_gives_the_full_divergence_and_its_gradient():
    student, teacher = logits(0).requires_grad_(), logits(1)
    ours = reverse_kl(*top_k(student, teacher, VOCAB))
    exact = full_kl(student, teacher)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)
    (got,), (wanted,) = (torch.autograd.grad(value.sum(), student) for value in (ours, exact))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_a_list_and_its_bucket_are_the_divergence_of_the_coarser_distributions(k):
    student, teacher = logits(2), logits(3)
    ids = teacher.topk(k, -1).indices
    coarse = []
    for scores in (student, teacher):
        p = scores.softmax(-1)
        listed = p.gather(1, ids)
        coarse.append(torch.cat([listed, 1.0 - listed.sum(-1, keepdim=True)], -1))
    exact = (coarse[0] * (coarse[0] / coarse[1]).log()).sum(-1)
    ours = reverse_kl(*top_k(student, teacher, k))
    torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-7)
    # Joining tokens can only lose divergence, and it is never negative.
    assert bool((ours >= 0).all()) and bool((ours <= full_kl(student, teacher) + 1e-12).all())


def test_by_hand():
    """Teacher [1/2, 1/4 | 1/4], student [1/4, 1/4 | 1/2]: 1/4 log 1/2 + 0 + 1/2 log 2 = 1/4 log 2."""
    student, teacher = torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[0.5, 0.25]]).log()
    assert float(reverse_kl(student, teacher)) == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert float(rest_of(student.exp().sum(-1))) == pytest.approx(0.5)


def test_a_leaking_student_is_charged():
    """All mass outside the list: a sum over the list alone would call that better than agreement."""
    teacher = torch.tensor([[0.6, 0.39]]).log()
    leaking = torch.tensor([[0.01, 0.01]]).log()
    assert float(reverse_kl(leaking, teacher)) > 1.0 > abs(float(reverse_kl(teacher, teacher)))
    assert float((leaking.exp() * (leaking - teacher)).sum()) < 0.0


def inputs(mask, student, teacher, entropy=None):
    segment = torch.zeros(len(mask), dtype=torch.int64)
    return LossInputs(
        torch.zeros(len(mask)), None, mask, segment, torch.zeros(1), entropy=entropy, teacher=teacher, student=student
    )


def test_untrained_tokens_have_no_loss_and_no_gradient():
    mask = torch.tensor([False, True, True, False, True, False, True])
    raw = logits(4).float().requires_grad_()
    student, teacher = top_k(raw, logits(5).float(), 4)
    entropy = torch.rand(TOKENS)
    found = distill_loss(0.3)(inputs(mask, student, teacher, entropy))
    wanted = torch.where(mask, reverse_kl(student, teacher) - 0.3 * entropy, 0.0)
    torch.testing.assert_close(found.values, wanted)
    (grad,) = torch.autograd.grad(found.values.sum(), raw)
    assert not grad[~mask].any() and bool(grad[mask].any(1).all())
    metrics = found.stats.metrics()
    assert metrics["teacher_kl_nats"] == pytest.approx(float(reverse_kl(student, teacher)[mask].mean().detach()), rel=1e-6)
    assert metrics["mass_outside_teacher_k"] == pytest.approx(
        float(rest_of(student.exp().sum(-1))[mask].mean().detach()), rel=1e-6
    )


def test_a_batch_without_a_teacher_is_refused():
    with pytest.raises(ValueError, match="no teacher log-probs"):
        distill_loss()(inputs(torch.ones(3, dtype=torch.bool), None, None))


def test_flat_is_when_the_newer_half_is_no_lower():
    flat = Flatness(DistillConfig(flat_steps=4, flat_nats=0.01))
    assert [flat.add(value) for value in (1.0, 0.8, 0.6, 0.5, 0.45, 0.452, 0.45, 0.46)] == [False] * 6 + [False, True]
    never = Flatness(DistillConfig(flat_steps=0))
    assert not any(never.add(1.0) for _ in range(500))


def test_the_answer_lies_at_the_end():
    row = _aligned(torch.ones(2, 3), 5)
    assert row.tolist() == [[0.0] * 3] * 3 + [[1.0] * 3] * 2


def test_the_gate_compares_what_both_name():
    """Full [.5, .3 | .2] against [.4, .4 | .2]; the used one also lists a token that the full one does not."""
    full = TopList(torch.tensor([[3, 5]]), torch.tensor([[0.5, 0.3]]).log())
    used = TopList(torch.tensor([[5, 3, 9]]), torch.tensor([[0.4, 0.4, 0.1]]).log())
    wanted = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.2)
    assert mean_kl([full], [used]) == pytest.approx(wanted, rel=1e-6)
    assert mean_kl([full], [full]) == pytest.approx(0.0, abs=1e-7)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The quickstart's model as a folder."""
    build = compose_config(["experiment=quickstart"]).model.build
    return build_tiny(tmp_path_factory.mktemp("teacher") / "model", build, 3)


def refused(*overrides):
    with pytest.raises(ValueError) as caught:
        validate(compose_config(["experiment=quickstart", "eval.prompts=20", *overrides]), "distill")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_teacher_of_the_same_tokenizer_passes(teacher):
    validate(compose_config(["experiment=quickstart", "eval.prompts=20", f"distill.teacher={teacher}"]), "distill")


REFUSED = {
    "distill.top_k=0": "distill.top_k=0: must be at least 1",
    "distill.top_k=321": "distill.top_k=321: the models have 320 tokens",
    "distill.flat_steps=1": "distill.flat_steps=1: two halves",
    "distill.min_lead=2": "distill.min_lead=2.0",
    "distill.entropy_coef=nan": "distill.entropy_coef=nan",
    "distill.full_teacher=/nowhere": "distill.full_teacher=/nowhere: no such folder",
    "rollout.engine=trainer": "rollout.engine=trainer",
    "algorithm.aggregation=null": "algorithm.aggregation=null",
}


@pytest.mark.parametrize("override", REFUSED)
def test_numbers_that_cannot_work(teacher, override):
    assert REFUSED[override] in refused(f"distill.teacher={teacher}", override)


def test_no_teacher():
    assert "distill.teacher=null" in refused()
    assert "distill.teacher=null" in refused("distill.teacher=''")
    assert "distill.teacher=/nowhere: no such folder" in refused("distill.teacher=/nowhere")


def test_another_tokenizer_or_template(teacher, tmp_path):
    other = shutil.copytree(teacher, tmp_path / "ids")
    rules = json.loads((other / "tokenizer.json").read_text())
    rules["added_tokens"][0]["lstrip"] = not rules["added_tokens"][0]["lstrip"]
    (other / "tokenizer.json").write_text(json.dumps(rules))
    assert "its tokenizer is not the student's" in refused(f"distill.teacher={other}")
    other = shutil.copytree(teacher, tmp_path / "template")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "model")
    tokenizer.save_pretrained(other)
    assert "chat template renders" in refused(f"distill.teacher={other}")
