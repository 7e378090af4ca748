"""Sizes in a config.json that no model has are refused at once, before anything is counted out or made room for."""

import json
import re

import pytest
from made_checkpoints import CONFIGS, tensors_of, write

from mcore_rl.cli import main
from mcore_rl.config.compose import compose_config
from mcore_rl.config.validate import validate
from models.config_keys import count
from models.registry import read_spec, spec_from_config

MOE = CONFIGS["qwen3_moe"]
EXPERTS = "num_local_experts" if "num_local_experts" in MOE else "num_experts"
TOO_LARGE = {
    "num_hidden_layers": (10**12, "2,000"),
    EXPERTS: (10**12, "10,000"),
    "vocab_size": (10**15, "100,000,000"),
    "hidden_size": (10**9, "10,000,000"),
    "head_dim": (10**12, "1,000,000,000"),
    "num_key_value_heads": (10**12, "1,000,000,000"),
}


@pytest.mark.parametrize("key", TOO_LARGE)
def test_a_size_that_no_model_has_is_refused_by_its_key(key):
    value, most = TOO_LARGE[key]
    with pytest.raises(ValueError, match=rf"^{key} = {value} is more than any model has; at most {most} is read$"):
        spec_from_config(MOE | {key: value})


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
@pytest.mark.parametrize("value", ["8", 2.5, -1, True, False, 0.0, "", [], {}])
def test_heads_are_numbers(key, value):
    with pytest.raises(ValueError, match=rf"^{key} = {re.escape(repr(value))} is not a positive integer$"):
        spec_from_config(MOE | {key: value})


def test_a_count_may_be_none_at_all():
    """Of MTP layers, for one: missing, null and 0 are the same, and anything but an integer is refused by its key."""
    for config, found in (({}, 0), ({"layers": None}, 0), ({"layers": 0}, 0), ({"layers": 3}, 3)):
        assert count(config, "layers") == found
    for value in ("x", "1", True, False, 1.5, -1, [], [1], float("nan"), 10**12):
        with pytest.raises(ValueError, match=rf"^layers = {re.escape(repr(value))} is "):
            count({"layers": value}, "layers")


def test_layers_and_experts_that_are_too_many_together():
    wanted = r"^num_hidden_layers = 2000 of 10000 experts make 20,000,000 experts, .* at most 250,000 are read$"
    with pytest.raises(ValueError, match=wanted):
        spec_from_config(MOE | {"num_hidden_layers": 2000, EXPERTS: 10_000})


def test_the_largest_published_sizes_are_read():
    """Layers, experts and vocabulary of Llama 3.1 405B, Kimi K2, Switch-C and Gemma 3."""
    for layers, experts in ((126, 8), (61, 384), (24, 2048)):
        assert spec_from_config(MOE | {"num_hidden_layers": layers, EXPERTS: experts}).num_layers == layers
    assert spec_from_config(MOE | {"vocab_size": 262_208, "max_position_embeddings": 10_485_760}).vocab_size == 262_208


@pytest.mark.parametrize("key", ["num_hidden_layers", EXPERTS, "vocab_size"])
def test_tools_and_training_refuse_it_in_one_line(tmp_path, capsys, key):
    hf = write(tmp_path / "hf", MOE, tensors_of(MOE))
    (hf / "config.json").write_text(json.dumps(MOE | {key: TOO_LARGE[key][0]}), encoding="utf-8")
    said = f"config.json: {key} = {TOO_LARGE[key][0]} is more than any model has"
    assert main(["convert", str(hf), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.glob("*out*"))
    with pytest.raises(ValueError, match=said):
        validate(compose_config(["experiment=quickstart", f"model.path={hf}"]))
    with pytest.raises(ValueError, match=said):
        read_spec(hf)
