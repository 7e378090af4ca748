"""The gradient after `run_micro_batches` is d(sum of w x l over the global batch), on every layout.

The reference is plain autograd on one rank: no schedule, no DistributedDataParallel, one backward of one sum.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_gpt
import torch

from parallel.layout import ParallelLayout
from parallel.optimizer import OptimizerSettings, build_ddp, build_optimizer
from parallel.schedule import run_micro_batches

COUNT = 8


def reference(groups, device, count, options):
    """Full gradients by name, the token losses of every sample, by plain autograd."""
    (model,) = tiny_gpt.build(groups, **options)
    losses = [tiny_gpt.token_losses(model, ids, labels)[0] for ids, labels, _ in tiny_gpt.samples(count)]
    total = sum((loss * weights).sum() for loss, (_, _, weights) in zip(losses, tiny_gpt.samples(count), strict=True))
    total.backward()
    return {name: parameter.grad for name, parameter in tiny_gpt.names(model, groups)}, [loss.detach() for loss in losses]


def gradient_errors(groups, device, count, options, expected):
    """Worst (difference - tolerance) over this rank's tensors at the project's 1e-5, and how many tensors were compared."""
    chunks = tiny_gpt.build(groups, **options)
    wrapped = build_ddp(chunks, groups, distributed_optimizer=False)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    mine = tiny_gpt.share_of(groups, tiny_gpt.samples(count))
    values = run_micro_batches(wrapped, mine, tiny_gpt.forward_step, groups=groups, forward_only=False)
    norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in expected.values()))
    errors = {}
    for chunk in chunks:
        for name, parameter in tiny_gpt.names(chunk, groups):
            wanted = tiny_gpt.cut(expected[name], name, groups)
            allowed = 1e-5 * float(wanted.norm()) + 1e-7 * norm
            errors[name] = float((parameter.main_grad - wanted).norm()) / allowed
    return errors, values


LAYOUTS = [
    ("dense", ParallelLayout()),
    ("dense", ParallelLayout(world=2)),
    ("dense", ParallelLayout(world=2, tp=2)),
    ("dense", ParallelLayout(world=2, tp=2, sp=True)),
    ("tied", ParallelLayout(world=2, pp=2)),
    ("tied", ParallelLayout(world=4, pp=2, tp=2, sp=True)),
    ("moe", ParallelLayout()),
    ("moe", ParallelLayout(world=2)),
    ("moe", ParallelLayout(world=2, ep=2)),
    ("moe", ParallelLayout(world=2, pp=2)),
    ("moe", ParallelLayout(world=2, tp=2, sp=True)),
    ("moe", ParallelLayout(world=2, tp=2, etp=2, sp=True)),
    ("moe", ParallelLayout(world=2, pp=2, vpp=2)),
    ("moe", ParallelLayout(world=4, tp=2, ep=2, sp=True)),
    ("moe", ParallelLayout(world=4, tp=2, ep=2, etp=2, sp=True)),
    ("moe", ParallelLayout(world=4, pp=2, ep=2)),
    ("moe", ParallelLayout(world=4, ep=2)),
    ("moe", ParallelLayout(world=4, pp=2, vpp=2, tp=2, sp=True)),
]
OPTIONS = {"dense": {"moe": False}, "tied": {"moe": False, "tied": True}, "moe": {"moe": True}}


@pytest.fixture(scope="module")
def references(ranks):
    return {kind: ranks.run(reference, ParallelLayout(), COUNT, options)[0] for kind, options in OPTIONS.items()}


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=str)
def test_gradient_is_the_plain_sum(ranks, references, kind, layout):
    expected, losses = references[kind]
    compared = set()
    for rank, (errors, values) in enumerate(ranks.run(gradient_errors, layout, COUNT, OPTIONS[kind], expected)):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 1.0, (rank, worst, errors[worst])
        compared |= set(errors)
        at = layout.coordinates(rank)
        wanted = losses[at.dp :: layout.dp] if at.pp == layout.pp - 1 else []
        assert len(values) == len(wanted)
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)
    assert compared == set(expected)


def accumulated(groups, device, count, parts):
    """Gradient when the same sum is brought as `parts` losses per sample."""
    (model,) = tiny_gpt.build(groups)
    wrapped = build_ddp([model], groups, distributed_optimizer=False)
    wrapped[0].zero_grad_buffer()
    pieces = []
    for ids, labels, weights in tiny_gpt.samples(count):
        pieces += [(ids, labels, weights * (torch.arange(weights.numel()) % parts == part)) for part in range(parts)]
    run_micro_batches(wrapped, pieces, tiny_gpt.forward_step, groups=groups, forward_only=False)
    return {name: parameter.main_grad for name, parameter in tiny_gpt.names(model, groups)}


def test_number_of_micro_batches_does_not_matter(ranks):
    expected, _ = ranks.run(reference, ParallelLayout(), 1, {"moe": True})[0]
    for parts in (1, 3):
        (got,) = ranks.run(accumulated, ParallelLayout(), 1, parts)
        for name, grad in got.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)


def forward_only(groups, device, count):
    chunks = tiny_gpt.build(groups)
    mine = tiny_gpt.share_of(groups, tiny_gpt.samples(count))
    values = run_micro_batches(chunks, mine, tiny_gpt.forward_step, groups=groups, forward_only=True)
    return values, [name for chunk in chunks for name, parameter in chunk.named_parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(world=2, pp=2), ParallelLayout(world=2, pp=2, vpp=2)], ids=str
)
def test_forward_only_returns_values_and_leaves_no_gradient(ranks, references, layout):
    losses = references["moe"][1]
    results = ranks.run(forward_only, layout, COUNT)
    assert all(grads == [] for _, grads in results)
    values = results[-1][0]
    assert len(values) == COUNT
    for value, want in zip(values, losses, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)


def stepped(groups, device, count, options, settings):
    """Parameters before and after one optimizer step, its result, and the optimizer's class."""
    chunks = tiny_gpt.build(groups, **options)
    wrapped = build_ddp(chunks, groups, distributed_optimizer=settings["kind"] == "adam")
    optimizer = build_optimizer(wrapped, OptimizerSettings(**settings))
    optimizer.zero_grad()
    mine = tiny_gpt.share_of(groups, tiny_gpt.samples(count))
    run_micro_batches(wrapped, mine, tiny_gpt.forward_step, groups=groups, forward_only=False)
    optimizer.set_lr(LR)
    result = optimizer.step()
    after = {name: parameter.detach().clone() for chunk in chunks for name, parameter in tiny_gpt.names(chunk, groups)}
    before = {name: tiny_gpt.cut(tiny_gpt.full_tensor(name), name, groups) for name in after}
    return tuple(result), after, before, optimizer.implementation


LR = 0.125
# So large that Adam's first update, lr g / (|g| + eps), does not turn rounding errors of small gradients into signs.
EPS = 0.1
STEPS = [("adam", 0.5, kind, layout) for kind, layout in LAYOUTS if layout.world == 2 and layout.vpp is None]
STEPS += [("adam", 0.0, "moe", ParallelLayout(world=2, ep=2)), ("sgd", 0.5, "moe", ParallelLayout(world=2, tp=2, sp=True))]


@pytest.mark.parametrize(("optimizer", "clip", "kind", "layout"), STEPS, ids=str)
def test_first_update_and_grad_norm(ranks, references, kind, layout, optimizer, clip):
    """The first update by its definition from the reference gradient g (clipped): sgd lr g, adam lr g / (|g| + eps)."""
    expected, _ = references[kind]
    norm = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in expected.values()))
    assert norm > 0.5
    scaled = {name: grad * (clip / norm if clip else 1.0) for name, grad in expected.items()}
    updates = {name: LR * (grad if optimizer == "sgd" else grad / (grad.abs() + EPS)) for name, grad in scaled.items()}
    scale = math.sqrt(sum(float(update.pow(2).sum()) for update in updates.values()))
    settings = {"kind": optimizer, "lr": 1.0, "eps": EPS, "clip_grad": clip}
    for rank, (result, after, before, implementation) in enumerate(ranks.run(stepped, layout, COUNT, OPTIONS[kind], settings)):
        place = SimpleNamespace(layout=layout, at=layout.coordinates(rank))
        assert result[0] is True
        assert result[1] == pytest.approx(norm, rel=1e-5)
        assert implementation == {"sgd": "torch.optim.sgd.SGD", "adam": "torch.optim.adamw.AdamW"}[optimizer]
        for name, value in after.items():
            wanted = tiny_gpt.cut(updates[name], name, place)
            allowed = 1e-5 * float(wanted.norm()) + 2**-23 * float(before[name].norm()) + 1e-6 * scale
            assert float((before[name] - value - wanted).norm()) <= allowed, name


def not_finite(groups, device):
    (model,) = tiny_gpt.build(groups)
    wrapped = build_ddp([model], groups)
    optimizer = build_optimizer(wrapped, OptimizerSettings(lr=1.0))
    optimizer.zero_grad()

    def step(sample, chunk):
        output, finish = tiny_gpt.forward_step(sample, chunk)
        poison = float("nan") if groups.at.dp == 1 else 1.0
        return output, lambda losses: (finish(losses)[0] * poison, None)

    run_micro_batches(wrapped, tiny_gpt.samples(1), step, groups=groups, forward_only=False)
    result = optimizer.step()
    changed = [name for name, p in tiny_gpt.names(model, groups) if not torch.equal(p, tiny_gpt.full_tensor(name))]
    return result.ok, result.grad_norm, changed, optimizer.implementation


def test_a_gradient_that_is_not_finite_changes_nothing(ranks):
    for ok, norm, changed, implementation in ranks.run(not_finite, ParallelLayout(world=2)):
        assert not ok
        assert math.isnan(norm)
        assert changed == []
        assert implementation == "torch.optim.adamw.AdamW"


def refusal(groups, device, case):
    changes = {
        "per_token": {"calculate_per_token_loss": False},
        "aux": {"moe_aux_loss_coeff": 0.1},
        "z": {"moe_z_loss_coeff": 0.1},
    }
    chunks = tiny_gpt.build(groups, **changes.get(case, {}))
    count = 0 if case == "none" else 1

    def step(sample, chunk):
        output, _ = tiny_gpt.forward_step(sample, chunk)
        return output, lambda losses: (losses, None)

    try:
        run_micro_batches(chunks, tiny_gpt.samples(count), step, groups=groups, forward_only=False)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("none", "0 micro-batches"),
        ("per_token", "calculate_per_token_loss=False"),
        ("vector", "scalar"),
        ("aux", "moe_aux_loss_coeff=0.1"),
        ("z", "moe_z_loss_coeff=0.1"),
    ],
)
def test_refusals(ranks, case, message):
    assert message in ranks.run(refusal, ParallelLayout(), case)[0]


def trained_threads(groups, device):
    stepped(groups, device, 2, {"moe": True}, {"kind": "adam"})
    return len(list(Path("/proc/self/task").iterdir()))


def test_ranks_do_not_collect_threads(ranks):
    """Process groups of an earlier run are gone (but for one): they would keep gloo threads that spin, 3 each of about 50."""
    first, second = (ranks.run(trained_threads, ParallelLayout(world=2)) for _ in range(2))
    for before, after in zip(first, second, strict=True):
        assert before > 30
        assert after - before <= 3
