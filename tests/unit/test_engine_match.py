"""The table that compares an engine's model with the trainer's, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from mcore_rl.config.schema import DType, RolloutConfig
from mcore_rl.rollout.match import check_facts, compare_facts, table, text_facts, trainer_facts
from models.registry import spec_from_config

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
ENGINE = {
    "architecture": "Qwen3MoeForCausalLM",
    "layers": 2,
    "vocabulary": 320,
    "precision": "float32",
    "max_length": 256,
    "logprobs": "raw_logprobs",
    "draft": "none",
    "moe_layers": 2,
    "experts": 8,
    "top_k": 2,
    "norm_topk_prob": True,
    "scoring": "softmax",
    "router_dtype": "float32",
    "expert_parallel": 1,
    "expert_placement": "linear",
}


def folder(path, tokenizer="{}", template="{{ messages }}"):
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture
def trainer(tmp_path):
    return trainer_facts(spec_from_config(CONFIG), folder(tmp_path / "mine"), RolloutConfig())


def engine(tmp_path, **changes):
    where = changes.pop("model_folder", tmp_path / "mine")
    return {**ENGINE, "model_folder": str(where), **changes}


def test_the_same_model_fits_and_the_table_says_so(tmp_path, trainer):
    facts = compare_facts(trainer, engine(tmp_path))
    check_facts("vllm", facts)
    verdicts = {fact.name: fact.verdict for fact in facts}
    assert {name for name, verdict in verdicts.items() if verdict == "same"} == set(trainer)
    text = table("vllm", facts)
    assert text.splitlines()[0] == "engine vllm"
    assert "norm_topk_prob    True" in text and "MISMATCH" not in text
    assert "expert_placement  -" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "Qwen3NextForCausalLM"),
        ("layers", 3),
        ("vocabulary", 331),
        ("precision", "bfloat16"),
        ("max_length", 255),
        ("logprobs", "processed_logprobs"),
        ("draft", "mtp"),
        ("experts", 16),
        ("top_k", 4),
        ("norm_topk_prob", False),
        ("scoring", "sigmoid biased"),
        ("router_dtype", "bfloat16"),
        ("moe_layers", 1),
    ],
)
def test_every_other_model_is_refused_by_name(tmp_path, trainer, name, value):
    facts = compare_facts(trainer, engine(tmp_path, **{name: value}))
    assert f"{name} " in table("vllm", facts) and "MISMATCH" in table("vllm", facts)
    with pytest.raises(ValueError, match=rf"^rollout engine vllm runs another model: {name} is {value} in the engine and "):
        check_facts("vllm", facts)


def test_a_dense_engine_for_a_mixture_is_refused(tmp_path, trainer):
    dense = {name: value for name, value in engine(tmp_path).items() if name not in ("experts", "top_k", "moe_layers")}
    with pytest.raises(ValueError, match="moe_layers is - in the engine and 2 in the trainer; experts is - in the engine"):
        check_facts("vllm", compare_facts(trainer, dense))


def test_what_may_differ(tmp_path, trainer):
    """A longer limit, experts spread over workers, a router in more digits than declared, a folder without a tokenizer."""
    (tmp_path / "bare").mkdir()
    for changes in ({"max_length": 4096}, {"expert_parallel": 8, "expert_placement": "round_robin"}):
        check_facts("vllm", compare_facts(trainer, engine(tmp_path, **changes)))
    check_facts("vllm", compare_facts(trainer, engine(tmp_path, model_folder=tmp_path / "bare")))
    check_facts("vllm", compare_facts(trainer, engine(tmp_path, model_folder="/nowhere/on/this/host")))
    coarse = trainer_facts(spec_from_config(CONFIG), tmp_path / "mine", RolloutConfig(dtype=DType.bfloat16))
    check_facts("vllm", compare_facts(coarse, engine(tmp_path, precision="bfloat16")))


@pytest.mark.parametrize(
    ("tokenizer", "template", "name"), [("{1}", "{{ messages }}", "tokenizer"), ("{}", "x", "chat_template")]
)
def test_another_tokenizer_or_template_is_refused(tmp_path, trainer, tokenizer, template, name):
    other = folder(tmp_path / "other", tokenizer, template)
    with pytest.raises(ValueError, match=f"runs another model: {name} is "):
        check_facts("vllm", compare_facts(trainer, engine(tmp_path, model_folder=other)))


def test_a_template_in_the_settings_is_the_same_template(tmp_path):
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    (two / "chat_template.jinja").unlink()
    (two / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert text_facts(one) == text_facts(two)
