"""Cells of the parity table that no other test runs, and layouts that the table does not have; `make parity` runs all of it."""

import parity_cells
import pytest
from parity_cells import KINDS, LAYOUTS

from parallel.layout import ParallelLayout

PP3_UNEVEN = ParallelLayout(world=3, pp=3, first_stage_layers=1, last_stage_layers=1)
VPP2_UNEVEN = ParallelLayout(world=2, pp=2, vpp=2, first_stage_layers=2)
VPP2_BOTH_GIVEN = ParallelLayout(world=2, pp=2, vpp=2, first_stage_layers=4, last_stage_layers=2)
EP2_ETP2 = ParallelLayout(world=4, ep=2, etp=2)
CP2_TP2 = ParallelLayout(world=4, cp=2, tp=2, sp=True)
CELLS = [
    ("qwen3", LAYOUTS["CP2"]),
    ("qwen2", LAYOUTS["TP2xPP2"]),
    ("llama_tied", PP3_UNEVEN),
    ("llama_tied_6", VPP2_UNEVEN),
    ("llama_tied_6", VPP2_BOTH_GIVEN),
    ("qwen3_moe", EP2_ETP2),
    ("qwen3_moe", CP2_TP2),
    ("qwen3_moe", LAYOUTS["TP2xEP2xETP2"]),
    ("qwen3_next", LAYOUTS["CP2xEP2"]),
]


@pytest.fixture(scope="module")
def cases(ranks, tmp_path_factory):
    """Family (with another number of layers) -> its case and the one rank's gradients, made when first asked for."""
    made = {}

    def case_of(name):
        if name not in made:
            family, _, layers = name.partition("_tied_")
            changes = {"num_hidden_layers": int(layers)} if layers else {}
            case = parity_cells.make_case(tmp_path_factory.mktemp(name), family + "_tied" if layers else name, **changes)
            (one,) = ranks.run(parity_cells.cell, LAYOUTS["1"], case.folder, case.batch)
            made[name] = case, one
        return made[name]

    return case_of


@pytest.mark.parametrize(("family", "layout"), CELLS, ids=str)
def test_cell(ranks, cases, family, layout):
    case, one = cases(family)
    assert parity_cells.refusal(case, layout) is None
    results = ranks.run(parity_cells.cell, layout, case.folder, case.batch)
    for kind, far in parity_cells.distances(case, results, {kind: one[kind][2] for kind in KINDS}).items():
        assert far.ok, f"{kind}: {far}"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_one_rank_is_transformers(cases, family):
    case, one = cases(family)
    for kind, far in parity_cells.distances(case, [one], dict.fromkeys(KINDS, case.gradients)).items():
        assert far.ok, f"{kind}: {far}"


def test_a_wrong_gradient_or_a_nan_is_a_failed_cell(cases):
    case, one = cases("qwen3")
    logits, logprobs, gradients = one["packed"]
    for name, change in (("model.norm.weight", 1.0001), ("model.layers.0.self_attn.q_proj.weight", float("nan"))):
        wrong = (logits, logprobs, gradients | {name: gradients[name] * change})
        assert not parity_cells.distances(case, [{"packed": wrong, "padded": one["padded"]}], dict.fromkeys(KINDS, gradients))[
            "packed"
        ].ok
    nan = ({0: logits[0] * float("nan"), **{i: part for i, part in logits.items() if i}}, logprobs, gradients)
    found = parity_cells.distances(case, [dict.fromkeys(KINDS, nan)], dict.fromkeys(KINDS, gradients))
    assert not found["packed"].ok


def test_only_expert_layouts_of_dense_families_are_refused(cases):
    for family in ("qwen3", "qwen3_moe"):
        case, _ = cases(family)
        refused = {name for name, layout in LAYOUTS.items() if parity_cells.refusal(case, layout) is not None}
        assert refused == {name for name, layout in LAYOUTS.items() if parity_cells.must_be_refused(case, layout)}
        assert refused == (set() if family == "qwen3_moe" else {n for n in LAYOUTS if "EP" in n or "ETP" in n})
