"""The small model folder: transformers' own architecture, per-expert tensor names, the same bytes for the same seed."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mcore_rl.config.schema import BuildConfig
from mcore_rl.tiny_model import build_tiny

QUICKSTART = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DENSE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"), BuildConfig(hf_config=QUICKSTART), seed=3)


def test_quickstart_size_and_names(folder):
    """Hand count: 2 x 320 x 128 embeddings, per layer 49,152 attention + 320 norms + 8 x 3 x 128 x 64 experts + gate, 128."""
    tensors = load_file(folder / "model.safetensors")
    layer = (128 * 128 * 2 + 128 * 64 * 2) + (2 * 128 + 2 * 32) + 8 * 3 * 128 * 64 + 8 * 128
    assert sum(tensor.numel() for tensor in tensors.values()) == 2 * 320 * 128 + 4 * layer + 128 == 1_070_464
    assert tensors["model.layers.3.mlp.experts.7.gate_proj.weight"].shape == (64, 128)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_every_matrix_is_random_the_router_too(folder):
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            spread = 5 * 0.02 / math.sqrt(2 * tensor.numel())  # five standard errors of a standard deviation
            assert abs(float(tensor.std()) - 0.02) < spread, name


def test_same_seed_same_bytes_whatever_the_global_state(folder, tmp_path):
    before = torch.get_rng_state()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = build_tiny(tmp_path / "again", BuildConfig(hf_config=OmegaConf.create(QUICKSTART)), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
    assert sorted(p.name for p in again.iterdir()) == sorted(p.name for p in folder.iterdir())
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    other = load_file(build_tiny(tmp_path / "other", BuildConfig(hf_config=QUICKSTART), seed=4) / "model.safetensors")
    assert not torch.equal(other["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])


def test_transformers_loads_it(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert (generation.eos_token_id, generation.pad_token_id, tokenizer.eos_token_id) == ([2], 0, 2)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 320)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_dense_architectures(architecture, tmp_path):
    path = build_tiny(tmp_path, BuildConfig(architecture, dict(DENSE)), seed=0)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert any(".q_norm." in name for name in tensors) is (architecture == "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (BuildConfig("NoForCausalLM"), "model.build.architecture: .*'NoForCausalLM'"),
        (BuildConfig(hf_config={"hiden_size": 3}), "model.build.hf_config.hiden_size"),
        (BuildConfig(hf_config={"vocab_size": 256}), "vocab_size=256: the tokenizer has 302"),
        (BuildConfig(tokenizer="x"), "model.build.tokenizer"),
    ],
)
def test_errors_name_the_key(build, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_tiny(tmp_path, build, seed=0)
