"""Faults that other converters had, each with the right numbers: padding rows, interleaved qkv, gate and up, lost tensors."""

import json
import math

import pytest
import torch
from made_checkpoints import CONFIGS, fuse, tensors_of, write
from safetensors.torch import load_file

from mcore_rl.cli import main
from models.checkpoint_reader import MegatronReader
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import ImportOptions

BACK = ExportOptions(fsync=False)


def whole(reader, key):
    """The stored tensor put together from its chunks; every element must come from exactly one."""
    stored = reader.stored(key)
    tensor, times = torch.full(stored.shape, math.nan), torch.zeros(stored.shape)
    for chunk in stored.chunks:
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))
        tensor[place] = reader.chunk(stored, chunk)
        times[place] += 1
    assert bool((times == 1).all())
    return tensor


@pytest.mark.parametrize(("tp", "padded"), [(1, 1024), (2, 1024), (4, 1024), (3, 1152)])
def test_padding_rows_of_the_vocabulary_never_come_back(tmp_path, tp, padded):
    """Vocabulary 1003 in steps of 128 x tp: 1003 rows come back, and config.json says 1003."""
    config = CONFIGS["qwen3"] | {
        "vocab_size": 1003,
        "hidden_size": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 24,
    }
    tensors = tensors_of(config)
    hf = write(tmp_path / "hf", config, tensors)
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(tp=tp, fsync=False))
    reader = MegatronReader(tmp_path / "megatron")
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        stored = reader.stored(key)
        assert stored.shape == (padded, 12)
        assert {chunk.shape for chunk in stored.chunks} == {(padded // tp, 12)}
        assert torch.equal(whole(reader, key)[:1003], tensors[name])
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", BACK)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back["model.embed_tokens.weight"].shape == back["lm_head.weight"].shape == (1003, 12)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 1003


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_queries_keys_and_values_interleave_by_group(tmp_path, tp):
    """8 query, 2 key-value heads: q0 q1 q2 q3 k0 v0 | q4 q5 q6 q7 k1 v1; q_i is 10 + i, k_i is 100 + i, v_i is 200 + i."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 2, "intermediate_size": 8}
    config = CONFIGS["qwen3"] | sizes
    tensors = tensors_of(config)
    for part, base in (("q", 10.0), ("k", 100.0), ("v", 200.0)):
        weight = tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        weight.copy_((base + torch.arange(weight.shape[0]) // 4)[:, None].expand_as(weight))
    hf = write(tmp_path / "hf", config, tensors)
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(tp=tp, fsync=False))
    fused = whole(MegatronReader(tmp_path / "megatron"), "decoder.layers.self_attention.linear_qkv.weight")
    assert fused[1, ::4, 0].tolist() == [10, 11, 12, 13, 100, 200, 14, 15, 16, 17, 101, 201]
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", BACK)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


@pytest.mark.parametrize("is_fused", [False, True])
def test_gate_is_the_first_half_whatever_the_style(tmp_path, is_fused):
    """3 experts, 5 ffn rows, hidden 7: row r of expert e is 1000 e + r, gate above up; nothing is transposed."""
    config = CONFIGS["qwen3_moe"] | {"hidden_size": 7, "moe_intermediate_size": 5, "num_hidden_layers": 1}
    tensors = tensors_of(config)
    for expert in range(3):
        for part, first in (("gate_proj", 0), ("up_proj", 5)):
            weight = tensors[f"model.layers.0.mlp.experts.{expert}.{part}.weight"]
            weight.copy_((1000 * expert + first + torch.arange(5.0))[:, None].expand(5, 7))
    hf = write(tmp_path / "hf", config, fuse(tensors) if is_fused else tensors)
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(fsync=False))
    reader = MegatronReader(tmp_path / "megatron")
    fc1 = whole(reader, "decoder.layers.mlp.experts.experts.linear_fc1.weight")
    assert fc1.shape == (1, 3, 10, 7)
    assert fc1[0, :, :, 6].tolist() == [[1000 * expert + row for row in range(10)] for expert in range(3)]
    assert reader.stored("decoder.layers.mlp.experts.experts.linear_fc2.weight").shape == (1, 3, 7, 5)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", BACK)
    names = load_file(tmp_path / "back" / "model.safetensors").keys()
    assert names == load_file(hf / "model.safetensors").keys()
    assert any(name.endswith("gate_up_proj") for name in names) is is_fused


def test_grouped_projections_of_qwen3_next_part_by_head(tmp_path):
    """2 key heads, 4 value heads, dk 4, dv 6: HF groups [q k v v z z] by key head, Megatron stores whole sections."""
    config = CONFIGS["qwen3_next"]
    tensors = tensors_of(config)
    qkvz = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    rows = [(part, head) for head in range(2) for part, count in (("q", 4), ("k", 4), ("v", 12), ("z", 12)) for _ in range(count)]
    code = {"q": 100.0, "k": 200.0, "v": 300.0, "z": 400.0}
    qkvz.copy_(torch.tensor([code[part] + head for part, head in rows])[:, None].expand_as(qkvz))
    ba = tensors["model.layers.0.linear_attn.in_proj_ba.weight"]
    ba.copy_(torch.tensor([500.0, 500.0, 600.0, 600.0, 501.0, 501.0, 601.0, 601.0])[:, None].expand_as(ba))
    hf = write(tmp_path / "hf", config, tensors)
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(tp=2, fsync=False))
    reader = MegatronReader(tmp_path / "megatron")
    want = {"query": (100, 4), "key": (200, 4), "value": (300, 12), "z": (400, 12), "beta": (500, 2), "alpha": (600, 2)}
    for name, (first, rows_per_head) in want.items():
        stored = reader.stored(f"decoder.layers.0.self_attention.in_proj.weight.{name}")
        assert stored.shape == (2 * rows_per_head, 12)
        for head, chunk in enumerate(sorted(stored.chunks, key=lambda chunk: chunk.offset)):
            assert torch.equal(reader.chunk(stored, chunk), torch.full((rows_per_head, 12), float(first + head)))


def test_a_lost_tensor_ends_the_command_with_its_name(tmp_path, capsys):
    tensors = tensors_of(CONFIGS["qwen3_moe"])
    del tensors["model.layers.2.mlp.experts.1.down_proj.weight"]
    hf = write(tmp_path / "hf", CONFIGS["qwen3_moe"], tensors)
    assert main(["convert", str(hf), str(tmp_path / "megatron")]) != 0
    assert "model.layers.2.mlp.experts.1.down_proj.weight" in capsys.readouterr().err
