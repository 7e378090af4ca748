"""Hugging Face -> Megatron -> Hugging Face is bit-equal on every layout, and each rank holds what it should."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from model_ranks import loaded
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, stored_tensors, write_tiny

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
    ("qwen3_moe_mixed", ParallelLayout(world=4, pp=2, ep=2)),
    ("qwen3_next", ParallelLayout(world=4, tp=2, ep=2, sp=True)),
    ("qwen3_5", ParallelLayout(world=4, tp=2, pp=2)),
    ("qwen3_5_moe", ParallelLayout(world=2, pp=2, vpp=2)),
]
FAMILIES = sorted(CONFIGS)


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


def test_uneven_stages_in_two_chunks_hand_out_every_layer_once(ranks, tmp_path):
    """Six layers, two on the first of two stages: 0 and 3 there, 1, 2, 4 and 5 on the other."""
    write_tiny(tmp_path, "qwen3_moe", num_hidden_layers=6)
    want = stored_tensors(tmp_path)
    results = ranks.run(describe_on_rank, ParallelLayout(world=2, pp=2, vpp=2, first_stage_layers=2), str(tmp_path), 5)
    assert Counter(name for _, held, _, _ in results for name in held) == Counter(dict.fromkeys(want, 1))
    layers = [{int(number) for name in held for number in re.findall(r"layers\.(\d+)", name)} for _, held, _, _ in results]
    assert layers == [{0, 3}, {1, 2, 4, 5}]
    for _, _, buckets, everything in results:
        assert_bit_equal(dict(everything), want)
        assert_bit_equal(dict(buckets), {name: want[name] for name, _ in buckets})


def refill(folder, dtype):
    """The folder's values replaced: in fp32 every element of the model has a number of its own; decay rates stay fp32."""
    tensors, start = load_file(folder / "model.safetensors"), 0
    for name, tensor in tensors.items():
        own = torch.float32 if name.endswith(("A_log", "dt_bias")) else dtype
        counted = torch.arange(start, start + tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        assert start + tensor.numel() < 2**24
        tensors[name] = counted.to(own) if dtype is torch.float32 else torch.randn(tensor.shape).to(own)
        start += tensor.numel()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


SPARSE = [family for family in FAMILIES if "moe" in family or "next" in family]
ROUND_TRIPS = [
    (SPARSE, ParallelLayout(world=4, tp=2, ep=2, sp=True), ParallelLayout(world=2, pp=2, vpp=2)),
    ([f for f in FAMILIES if f not in SPARSE], ParallelLayout(world=4, tp=2, pp=2), ParallelLayout(world=2, tp=2)),
]


def export_all_on_rank(groups, device, folders, **options):
    for source, target in folders:
        export_on_rank(groups, device, source, target, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("families", "before", "after"), ROUND_TRIPS, ids=["sparse", "dense"])
def test_import_on_one_layout_export_on_another(ranks, tmp_path, families, before, after, dtype):
    """Every family; what one layout exported is imported on another and exported again."""
    sources, firsts, seconds = ([str(tmp_path / f"{family}-{stage}") for family in families] for stage in range(3))
    want = {}
    for family, source in zip(families, sources, strict=True):
        Path(source).mkdir()
        write_tiny(Path(source), family, dtype=dtype)
        want[family] = refill(Path(source), dtype)
    ranks.run(export_all_on_rank, before, list(zip(sources, firsts, strict=True)), dtype=dtype)
    ranks.run(export_all_on_rank, after, list(zip(firsts, seconds, strict=True)), dtype=dtype)
    for family, source, *targets in zip(families, sources, firsts, seconds, strict=True):
        for folder in map(Path, targets):
            assert_bit_equal(stored_tensors(folder), want[family])
            for name in ("config.json", "tokenizer.json", "generation_config.json"):
                assert (folder / name).read_bytes() == (Path(source) / name).read_bytes()


def test_decay_rates_stored_in_bfloat16_come_back_as_the_same_values_in_float32(ranks, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_tiny(source, "qwen3_5", dtype=torch.bfloat16)
    want = {
        name: tensor.float() if name.endswith(("A_log", "dt_bias")) else tensor for name, tensor in stored_tensors(source).items()
    }
    assert sum(tensor.dtype is torch.float32 for tensor in want.values()) == 2 * 3
    ranks.run(export_on_rank, ParallelLayout(world=2, tp=2), str(source), str(target), dtype=torch.bfloat16)
    assert_bit_equal(stored_tensors(target), want)


def dtypes_on_rank(groups, device, folder, dtype, exported):
    """Dtypes of the decay rates in the trainer, and of every tensor that is handed out."""
    spec, chunks = loaded(groups, folder, dtype=dtype)
    rates = {p.dtype for c in chunks for name, p in c.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    return rates, {m.name: m.dtype for m in ModelWeights(chunks, spec, groups, dtype=exported).metadata()}


def test_decay_rates_are_float32_in_the_trainer_and_in_every_export(ranks, tmp_path):
    write_tiny(tmp_path, "qwen3_next")
    ((rates, handed_out),) = ranks.run(dtypes_on_rank, ParallelLayout(), str(tmp_path), torch.bfloat16, torch.bfloat16)
    assert rates == {torch.float32}
    wide = {name for name, dtype in handed_out.items() if dtype is not torch.bfloat16}
    assert wide == {f"model.layers.{layer}.linear_attn.{name}" for layer in range(3) for name in ("A_log", "dt_bias")}


def test_multi_token_prediction_travels_untouched_in_its_own_style(ranks, tmp_path):
    """Its experts are fused beside a decoder whose experts are not; its values and dtypes are nobody's business."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_tiny(source, "qwen3_next")
    mtp = {
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(6, 80, 48, dtype=torch.float16),
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(6, 48, 40, dtype=torch.float16),
        "mtp.layers.0.self_attn.q_proj.weight": torch.full((3,), torch.nan),
        "mtp.fc.weight": torch.randn(48, 96).to(torch.bfloat16),
    }
    save_file(stored_tensors(source) | mtp, source / "model.safetensors", metadata={"format": "pt"})
    ranks.run(export_on_rank, ParallelLayout(world=2, ep=2), str(source), str(target))
    got, want = stored_tensors(target), stored_tensors(source)
    nan = "mtp.layers.0.self_attn.q_proj.weight"
    assert got.pop(nan).view(torch.int32).equal(want.pop(nan).view(torch.int32))
    assert_bit_equal(got, want)


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


def fuse(folder, text, layers):
    """Rewrite the checkpoint with transformers 5's fused experts in some layers."""
    tensors = load_file(folder / "model.safetensors")
    for layer in layers:
        prefix = f"{text}layers.{layer}.mlp.experts"
        parts = {p: [tensors.pop(f"{prefix}.{e}.{p}.weight") for e in range(6)] for p in ("gate_proj", "up_proj", "down_proj")}
        gate_up = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.stack(gate_up), torch.stack(parts["down_proj"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "text", "layers"),
    [
        ("qwen3_moe", "model.", range(4)),
        ("qwen3_moe_mixed", "model.", (0, 3)),
        ("qwen3_5_moe_vision", "model.language_model.", range(4)),
    ],
)
def test_fused_experts_come_back_fused(ranks, tmp_path, family, text, layers):
    """Layer by layer as the source has them: all, or some beside others that are not fused."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_tiny(source, family)
    fuse(source, text, layers)
    assert sum(name.endswith("gate_up_proj") for name in stored_tensors(source)) == len(layers)
    ranks.run(export_on_rank, ParallelLayout(world=2, ep=2), str(source), str(target))
    assert_bit_equal(stored_tensors(target), stored_tensors(source))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"), "lacks 1 tensors.*layers.2.mlp.experts.5.up_proj"),
        (lambda t: t.update({"model.layers.9.surprise": torch.zeros(2)}), "does not have: model.layers.9.surprise"),
        (lambda t: t.update({"mtp.fc.weight": torch.zeros(2)}), "does not have: mtp.fc.weight"),
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
