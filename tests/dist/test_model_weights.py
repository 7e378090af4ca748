"""Hugging Face -> Megatron -> Hugging Face is bit-equal on every layout, and each rank holds what it should."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from model_ranks import loaded
from safetensors.torch import load_file, save_file
from tiny_models import stored_tensors, write_tiny

from models.weights import ModelWeights, export_checkpoint
from parallel.layout import ParallelLayout

LAYOUTS = [
    ("qwen3_moe", ParallelLayout()),
    ("qwen3_moe", ParallelLayout(world=2, tp=2, sp=True)),
    ("qwen3_moe", ParallelLayout(world=2, ep=2)),
    ("qwen3_moe", ParallelLayout(world=2)),
    ("qwen3_moe", ParallelLayout(world=2, pp=2, vpp=2)),
    ("qwen3_moe", ParallelLayout(world=4, tp=2, ep=2, sp=True)),
    ("qwen3_moe", ParallelLayout(world=4, ep=2, etp=2)),
    ("qwen3_moe", ParallelLayout(world=4, pp=2, ep=2)),
    ("llama_tied", ParallelLayout(world=2, tp=2)),
    ("llama_tied", ParallelLayout(world=2, pp=2)),
    ("qwen2", ParallelLayout(world=4, tp=2, pp=2)),
    ("qwen3", ParallelLayout(world=2, tp=2)),
]


def export_on_rank(groups, device, source, target, **options):
    spec, chunks = loaded(groups, source, **options)
    export_checkpoint(ModelWeights(chunks, spec, groups), spec, source=Path(source), target=Path(target))


def describe_on_rank(groups, device, folder, bucket_size):
    """Metadata, held names, the tensors of all buckets, and those of plain iteration."""
    spec, chunks = loaded(groups, folder)
    weights = ModelWeights(chunks, spec, groups)
    names = [meta.name for meta in weights.metadata()]
    held = [
        (name, tensor.clone())
        for start in range(0, len(names), bucket_size)
        for name, tensor in weights.bucket(names[start : start + bucket_size])
    ]
    metadata = [(meta.name, str(meta.dtype), meta.shape) for meta in weights.metadata()]
    return metadata, sorted(weights.held_names()), held, [(name, tensor.clone()) for name, tensor in weights]


def refusal_on_rank(groups, device, folder):
    """What loading says; None when it has nothing to say."""
    try:
        loaded(groups, folder)
    except ValueError as error:
        return str(error)
    return None


def assert_bit_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_every_rank_sees_the_whole_model_and_holds_its_part(ranks, tmp_path, family, layout):
    write_tiny(tmp_path, family)
    want = stored_tensors(tmp_path)
    results = ranks.run(describe_on_rank, layout, str(tmp_path), 5)
    holders = Counter(name for _, held, _, _ in results for name in held)
    assert holders == Counter(dict.fromkeys(want, 1))
    for metadata, held, buckets, everything in results:
        assert metadata == results[0][0]
        assert [name for name, _, _ in metadata] == [name for name, _ in everything]
        assert all(shape == tuple(want[name].shape) for name, _, shape in metadata)
        assert sorted(name for name, _ in buckets) == held
        assert_bit_equal(dict(everything), want)
        assert_bit_equal(dict(buckets), {name: want[name] for name in held})
        assert all(tensor.is_contiguous() for _, tensor in buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_import_on_one_layout_export_on_another(ranks, tmp_path, dtype):
    source, first, second = tmp_path / "source", tmp_path / "first", tmp_path / "second"
    source.mkdir()
    write_tiny(source, "qwen3_moe", dtype=dtype)
    ranks.run(export_on_rank, ParallelLayout(world=4, tp=2, ep=2, sp=True), str(source), str(first), dtype=dtype)
    ranks.run(export_on_rank, ParallelLayout(world=2, pp=2, vpp=2), str(first), str(second), dtype=dtype)
    for folder in (first, second):
        assert_bit_equal(stored_tensors(folder), stored_tensors(source))
        for name in ("config.json", "tokenizer.json", "generation_config.json"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_router_stored_in_float32_beside_bfloat16_stays_exact(ranks, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_tiny(source, "qwen3_moe", dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    ranks.run(export_on_rank, ParallelLayout(world=2, ep=2), str(source), str(target), dtype=torch.bfloat16)
    assert_bit_equal(stored_tensors(target), tensors)


def fuse(folder):
    """Rewrite the checkpoint with transformers 5's fused experts."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {p: [tensors.pop(f"{prefix}.{e}.{p}.weight") for e in range(6)] for p in ("gate_proj", "up_proj", "down_proj")}
        gate_up = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.stack(gate_up), torch.stack(parts["down_proj"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_fused_experts_come_back_fused(ranks, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_tiny(source, "qwen3_moe")
    fuse(source)
    assert any(name.endswith("gate_up_proj") for name in stored_tensors(source))
    ranks.run(export_on_rank, ParallelLayout(world=2, ep=2), str(source), str(target))
    assert_bit_equal(stored_tensors(target), stored_tensors(source))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"), "lacks 1 tensors.*layers.2.mlp.experts.5.up_proj"),
        (lambda t: t.update({"model.layers.9.surprise": torch.zeros(2)}), "does not have: model.layers.9.surprise"),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), "model.norm.weight holds NaN"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(47)}), "model.norm.weight -> decoder.final_layernorm.weight.*47"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_by_name(ranks, tmp_path, change, message):
    write_tiny(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (refusal,) = ranks.run(refusal_on_rank, ParallelLayout(), str(tmp_path))
    assert re.search(message, refusal), refusal


def test_tied_head_that_differs_is_refused(ranks, tmp_path):
    write_tiny(tmp_path, "llama_tied")
    equal = tmp_path / "equal"
    shutil.copytree(tmp_path, equal, ignore=shutil.ignore_patterns("equal"))
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, equal / "model.safetensors", metadata={"format": "pt"})
    assert ranks.run(refusal_on_rank, ParallelLayout(), str(equal)) == [None]
    head[0, 0] += 1.0
    save_file(tensors | {"lm_head.weight": head}, equal / "model.safetensors", metadata={"format": "pt"})
    (refusal,) = ranks.run(refusal_on_rank, ParallelLayout(), str(equal))
    assert "tie_word_embeddings is true, but lm_head.weight is not" in refusal
