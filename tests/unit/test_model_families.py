"""Hybrid and mixed families: which layer is of which kind, which tensors each has, what is carried along untouched."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import config_of

from models.registry import carried_names, read_spec, spec_from_config, weight_map
from models.spec import DeltaNetSpec, MoeSpec, Rope
from parallel.layout import ParallelLayout

NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 28,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 203,
    "max_position_embeddings": 256,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "rope_theta": 1e7,
}
FLAT = NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"]}
DENSE = NEXT | {"architectures": ["Qwen3_5ForCausalLM"]}
WRAPPED = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {key: value for key, value in NEXT.items() if key != "architectures"},
    "vision_config": {"depth": 2},
    "tie_word_embeddings": False,
}


def saved(family, **changes):
    """What transformers writes for one of the tiny families."""
    config = config_of(family, **changes)
    architecture = {
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5": "Qwen3_5ForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_5_vision": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe_vision": "Qwen3_5MoeForConditionalGeneration",
    }[family]
    return json.loads(config.to_json_string()) | {"architectures": [architecture]}


def names_of(spec):
    return [tensor.name for rule in weight_map(spec) for tensor in rule.tensors]


def elements(spec):
    return sum(torch.Size(tensor.shape).numel() for rule in weight_map(spec) if rule.exported for tensor in rule.tensors)


def test_a_hybrid_config_is_read():
    spec = spec_from_config(NEXT)
    assert spec.linear_layers == (0, 1, 2, 4)
    assert spec.delta_net == DeltaNetSpec(num_k_heads=2, num_v_heads=4, k_head_dim=8, v_head_dim=12, conv_width=4)
    assert spec.moe == MoeSpec(num_experts=6, top_k=2, ffn_size=40, norm_topk_prob=True, shared_ffn_size=28)
    assert spec.rope == Rope(1e7, fraction=0.25)
    assert (spec.attention_gate, spec.zero_centered_norms, spec.qk_norm, spec.dense_layers) == (True, True, True, ())


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"full_attention_interval": 2}, (0, 2, 4)),
        ({"layer_types": ["full_attention", *["linear_attention"] * 4]}, (1, 2, 3, 4)),
        ({"layer_types": ["full_attention"] * 5}, ()),
    ],
)
def test_which_layers_are_linear(change, layers):
    spec = spec_from_config(NEXT | change)
    assert spec.linear_layers == layers
    found = names_of(spec)
    for layer in range(5):
        assert (f"model.layers.{layer}.linear_attn.A_log" in found) == (layer in layers)
        assert (f"model.layers.{layer}.self_attn.q_proj.weight" in found) == (layer not in layers)


def test_both_spellings_of_the_delta_nets_projections():
    prefix = "model.layers.0.linear_attn."
    rest = {prefix + name for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")}
    grouped = {name for name in names_of(spec_from_config(NEXT)) if name.startswith(prefix)}
    assert grouped == rest | {prefix + f"in_proj_{part}.weight" for part in ("qkvz", "ba")}
    flat = {name for name in names_of(spec_from_config(FLAT)) if name.startswith(prefix)}
    assert flat == rest | {prefix + f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}


def test_decay_and_time_step_are_always_float32():
    spec = spec_from_config(NEXT | {"dtype": "bfloat16"})
    kept = {t.name: t.dtype for rule in weight_map(spec) for t in rule.tensors if t.dtype is torch.float32}
    assert kept.keys() == {f"model.layers.{layer}.linear_attn.{name}" for layer in (0, 1, 2, 4) for name in ("A_log", "dt_bias")}


@pytest.mark.parametrize(
    ("change", "dense"),
    [({"mlp_only_layers": [2]}, (2,)), ({"decoder_sparse_step": 2}, (0, 2, 4)), ({"mlp_only_layers": None}, ())],
)
def test_dense_layers_among_sparse_ones(change, dense):
    """As transformers: sparse where (layer + 1) % decoder_sparse_step is 0 and the layer is not in mlp_only_layers."""
    spec = spec_from_config(NEXT | change)
    assert spec.dense_layers == dense
    found = names_of(spec)
    for layer in range(5):
        prefix = f"model.layers.{layer}.mlp."
        assert (prefix + "gate_proj.weight" in found) == (layer in dense)
        for name in ("gate.weight", "experts.5.up_proj.weight", "shared_expert.up_proj.weight", "shared_expert_gate.weight"):
            assert (prefix + name in found) == (layer not in dense)


def test_a_dense_hybrid_has_no_experts():
    spec = spec_from_config(DENSE)
    assert spec.moe is None
    assert not any("expert" in name for name in names_of(spec))


def test_a_wrapper_holds_the_same_decoder_under_longer_names():
    wrapped, plain = spec_from_config(WRAPPED), spec_from_config(FLAT)
    assert names_of(wrapped) == [name.replace("model.", "model.language_model.", 1) for name in names_of(plain)]
    assert elements(wrapped) == elements(plain)
    assert wrapped.delta_net == plain.delta_net


@pytest.mark.parametrize("tied", [True, False])
def test_the_wrapper_says_whether_embeddings_are_tied(tied):
    inner = WRAPPED["text_config"] | {"tie_word_embeddings": not tied}
    assert spec_from_config(WRAPPED | {"tie_word_embeddings": tied, "text_config": inner}).tied_embeddings is tied


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_5_vision", "qwen3_5_moe_vision"])
def test_what_transformers_saves_is_read(family):
    spec = spec_from_config(saved(family))
    hybrid = family != "qwen3_moe"
    assert spec.linear_layers == ((0, 1, 2) if hybrid else ())
    assert spec.rope.rotated(spec.head_dim) == (4 if hybrid else 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEXT | {"layer_types": ["sliding_attention"] * 5}, "layer_types holds 'sliding_attention'"),
        (NEXT | {"partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2 turns 3 of head_dim = 16"),
        (NEXT | {"linear_num_value_heads": 5}, "linear_num_value_heads = 5 is no multiple of linear_num_key_heads = 2"),
        (NEXT | {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim = None is not a positive integer"),
        (NEXT | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0 is not a positive integer"),
        (FLAT | {"norm_topk_prob": False}, "norm_topk_prob = False is not supported for Qwen3_5MoeForCausalLM"),
        (FLAT | {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        (WRAPPED | {"text_config": None}, "text_config = None is not the decoder's configuration"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(config, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": 1}, "layout.tp=2 does not divide 1 linear-attention key heads"),
        ({"shared_expert_intermediate_size": 27}, "layout.tp=2 does not divide 27 shared expert's ffn columns"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(change, message):
    layout = ParallelLayout(world=2, tp=2, sp=True)
    layout.validate(spec_from_config(NEXT).dims())
    with pytest.raises(ValueError, match=message):
        layout.validate(spec_from_config(NEXT | change).dims())


def test_rotary_positions_turn_the_first_quarter_of_a_head():
    """theta^(-2i / rotated dimensions) for i = 0, 1: the four dimensions of 16 that turn."""
    frequencies = Rope(1e4, fraction=0.25).frequencies(16)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.01]))


def test_carried_tensors_are_listed_and_not_the_decoders(tmp_path):
    spec = spec_from_config(WRAPPED)
    stored = {t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for rule in weight_map(spec) for t in rule.tensors}
    vision = {"model.visual.pos_embed.weight": torch.ones(3), "model.visual.blocks.0.attn.qkv.bias": torch.ones(2)}
    mtp = {"mtp.norm.weight": torch.ones(2), "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(6, 4, 2)}
    save_file(stored | vision | mtp, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WRAPPED), encoding="utf-8")
    spec = read_spec(tmp_path)
    assert set(spec.carried) == vision.keys() | mtp.keys()
    assert spec.dtype is torch.bfloat16
    assert not set(names_of(spec)) & set(spec.carried)
    assert carried_names("Qwen3MoeForCausalLM", spec.carried) == frozenset()


@pytest.mark.parametrize(
    ("folder", "count"),
    [
        ("qwen3_next_80b_a3b", 79_674_391_296),
        ("qwen3_5_35b_a3b", 34_660_610_688),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_235b_a22b", 235_093_634_560),
        ("qwen3_4b", 4_022_468_096),
    ],
)
def test_the_published_sizes(folder, count):
    assert elements(read_spec(Path("configs/model/hf") / folder)) == count
