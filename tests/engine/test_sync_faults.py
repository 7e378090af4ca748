"""Faults of a weight sync, one after the other, into real engines: each is caught and named, nothing can be sampled after
it, and the next sync is exact. `make chaos` prints the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fault_table import record
from sync_breakage import (
    EXPERT,
    LAYER,
    NORM,
    SQUARE,
    Faulty,
    answer,
    changing,
    engine,
    fails,
    flip,
    half_old,
    less,
    listed,
    nothing,
    only,
    other_slot,
    renamed,
    rpc,
    shifted,
    stepping,
    swapped,
    twice,
    valued,
    wire,
)

from mcore_rl.types import EngineDied, Prompt, SamplingParams, StaleRollout, WeightMismatch

SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), samples_per_prompt=2, seed=1)
PROMPT = Prompt("p", tuple(range(3, 25)), "", "")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. `inject(trained, patch)` returns the source to sync, or None for the right one."""

    name: str
    caught: str
    match: str
    inject: Callable[[Any, pytest.MonkeyPatch], Any]
    family: str = "moe"
    error: type[Exception] = WeightMismatch
    full_readback: bool = True


READ_BACK = r"1 of \d+ tensors read back differ from the trainer's: "
PROBE = "probe log-probs differ by up to"
FAULTS = [
    Fault("source skips a tensor", "source", f"holds {NORM} but did not hand it out", only(NORM, lambda t: [])),
    Fault("source hands a tensor out twice", "source", f"handed out {NORM} twice", only(NORM, lambda t: [(NORM, t)] * 2)),
    Fault(
        "source renames a tensor",
        "source",
        "handed out model.norm.wait unasked",
        only(NORM, lambda t: [("model.norm.wait", t)]),
    ),
    Fault("source transposes a tensor", "source", r"came as \[64, 320\]", only("lm_head.weight", lambda t: t.t())),
    Fault("source rounds a tensor to bf16", "source", "came as .*bfloat16", only(SQUARE, lambda t: t.bfloat16())),
    Fault("source fails in the middle", "source", "lost", only(EXPERT % 5, lambda t: fails(OSError(5, "lost"))()), error=OSError),
    Fault("policy steps in mid-sync", "version", "went from version 1 to 2 during the sync", stepping),
    Fault("source changes a tensor after handing it out", "probe", PROBE, changing),
    Fault("tensor zeroed", "probe", PROBE, valued(lambda right, before: {SQUARE: torch.zeros_like(right[SQUARE])})),
    Fault(
        "square tensor transposed",
        "probe",
        PROBE,
        valued(lambda right, before: {SQUARE: right[SQUARE].t().contiguous()}),
        "dense",
    ),
    Fault(
        "values rounded to bf16",
        "probe",
        PROBE,
        valued(lambda right, before: {n: t.bfloat16().float() for n, t in right.items()}),
    ),
    Fault("expert-parallel ranks swapped", "probe", PROBE, valued(swapped)),
    Fault("stale data-parallel shards after the step", "probe", PROBE, valued(half_old)),
    Fault("weights before the step", "probe", PROBE, valued(lambda right, before: before)),
    Fault("NaN in one tensor", "probe", "nan", valued(lambda right, before: {NORM: torch.full_like(right[NORM], torch.nan)})),
    Fault("tensor renamed in the list", "layout", "the engine has no such weight: model.norm.wait", listed(renamed)),
    Fault(
        "tensor missing in the list", "layout", "the trainer does not offer it: model.norm.weight", listed(lambda t: t.pop(NORM))
    ),
    Fault(
        "tied head sent as a tensor of its own",
        "layout",
        "the engine has no such weight: lm_head.weight",
        listed(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})),
        "dense",
    ),
    Fault(
        "router bias missing",
        "layout",
        "the trainer does not offer it: .*e_score_correction_bias",
        lambda trained, patch: (
            trained.renew(),
            rpc(
                "mcore_layout",
                lambda found: (
                    found | {f"{LAYER}.mlp.gate.e_score_correction_bias": {"shape": [8], "regions": [["float32", None, 0, 0]]}}
                ),
            )(trained, patch),
        )[1],
    ),
    Fault("bit flipped in shared memory", "wire digest", "damaged on the way", flip),
    Fault("200 OK and nothing copied", "coverage", "69 of 69 tensors never arrived", wire("update", nothing)),
    Fault("first bucket dropped", "coverage", "tensors never arrived", wire("update", nothing, at=0)),
    Fault("third bucket dropped", "coverage", "tensors never arrived", wire("update", nothing, at=2)),
    Fault("last tensor of each bucket dropped", "coverage", "tensors never arrived", wire("update", less)),
    Fault("bucket delivered twice", "engine", "arrived twice in one update", wire("update", twice)),
    Fault("bucket loaded from the other slot", "wire digest", "damaged on the way", wire("update", other_slot)),
    Fault("wrong offset in a bucket", "wire digest", "damaged on the way", wire("update", shifted)),
    Fault("update never opened", "engine", "start_weight_update must be called before update_weights", wire("start", nothing)),
    Fault("update never closed", "read-back", "never closed", wire("finish", nothing)),
    Fault("no answer to a bucket", "link", "no answer", wire("update", fails(EngineDied("no answer")), at=1), error=EngineDied),
    Fault("engine out of memory at the first tensor", "engine", "not enough memory", engine("oom", "model.embed_tokens.weight")),
    Fault("engine out of memory in a layer", "engine", "not enough memory", engine("oom", EXPERT % 5)),
    Fault("engine out of memory at the last tensor", "engine", "not enough memory", engine("oom", "lm_head.weight")),
    Fault("loader zeroes an expert", "read-back", READ_BACK + EXPERT % 5, engine("zero", EXPERT % 5)),
    Fault("loader zeroes the router", "read-back", READ_BACK, engine("zero", f"{LAYER}.mlp.gate.weight")),
    Fault("loader flips a bit of an expert", "read-back", READ_BACK + EXPERT % 2, engine("nudge", EXPERT % 2)),
    Fault("loader flips a bit of a norm", "read-back", READ_BACK + NORM, engine("nudge", NORM)),
    Fault("loader rounds a tensor to bf16", "read-back", READ_BACK + SQUARE, engine("bf16", SQUARE)),
    Fault("loader transposes a tensor", "read-back", READ_BACK + SQUARE, engine("transpose", SQUARE), "dense"),
    Fault(
        "loader skips an expert", "coverage", r"loader took \d+ of \d+ numbers", engine("drop", EXPERT % 5), full_readback=False
    ),
    Fault("loader skips everything", "coverage", "loader took 0 of", engine("drop", "*"), full_readback=False),
    Fault(
        "loader zeroes a tensor outside the sample",
        "probe",
        PROBE,
        engine("zero", f"{LAYER}.self_attn.o_proj.weight"),
        full_readback=False,
    ),
    Fault("expert prepack skipped on reload", "read-back", "48 of 69 tensors read back", engine("without", "reset_moe_prepack")),
    Fault(
        "tied head stale",
        "read-back",
        READ_BACK + r"model\.embed_tokens",
        engine("without", "refresh_tied_heads"),
        "dense",
    ),
    Fault(
        "read-back of nothing",
        "read-back",
        "69 of 69 tensors read back differ",
        rpc("mcore_readback", lambda found: {name: [] for name in found}),
    ),
    Fault(
        "read-back hashes an empty string",
        "read-back",
        "69 of 69 tensors read back differ",
        rpc("mcore_readback", lambda found: {name: ["2d06800538d394c2"] for name in found}),
    ),
    Fault(
        "prefix cache not reset",
        "engine",
        "the prefix cache was not emptied",
        answer("reset_prefix_cache", lambda call, args: False),
    ),
    Fault("engine answers another version", "version", "the engine says '7'", answer("get_version", lambda call, args: "7")),
]


def test_at_least_thirty_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.replace(" ", "_") for fault in FAULTS])
def test_a_fault_is_caught_and_named(fault, request, monkeypatch):
    trained = request.getfixturevalue(fault.family)
    trained.sync("a", 0)
    if fault.full_readback:
        trained.session.request_full_readback()
    source = fault.inject(trained, monkeypatch) or trained.source("b", 1)
    started = time.perf_counter()
    with pytest.raises(fault.error, match=fault.match):
        trained.session.sync(source, lambda: trained.trainer_logprobs("b"))
    seconds = time.perf_counter() - started
    assert trained.engine.version is None
    with pytest.raises(StaleRollout):
        trained.engine.generate([PROMPT], SAMPLING)
    monkeypatch.undo()
    trained.heal()
    trained.renew()
    report = trained.sync("b", 1)
    assert (report.version, trained.engine.version) == (1, 1)
    assert report.readback_tensors == report.tensors
    record(fault.name, fault.caught, seconds)


def test_a_completion_of_another_version_is_refused(moe, monkeypatch):
    """The engine changed its weights behind the trainer's back."""
    moe.sync("a", 0)
    generate = moe.link.generate
    monkeypatch.setattr(moe.link, "generate", lambda requests: [row | {"versions": ["7"]} for row in generate(requests)])
    started = time.perf_counter()
    with pytest.raises(StaleRollout, match=r"was sampled with weights \['7'\], version 0 was proved"):
        moe.engine.generate([PROMPT], SAMPLING)
    record("wrong version echoed by a completion", "completion", time.perf_counter() - started)


def test_a_source_that_reuses_its_buffer_is_read_in_time(moe):
    """Every tensor is handed out in the same memory, overwritten for the next one: each is copied before that."""
    moe.sync("a", 0)
    memory = torch.empty(10**6)

    def alter(name, tensor):
        memory.fill_(torch.nan)
        shared = memory[: tensor.numel()].view(tensor.shape)
        yield name, shared.copy_(tensor)
        memory.fill_(torch.nan)

    moe.session.request_full_readback()
    report = moe.session.sync(Faulty(moe.source("b", 1), alter), lambda: moe.trainer_logprobs("b"))
    assert report.readback_tensors == report.tensors
    assert report.probe_max_nats < 1e-5
