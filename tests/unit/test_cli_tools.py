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
    assert "convert: last" in said.err
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
        (("reshard", "SOURCE", "OUT", "--shard-gb", "nan"), "--shard-gb nan must be positive"),
        (("reshard", "SOURCE", "OUT", "--shard-gb", "inf"), "--shard-gb inf must be positive"),
        (("reshard", "SOURCE", "OUT", "--shard-gb", "1e308"), "--shard-gb 1e+308 must be positive"),
        (("reshard", "SOURCE", "OUT", "--shard-gb", "-1"), "--shard-gb -1.0 must be positive"),
        (("reshard", "SOURCE", "OUT", "--tp", "2"), "--tp has no meaning here"),
        (("reshard", "SOURCE", "OUT", "--etp", "2"), "--etp has no meaning here"),
        (("reshard", "SOURCE", "INSIDE"), "inside lies inside"),
        (("convert", "SOURCE", "INSIDE"), "inside lies inside"),
        (("average", "SOURCE", "nowhere", "--target", "INSIDE"), "inside lies inside"),
        (("inspect", "nowhere"), "nowhere is not a folder"),
        (("verify", "SOURCE", "SOURCE"), "is not a complete Megatron checkpoint"),
        (("convrt",), "convrt: no such command; did you mean 'convert'?"),
    ],
)
def test_wrong_input_is_one_line(hf, tmp_path, capsys, words, message):
    places = {"SOURCE": str(hf), "OUT": str(tmp_path / "out"), "INSIDE": str(hf / "new" / "inside")}
    assert main([places.get(word, word) for word in words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (hf / "new").exists()


@pytest.mark.parametrize("command", ["convert", "reshard", "average"])
def test_targets_that_can_never_be_are_refused_before_any_work(hf, tmp_path, capsys, command):
    other = write(tmp_path / "other", CONFIG, tensors_of(CONFIG))
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    wrong = {
        tmp_path / "new" / "..": "names no new folder",
        tmp_path / "dangling": f"is a link to {tmp_path / 'gone'}, which does not exist",
        tmp_path / ("x" * 250): "its name is too long; at most 255 bytes",
        tmp_path / ("x" * 300) / "y": "its name is too long; at most 255 bytes",
    }
    before = sorted(tmp_path.iterdir())
    for target, message in wrong.items():
        words = [hf, other, "--target", target] if command == "average" else [hf, target]
        assert run(command, *words) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_reshard_of_a_megatron_checkpoint_has_no_file_size(hf, tmp_path, capsys):
    run("convert", hf, tmp_path / "megatron", "--no-fsync")
    assert run("reshard", tmp_path / "megatron", tmp_path / "out", "--shard-gb", 1) == 2
    assert "--shard-gb has no meaning here" in capsys.readouterr().err


def test_verify_says_when_there_are_no_digests(hf, tmp_path, capsys):
    run("convert", hf, tmp_path / "megatron", "--no-fsync")
    (tmp_path / "megatron" / "mcore_rl.json").unlink()
    capsys.readouterr()
    assert run("verify", tmp_path / "megatron", hf, "--no-forward") == 0
    assert capsys.readouterr().out.endswith(f"digests: there are none: {tmp_path / 'megatron'} has no mcore_rl.json\n")
    (tmp_path / "megatron" / "mcore_rl.json").write_text("[1, 2]")
    assert run("verify", tmp_path / "megatron", hf, "--no-forward") == 2
    assert "mcore_rl.json does not hold the checkpoint's digests" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "1", "null"])
def test_inspect_of_a_configuration_that_is_none(hf, capsys, text):
    (hf / "config.json").write_text(text)
    assert run("inspect", hf) == 2
    assert "not a JSON object" in capsys.readouterr().err


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
