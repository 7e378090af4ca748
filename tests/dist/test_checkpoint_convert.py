"""A converted checkpoint is what Megatron's own loader loads, at any layout, and what Megatron saves converts back."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_children import may_start_processes
from tiny_models import stored_tensors, write_tiny

from models.build import BuildOptions, build_model
from models.checkpoint_layout import extra_state_keys, layers_alike, sections_of
from models.checkpoint_load import load_megatron_checkpoint, save_megatron_checkpoint, sharded_state
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import ImportOptions
from models.convert_verify import compare_tensors
from models.parameters import canonical_parameters
from models.registry import read_spec, weight_map
from models.weights import load_hf_weights
from parallel.layout import ParallelLayout

QUICK = ImportOptions(fsync=False)
LAYOUTS = [
    ("qwen3_moe", ParallelLayout(world=4, tp=2, ep=2, sp=True)),
    ("qwen3_moe", ParallelLayout(world=4, pp=2, ep=2)),
    ("qwen3_moe", ParallelLayout(world=4, ep=2, etp=2)),
    ("qwen3_moe_mixed", ParallelLayout(world=4, tp=2, pp=2, sp=True)),
    ("llama_tied", ParallelLayout(world=4, tp=2, pp=2)),
    ("qwen3_next", ParallelLayout(world=4, tp=2, ep=2, sp=True)),
    ("qwen3_5", ParallelLayout(world=2, pp=2, vpp=2)),
]


def built(groups, folder, dtype):
    spec = read_spec(Path(folder))
    chunks = build_model(spec, groups, BuildOptions(dtype=dtype))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(math.nan)
    return spec, chunks


def differences_on_rank(groups, device, hf, megatron, dtype):
    """Names of parameters that Megatron's loader and the direct import fill with other bits; vocabulary padding left out."""
    spec, chunks = built(groups, hf, dtype)
    load_megatron_checkpoint(chunks, Path(megatron))
    found = {name: p.detach().clone() for name, p in canonical(groups, spec, chunks).items()}
    load_hf_weights(chunks, spec, groups, Path(hf))
    different = [n for n, p in canonical(groups, spec, chunks).items() if not torch.equal(found[n].nan_to_num(), p)]
    return different + [name for name, tensor in found.items() if not bool(torch.isfinite(tensor).all())]


def canonical(groups, spec, chunks):
    return canonical_parameters(chunks, spec, groups.layout, dist.get_rank())


def save_on_rank(groups, device, hf, megatron, dtype):
    spec, chunks = built(groups, hf, dtype)
    load_hf_weights(chunks, spec, groups, Path(hf))
    with may_start_processes():
        save_megatron_checkpoint(chunks, Path(megatron))


def described_on_rank(groups, device, hf):
    """Key, global shape and unique objects of everything Megatron's modules want, on one rank."""
    _, chunks = built(groups, hf, torch.float32)
    tensors, objects = set(), set()
    stack = [sharded_state(chunks)]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif hasattr(value, "build"):
            stack.append(value.build())
        elif hasattr(value, "axis_fragmentations"):
            tensors.add((value.key, tuple(value.global_shape)))
        else:
            objects.add(value.unique_key)
    return sorted(tensors), sorted(objects)


def make(tmp_path, family, dtype):
    hf = tmp_path / "hf"
    hf.mkdir()
    write_tiny(hf, family, dtype=dtype)
    return hf


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_megatrons_loader_fills_what_the_direct_import_fills(ranks, tmp_path, family, layout):
    dtype = torch.float32 if family.startswith("qwen3_5") else torch.bfloat16
    hf = make(tmp_path, family, dtype)
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    results = ranks.run(differences_on_rank, layout, str(hf), str(tmp_path / "megatron"), dtype)
    assert results == [[]] * layout.world


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3_moe", "qwen3_moe_mixed", "qwen3_next", "qwen3_5"])
def test_keys_and_shapes_are_those_of_megatrons_modules(ranks, tmp_path, family):
    hf = make(tmp_path, family, torch.float32)
    spec = read_spec(hf)
    ((tensors, objects),) = ranks.run(described_on_rank, ParallelLayout(), str(hf))
    rules = [rule for rule in weight_map(spec) if rule.exported]
    ours = {(s.key, s.global_shape) for rule in rules for s in sections_of(rule, spec, stacked=layers_alike(spec))}
    assert ours == {(key, tuple(shape)) for key, shape in tensors}
    assert set(objects) <= set(extra_state_keys(rules, spec))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_next", ParallelLayout(world=4, tp=2, ep=2, sp=True)),
        ("llama_tied", ParallelLayout(world=4, tp=2, pp=2)),
    ],
    ids=str,
)
def test_what_megatron_saves_converts_to_the_original_bits(ranks, tmp_path, family, layout):
    hf = make(tmp_path, family, torch.float32)
    ranks.run(save_on_rank, layout, str(hf), str(tmp_path / "megatron"), torch.float32)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ExportOptions(reference=hf, fsync=False))
    assert compare_tensors(tmp_path / "megatron", hf).different == ()
    back, want = stored_tensors(tmp_path / "back"), stored_tensors(hf)
    assert back.keys() == want.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype is tensor.dtype for name, tensor in want.items())
