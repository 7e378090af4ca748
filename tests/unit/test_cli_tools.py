"""`mcore-rl convert|verify|inspect|reshard` as a person uses them."""

import json
import subprocess
import sys

import pytest
import torch
from made_checkpoints import CONFIGS, tensors_of, write

from mcore_rl.cli import main
from mcore_rl.cli_tools import TOOLS

CONFIG = CONFIGS["qwen3_moe"]


@pytest.fixture
def hf(tmp_path):
    return write(tmp_path / "hf", CONFIG, tensors_of(CONFIG), shards=2)


def run(*words):
    return main([str(word) for word in words])


def test_there_and_back(hf, tmp_path, capsys):
    assert run("convert", hf, tmp_path / "megatron", "--no-fsync") == 0
    assert run("reshard", tmp_path / "megatron", tmp_path / "cut", "--tp", 2, "--no-fsync") == 0
    assert run("convert", tmp_path / "cut", tmp_path / "back") == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(tmp_path / name) for name in ("megatron", "cut", "back")]
    assert "convert: carried" in said.err
    assert run("verify", tmp_path / "cut", tmp_path / "back", "--no-forward") == 0
    assert capsys.readouterr().out == "bits: 57 of 57 tensors are the same\ndigests: as written\n"


def test_verify_names_what_differs(hf, tmp_path, capsys):
    run("convert", hf, tmp_path / "megatron", "--no-fsync")
    changed = tensors_of(CONFIG)
    changed["model.norm.weight"][3] += 1.0
    other = write(tmp_path / "other", CONFIG, changed, shards=2)
    capsys.readouterr()
    assert run("verify", tmp_path / "megatron", other, "--no-forward") == 1
    assert "56 of 57 tensors are the same; different: model.norm.weight" in capsys.readouterr().out


def test_inspect_as_text_and_json(hf, tmp_path, capsys):
    run("convert", hf, tmp_path / "megatron", "--no-fsync")
    capsys.readouterr()
    assert run("inspect", tmp_path / "megatron", "--json", "--digests") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["architecture"]) == ("megatron", "Qwen3MoeForCausalLM")
    fc1 = next(t for t in found["tensors"] if t["name"] == "decoder.layers.mlp.experts.experts.linear_fc1.weight")
    assert (fc1["shape"], fc1["dtype"], fc1["pieces"], len(fc1["digest"])) == ([3, 3, 12, 12], "F32", 18, 16)
    assert run("inspect", hf) == 0
    said = capsys.readouterr().out
    assert "model.norm.weight" in said
    assert said.endswith(f"57 tensors (57 F32), {found_elements(tensors_of(CONFIG)):,} numbers, 0.000 GB in 2 files\n")


def found_elements(tensors):
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "SOURCE"), "the following arguments are required: TARGET; see mcore-rl convert --help"),
        (("convert", "SOURCE", "OUT", "--tp", "two"), "argument --tp: invalid int value: 'two'"),
        (("convert", "SOURCE", "OUT", "--tp", "0"), "--tp 0 --etp 1: both must be at least 1"),
        (("convert", "SOURCE", "OUT", "--text-only"), "--text-only has no meaning here"),
        (("convert", "SOURCE", "SOURCE"), "already exists"),
        (("convert", "nowhere", "OUT"), "nowhere/config.json does not exist"),
        (("reshard", "SOURCE", "OUT", "--shard-gb", "0"), "--shard-gb 0.0 must be positive"),
        (("inspect", "nowhere"), "nowhere is not a folder"),
        (("verify", "SOURCE", "SOURCE"), "is not a complete Megatron checkpoint"),
        (("convrt",), "convrt: no such command; did you mean 'convert'?"),
    ],
)
def test_wrong_input_is_one_line(hf, tmp_path, capsys, words, message):
    places = {"SOURCE": str(hf), "OUT": str(tmp_path / "out")}
    assert main([places.get(word, word) for word in words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_damage_is_one_line_naming_file_and_tensor(hf, tmp_path, capsys):
    tensors = tensors_of(CONFIG)
    tensors["model.norm.weight"][0] = torch.nan
    damaged = write(tmp_path / "damaged", CONFIG, tensors, shards=2)
    assert run("convert", damaged, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "of-00002.safetensors: model.norm.weight holds NaN or infinity" in said
    assert len(said.strip().splitlines()[-1]) < 300


@pytest.mark.parametrize("command", TOOLS)
def test_help_needs_no_torch(command):
    code = "import sys; sys.modules['torch'] = None; from mcore_rl.cli import main; main(sys.argv[1:])"
    said = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert f"mcore-rl {command}" in said.stdout
