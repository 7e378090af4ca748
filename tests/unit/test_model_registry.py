"""config.json in the spellings of transformers 4 and 5 gives one spec; what is not supported is refused by its key."""

import json
import re
from pathlib import Path

import pytest
import torch
from made_checkpoints import CONFIGS, tensors_of, write
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.convert_carried import read_config
from models.registry import known_architectures, read_spec, spec_from_config, weight_map
from models.spec import Llama3Scaling, MoeSpec, Rope

QWEN3_30B_PARAMETERS = 30_532_122_624
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 203,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
OLD = MOE | {"num_experts": 6, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
NEW = MOE | {"num_local_experts": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "bfloat16"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_both_spellings_give_the_same_spec():
    spec = spec_from_config(OLD)
    assert spec == spec_from_config(NEW)
    assert spec.moe == MoeSpec(num_experts=6, top_k=2, ffn_size=40, norm_topk_prob=True)
    assert spec.rope == Rope(5e5)
    assert spec.dtype is torch.bfloat16
    assert (spec.head_dim, spec.qk_norm, spec.qkv_bias, spec.tied_embeddings) == (16, True, False, False)


def test_what_transformers_saves_is_read(tmp_path):
    config = Qwen3MoeConfig(
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 7e4}
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.rope.theta, spec.moe.norm_topk_prob) == (6, 7e4, True)


@pytest.mark.parametrize("scaling", [{"rope_type": "llama3"}, {"type": "llama3"}])
def test_llama3_frequencies_are_transformers(scaling):
    llama = {k: v for k, v in MOE.items() if "expert" not in k} | {"architectures": ["LlamaForCausalLM"], "head_dim": 64}
    spec = spec_from_config(llama | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | scaling, "tie_word_embeddings": True})
    assert spec.rope == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert spec.tied_embeddings
    theirs = LlamaConfig(head_dim=64, rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5})
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    torch.testing.assert_close(spec.rope.frequencies(64), want, rtol=1e-6, atol=0)
    assert not torch.allclose(want, Rope(5e5).frequencies(64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*known: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3"),
        ({"architectures": None}, "architectures = .* is not supported; known:"),
        ({"hidden_size": None}, "hidden_size = None is not a positive integer"),
        ({"vocab_size": "203"}, "vocab_size = '203' is not a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for Qwen3MoeForCausalLM"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\] names layer 3, but num_hidden_layers = 3"),
        ({"mlp_only_layers": [0, 1, 2]}, "leave none of 3 layers experts"),
        ({"decoder_sparse_step": 4}, "decoder_sparse_step = 4 leave none of 3 layers experts"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for num_hidden_layers = 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported for this architecture"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than the 6 experts"),
        ({"torch_dtype": "int8"}, "dtype = 'int8' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn' is not supported; known: default, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "factor": "a"}}, "factor = 'a' is not a positive number"),
        ({"rope_parameters": []}, r"rope_parameters = \[\] is not an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn' is not an object"),
        ({"rope_theta": 10**400}, r"rope_theta = 10+ is not a positive number"),
        ({"rope_theta": 0}, "rope_theta = 0 is not a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta = nan is not a positive number"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta = -1.0 is not a positive number"),
        ({"rope_theta": "10000"}, "rope_theta = '10000' is not a positive number"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor = 'x' is not a positive number"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3 | {"type": "llama3"}},
            "rope_parameters = .* and rope_scaling = .* differ",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps = None is not a positive number"),
        ({"rms_norm_eps": 1.5}, "rms_norm_eps = 1.5 is too large; at most 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0 is not a positive number"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps = 1e\+300 is too large; at most 1"),
        ({"partial_rotary_factor": 1e308}, r"partial_rotary_factor = 1e\+308 is too large; at most 1"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers = \[True\] is not a list of layer numbers"),
        ({"mlp_only_layers": False}, "mlp_only_layers = False is not a list of layer numbers"),
        ({"decoder_sparse_step": "false"}, "decoder_sparse_step = 'false' is not a positive integer"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step = True is not a positive integer"),
        ({"torch_dtype": ["bfloat16"]}, r"dtype = \['bfloat16'\] is not supported; known: float32"),
        ({"torch_dtype": ""}, "dtype = '' is not supported; known: float32"),
        ({"mlp_only_layers": "abc"}, "mlp_only_layers = 'abc' is not a list of layer numbers"),
        ({"architectures": 5}, "architectures = 5 is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(change, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(OLD | change)


@pytest.mark.parametrize("key", ["norm_topk_prob", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [None, -1, 0, 1, "7", "false", "true", 1.0, [], {}])
def test_flags_are_true_or_false(key, value):
    """As transformers' own configurations, which refuse null too."""
    with pytest.raises(ValueError, match=rf"^{key} = {re.escape(repr(value))} is not true or false$"):
        spec_from_config(OLD | {key: value})


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "use_sliding_window"])
@pytest.mark.parametrize("value", [True, 0, 1, "false", "", 0.0, [], {}])
def test_switches_that_must_be_off_are_false(key, value):
    with pytest.raises(ValueError, match=rf"^{key} = {re.escape(repr(value))} is not supported for .*; supported: False$"):
        spec_from_config(OLD | {key: value})
    assert spec_from_config(OLD | {key: False}) == spec_from_config(OLD)


def test_a_missing_flag_is_the_familys():
    """Qwen3-MoE leaves the probabilities as they are, Qwen3-Next renormalises them: transformers' defaults."""
    for config, default in ((CONFIGS["qwen3_moe"], False), (CONFIGS["qwen3_next"], True)):
        spec = spec_from_config({key: value for key, value in config.items() if key != "norm_topk_prob"})
        assert spec.moe is not None
        assert spec.moe.norm_topk_prob is default


@pytest.mark.parametrize("value", [3, -1, True, 2.5, "full_attention", {"0": "full_attention"}, 0, ""])
def test_layer_types_are_a_list(value):
    for config in (CONFIGS["qwen3_next"], CONFIGS["qwen3_moe"]):
        with pytest.raises(ValueError, match=rf"^layer_types = {re.escape(repr(value))} is not a list with the kind of every"):
            spec_from_config(config | {"layer_types": value})


@pytest.mark.parametrize(
    ("change", "layer", "said", "found"),
    [
        ({"layer_types": None}, 2, "linear_attention", "full_attention"),
        ({"layer_types": ["full_attention"] * 3}, 0, "full_attention", "linear_attention"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_layers_of_the_other_kind_are_said_by_the_key_that_decides(tmp_path, name, change, layer, said, found):
    folder = write(tmp_path / "hf", CONFIGS[name] | change, tensors_of(CONFIGS[name]))
    wanted = rf"config.json: layer_types .*full_attention_interval.* makes layer {layer} {said}, but .* are those of {found}$"
    with pytest.raises(ValueError, match=wanted):
        read_spec(folder)


def test_both_keys_of_the_rotary_embedding_may_say_the_same():
    new = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    both = spec_from_config(OLD | {"rope_parameters": new, "rope_scaling": LLAMA3 | {"type": "llama3"}})
    assert both.rope == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert spec_from_config(NEW | {"rope_scaling": None}) == spec_from_config(NEW)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("{}", "json: architec"),
        ("[]", "config.json holds list, not a JSON object"),
        ("null", "config.json holds NoneType, not a JSON object"),
    ],
)
def test_unreadable_config_is_refused_by_its_path(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_spec(tmp_path)
    if text is not None and text != "{}":
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)


def test_every_name_is_mapped_once():
    rules = weight_map(spec_from_config(OLD))
    names = [tensor.name for rule in rules for tensor in rule.tensors]
    assert len(names) == len(set(names)) == 3 + 3 * (2 + 4 + 2 + 1 + 6 * 3)
    assert len({rule.megatron for rule in rules}) == len(rules)


def test_tied_head_is_loaded_and_not_exported():
    tied = spec_from_config(OLD | {"tie_word_embeddings": True})
    heads = [rule for rule in weight_map(tied) if rule.megatron == "output_layer.weight"]
    assert [(rule.tensors[0].name, rule.exported) for rule in heads] == [("model.embed_tokens.weight", False)]


def test_qwen3_30b_a3b_has_its_parameters():
    spec = read_spec(Path("configs/model/hf/qwen3_30b_a3b"))
    elements = sum(torch.Size(tensor.shape).numel() for rule in weight_map(spec) for tensor in rule.tensors)
    assert elements == QWEN3_30B_PARAMETERS


def test_registry_and_config_folder_agree():
    stored = json.loads(Path("configs/model/hf/qwen3_30b_a3b/config.json").read_text(encoding="utf-8"))
    assert stored["architectures"][0] in known_architectures()
