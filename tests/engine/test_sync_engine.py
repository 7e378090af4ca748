"""Weight syncs into a real vLLM engine: exact when they pass, named when anything is off."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.batching import check_completions
from mcore_rl.sync.buckets import plan_buckets, slot_bytes
from mcore_rl.sync.digest import wire_digest
from mcore_rl.sync.proof import readback_names
from mcore_rl.sync.shm import Segment
from mcore_rl.types import Prompt, SamplingParams, StaleRollout, WeightMismatch

SAMPLING = SamplingParams(temperature=1.0, max_tokens=6, stop_token_ids=(), samples_per_prompt=2, seed=1)
PROMPT = Prompt("p", tuple(range(3, 25)), "", "")
EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"


def refuses(trained) -> bool:
    """After a failed sync nothing can be sampled."""
    assert trained.engine.version is None
    with pytest.raises(StaleRollout):
        trained.engine.generate([PROMPT], SAMPLING)
    return True


@pytest.mark.parametrize("which", ["moe", "dense"])
def test_there_and_back(which, request):
    """b, then a: a's exact outputs; every sync's probe agrees with transformers; the first one reads everything back."""
    trained = request.getfixturevalue(which)
    first = trained.sync("a", 0)
    scores, samples = trained.engine.score(trained.probe), trained.engine.generate([PROMPT], SAMPLING)
    second = trained.sync("b", 1)
    moved = trained.engine.score(trained.probe)
    third = trained.sync("a", 2)
    assert (first.tensors, first.readback_tensors) == (len(trained.source("a").tensors),) * 2
    assert second.readback_tensors < first.tensors
    assert first.buckets > 2
    assert max(report.probe_max_nats for report in (first, second, third)) < 1e-5
    assert max(abs(a - b) for x, y in zip(scores, moved, strict=True) for a, b in zip(x, y, strict=True)) > 0.5
    assert trained.engine.score(trained.probe) == scores == trained.fresh
    again = trained.engine.generate([PROMPT], SAMPLING)
    assert [(c.token_ids, c.logprobs) for c in again] == [(c.token_ids, c.logprobs) for c in samples]
    assert ({c.version for c in samples}, {c.version for c in again}) == ({0}, {2})


def test_the_same_weights_three_times(moe):
    outcomes = []
    for version in range(3):
        moe.sync("a", version)
        outcomes.append(moe.engine.score(moe.probe))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize(
    ("which", "kind", "name"),
    [
        ("moe", "zero", EXPERT),
        ("moe", "zero", "model.layers.0.mlp.gate.weight"),
        ("moe", "nudge", "model.layers.0.mlp.experts.0.up_proj.weight"),
        ("moe", "nudge", "model.layers.1.self_attn.k_proj.weight"),
        ("moe", "nudge", "model.layers.0.self_attn.q_norm.weight"),
        ("moe", "nudge", "lm_head.weight"),
        ("dense", "nudge", "model.layers.1.mlp.down_proj.weight"),
        ("dense", "nudge", "model.embed_tokens.weight"),
        ("dense", "transpose", "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_damaged_tensor_is_named(which, kind, name, request):
    """One bit is enough: the read-back is of the numbers the kernels use."""
    trained = request.getfixturevalue(which)
    trained.sync("a", 0)
    trained.damage(kind, name)
    trained.session.request_full_readback()
    with pytest.raises(WeightMismatch, match=rf"1 of \d+ tensors read back differ from the trainer's: {name}"):
        trained.sync("b", 1)
    assert refuses(trained)
    trained.heal()
    assert trained.sync("b", 1).readback_tensors == len(trained.source("b").tensors)
    assert trained.engine.version == 1


@pytest.mark.parametrize("name", [EXPERT, "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"])
def test_a_tensor_the_loader_skips_is_named(moe, name):
    """In a sync that would not have read it back."""
    moe.sync("a", 0)
    moe.damage("drop", name)
    with pytest.raises(WeightMismatch, match=r"loader took \d+ of \d+ numbers") as caught:
        moe.sync("b", 1)
    module = name.removesuffix(".weight").replace("v_proj", "qkv_proj").split(".experts.")[0]
    assert module in str(caught.value)
    assert refuses(moe)
    moe.heal()
    moe.sync("b", 1)


def test_a_sync_that_loads_nothing_is_caught(moe):
    moe.sync("a", 0)
    moe.damage("drop", "*")
    with pytest.raises(WeightMismatch, match="loader took 0 of"):
        moe.sync("b", 1)
    assert refuses(moe)


def test_zeroed_between_read_backs_the_probe_sees_it(moe):
    """A tensor outside the rotating sample, zeroed by the loader."""
    moe.sync("a", 0)
    hidden = "model.layers.1.self_attn.o_proj.weight"
    assert hidden not in readback_names(moe.source("b").metadata(), 1, 10)
    moe.damage("zero", hidden)
    with pytest.raises(WeightMismatch, match="probe log-probs differ by up to"):
        moe.sync("b", 1)
    assert refuses(moe)


def test_without_the_prepack_reset_stale_experts_are_named(moe):
    """Why vllm_cpu_patches.reset_moe_prepack exists."""
    moe.sync("a", 0)
    moe.damage("without", "reset_moe_prepack")
    moe.session.request_full_readback()
    with pytest.raises(WeightMismatch, match=r"48 of 69 tensors read back .*mlp\.experts\."):
        moe.sync("b", 1)
    moe.heal()
    moe.sync("b", 1)


def test_without_the_tied_head_refresh_the_embedding_is_named(dense):
    """Why vllm_cpu_patches.refresh_tied_heads exists: the packed head keeps the old embedding."""
    dense.sync("a", 0)
    dense.damage("without", "refresh_tied_heads")
    dense.session.request_full_readback()
    with pytest.raises(WeightMismatch, match=r"differ from the trainer's: model\.embed_tokens\.weight"):
        dense.sync("b", 1)
    dense.heal()
    dense.sync("b", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rename", "the engine has no such weight: model.norm.wait"),
        ("leave_out", "the trainer does not offer it: model.norm.weight"),
        ("reshape", r"tensor model.norm.weight is \[1, 64\] in the trainer and \[64\] in the engine"),
    ],
)
def test_another_tensor_list_is_refused_before_anything_is_sent(moe, change, message):
    source = moe.source("a")
    tensor = source.tensors.pop("model.norm.weight")
    if change == "rename":
        source.tensors["model.norm.wait"] = tensor
    elif change == "reshape":
        source.tensors["model.norm.weight"] = tensor[None]
    with pytest.raises(WeightMismatch, match=message):
        moe.session.sync(source, lambda: moe.trainer_logprobs("a"))
    assert refuses(moe)


def send(trained, tensors, *, tamper=None, leave_out=()):
    """The endpoint without the session: one bucket per call, `tamper` changes the manifest."""
    source = trained.source("a")
    plan = plan_buckets(source.metadata(), 10**9)
    segment = Segment.create(slot_bytes(plan))
    trained.engine.attach(str(segment.path), segment.slot_bytes)
    segment.unlink()
    rows = []
    for slot in plan[0].slots:
        value = tensors[slot.meta.name]
        segment.view(0, slot.offset, slot.meta.dtype, slot.meta.shape).copy_(value)
        if slot.meta.name not in leave_out:
            rows.append([slot.meta.name, "float32", list(slot.meta.shape), slot.offset, wire_digest(value)])
    trained.engine.begin()
    trained.engine.load(0, tamper(rows) if tamper else rows)
    return trained.engine.finish()


def renamed(rows):
    return [["model.norm.wait", *row[1:]] if row[0] == "model.norm.weight" else row for row in rows]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (renamed, "unknown tensor 'model.norm.wait'"),
        (lambda rows: [*rows, rows[3]], "arrived twice in one update"),
        (lambda rows: [[*rows[0][:4], "0" * 16], *rows[1:]], "damaged on the way"),
        (lambda rows: [[*rows[0][:2], [7, 7], *rows[0][3:]], *rows[1:]], r"arrived as \[7, 7\], the engine's model needs"),
        (lambda rows: rows[:-1], "1 of 69 tensors never arrived"),
    ],
)
def test_the_engine_checks_what_it_is_sent(moe, tamper, message):
    """Whatever the sender believes."""
    with pytest.raises(WeightMismatch, match=message):
        send(moe, moe.source("a").tensors, tamper=tamper)
    moe.engine.abort()
    assert sorted(send(moe, moe.source("a").tensors)) == sorted(moe.source("a").tensors)
    assert refuses(moe)


@pytest.mark.parametrize("which", ["moe", "dense"])
def test_no_nan_survives_one_sync(which, request):
    """All weights NaN through the same lifecycle; the session would refuse them, and abandons the engine as it would."""
    trained = request.getfixturevalue(which)
    everything = {name: torch.full_like(tensor, torch.nan) for name, tensor in trained.source("a").tensors.items()}
    send(trained, everything)
    assert all(math.isnan(value) for row in trained.engine.score(trained.probe) for value in row)
    trained.engine.abort()
    trained.renew()
    report = trained.sync("a", 1)
    assert report.readback_tensors == report.tensors
    assert trained.engine.score(trained.probe) == trained.fresh


def test_an_abandoned_update_leaves_no_trace(moe):
    """Half of b is loaded and abandoned; then a, complete, is exactly a."""
    moe.sync("a", 0)
    scores = moe.engine.score(moe.probe)
    source = moe.source("b")
    plan = plan_buckets(source.metadata(), 10**9)
    segment = Segment.create(slot_bytes(plan))
    moe.engine.attach(str(segment.path), segment.slot_bytes)
    segment.unlink()
    rows = []
    for slot in plan[0].slots[:30]:
        segment.view(0, slot.offset, slot.meta.dtype, slot.meta.shape).copy_(source.tensors[slot.meta.name])
        rows.append([slot.meta.name, "float32", list(slot.meta.shape), slot.offset, wire_digest(source.tensors[slot.meta.name])])
    moe.engine.begin()
    moe.engine.load(0, rows)
    moe.renew()
    moe.engine.abort()
    moe.sync("a", 1)
    assert moe.engine.score(moe.probe) == scores


def test_the_sender_may_overwrite_a_slot_as_soon_as_it_was_acknowledged(moe):
    """Tensors of one layer arrive in different buckets, through the same two slots."""
    moe.sync("a", 0)
    scores = moe.engine.score(moe.probe)
    moe.renew(bucket_bytes=5_000)
    report = moe.sync("a", 1)
    assert report.buckets > 60
    assert moe.engine.score(moe.probe) == scores


def test_a_skipped_sync_is_caught_before_its_rollout_is_used(moe):
    """The trainer steps to version 1 and nobody syncs."""
    moe.sync("a", 0)
    completions = moe.engine.generate([PROMPT], SAMPLING)
    with pytest.raises(StaleRollout, match="version 0; the trainer holds 1"):
        check_completions([PROMPT], completions, version=1, samples_per_prompt=2)


def test_no_key_or_value_of_old_weights_survives(dense):
    """Prefix caching is on; the prompt fills several blocks; after the sync its values are the new model's."""
    long = Prompt("long", tuple((i * 7) % 320 + 3 for i in range(150)), "", "")
    dense.sync("a", 0)
    dense.engine.generate([long], SAMPLING)
    dense.sync("b", 1)
    [first, _] = dense.engine.generate([long], SAMPLING)
    dense.probe, probe = [list(long.token_ids + first.token_ids)], dense.probe
    reference = dense.trainer_logprobs("b")[0]
    dense.probe = probe
    assert first.logprobs == pytest.approx(reference[-len(first.token_ids) :], abs=1e-5)


def test_weights_in_another_dtype_are_compared_as_the_engine_keeps_them(dense):
    """A trainer in float64: the engine keeps float32, and the read-back compares float32."""
    source = dense.source("a", 5)
    source.tensors = {name: tensor.double() for name, tensor in source.tensors.items()}
    report = dense.session.sync(source, lambda: dense.trainer_logprobs("a"))
    assert report.readback_tensors == len(source.tensors)
    assert report.bytes == 2 * sum(tensor.numel() * 4 for tensor in dense.source("a").tensors.values())
    assert torch.get_default_dtype() == torch.float32
