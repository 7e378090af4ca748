"""The mean of checkpoints against float64, equal ones as they are, and everything that is no mean of one model."""

import json
import shutil

import pytest
import torch
from made_checkpoints import CONFIGS, tensors_of, write
from safetensors.torch import load_file, save_file

from mcore_rl.cli import main
from models.convert_average import AverageOptions, average
from models.hf_io import CheckpointReader

CONFIG = CONFIGS["qwen3_moe"]


def checkpoint(folder, seed, dtype=torch.bfloat16, shards=2):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(t.shape, generator=generator).to(dtype) for name, t in tensors_of(CONFIG).items()}
    return write(folder, CONFIG, made, shards=shards)


def read(folder):
    reader = CheckpointReader(folder)
    return {name: reader.read(name).clone() for name in reader.names()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, (3.0, 1.0, 0.5)])
def test_the_mean(tmp_path, dtype, weights):
    folders = [checkpoint(tmp_path / str(seed), seed, dtype) for seed in range(3)]
    average(folders, tmp_path / "mean", AverageOptions(weights, fsync=False))
    found, parts = read(tmp_path / "mean"), [read(folder) for folder in folders]
    share = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)
    for name, tensor in found.items():
        exact = sum(part[name].double() * w for part, w in zip(parts, share, strict=True)) / share.sum()
        assert tensor.dtype is dtype
        # One rounding to the stored dtype, and a few of fp32 before it.
        torch.testing.assert_close(tensor.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-7)
    assert {path.name for path in (tmp_path / "mean").iterdir()} == {path.name for path in folders[0].iterdir()}
    assert (tmp_path / "mean" / "config.json").read_bytes() == (folders[0] / "config.json").read_bytes()


def test_equal_checkpoints_stay_as_they_are_and_sources_are_not_touched(tmp_path):
    folder = checkpoint(tmp_path / "one", 1, torch.float32)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    copies = [shutil.copytree(folder, tmp_path / name) for name in ("two", "three")]
    average([folder, *copies], tmp_path / "mean", AverageOptions((0.3, 0.1, 7.0), fsync=False))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name: path.read_bytes() for path in (tmp_path / "mean").iterdir()} == before


def change(folder, name, make):
    """Rewrite one tensor of a folder."""
    path = CheckpointReader(folder).path_of(name)
    tensors = load_file(path)
    tensors[name] = make(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


NORM = "model.layers.0.input_layernorm.weight"


def test_what_is_refused(tmp_path):
    one, two = checkpoint(tmp_path / "one", 1), checkpoint(tmp_path / "two", 2)

    def refused(*sources, weights=None):
        with pytest.raises(ValueError) as caught:
            average(sources, tmp_path / "mean", AverageOptions(weights, fsync=False))
        assert not (tmp_path / "mean").exists()
        return str(caught.value)

    assert "at least 2" in refused(one)
    assert "3 weights for 2 checkpoints" in refused(one, two, weights=(1.0, 1.0, 1.0))
    assert "weight -1.0 is not a positive number" in refused(one, two, weights=(1.0, -1.0))
    assert "one is given twice" in refused(one, two, tmp_path / "two" / ".." / "one")
    nan = checkpoint(tmp_path / "nan", 3)
    change(nan, NORM, lambda tensor: torch.full_like(tensor, float("nan")))
    assert f"{NORM} holds NaN" in refused(one, nan)
    other = checkpoint(tmp_path / "dtype", 4)
    change(other, NORM, lambda tensor: tensor.float())
    assert f"{NORM} is F32" in refused(one, other)
    config = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert "another model" in refused(one, two)


def test_another_tokenizer_is_refused(tmp_path):
    one, two = checkpoint(tmp_path / "one", 1), checkpoint(tmp_path / "two", 2)
    (one / "tokenizer.json").write_text("{}")
    (two / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match="is not the tokenizer of"):
        average([one, two], tmp_path / "mean")
    (two / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"two/tokenizer\.json: no such file, and"):
        average([one, two], tmp_path / "mean")


def test_tokenizers_in_several_files_and_chat_templates(tmp_path):
    one, two = checkpoint(tmp_path / "one", 1), checkpoint(tmp_path / "two", 2)
    quick = AverageOptions(fsync=False)
    for name, what in (("vocab.json", "tokenizer"), ("chat_template.jinja", "chat template")):
        (one / name).write_text("{}")
        (two / name).write_text('{"other": 1}')
        with pytest.raises(ValueError, match=rf"two/{name} is not the {what} of"):
            average([one, two], tmp_path / "mean", quick)
        (two / name).write_text("{}")
    (two / "vocab.json").unlink()
    for folder in (one, two):
        (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"two/vocab\.json: no such file, and"):
        average([one, two], tmp_path / "mean", quick)
    for folder in (one, two):
        (folder / "tokenizer.json").write_text("{}")
    (two / "chat_template.jinja").unlink()
    average([one, two], tmp_path / "mean", quick)


def filled(folder, value, dtype):
    return write(folder, CONFIG, {name: torch.full(t.shape, value, dtype=dtype) for name, t in tensors_of(CONFIG).items()})


def test_fp64_is_added_up_in_fp64(tmp_path):
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.rand(t.shape, generator=generator, dtype=torch.float64) for name, t in tensors_of(CONFIG).items()}
    one = write(tmp_path / "one", CONFIG, made)
    two = shutil.copytree(one, tmp_path / "two")
    average([one, two], tmp_path / "mean", AverageOptions(fsync=False))
    assert (tmp_path / "mean" / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_numbers_of_both_signs(tmp_path, dtype):
    large = torch.finfo(dtype).max
    folders = [filled(tmp_path / str(sign), sign * large, dtype) for sign in (1, -1)]
    average(folders, tmp_path / "mean", AverageOptions((3.0, 1.0), fsync=False))
    for tensor in read(tmp_path / "mean").values():
        torch.testing.assert_close(tensor.double(), torch.full_like(tensor, large).double() / 2, rtol=0.01, atol=0)


@pytest.mark.parametrize("weights", [(1e308, 1e308, 1e308), (1e-320, 1e-320, 1e-320), (1e-320, 1e-320, 1e308)])
def test_weights_whose_sum_is_no_float(tmp_path, weights):
    folders = [filled(tmp_path / str(value), float(value), torch.float32) for value in (0, 3, 6)]
    average(folders, tmp_path / "mean", AverageOptions(weights, fsync=False))
    want = 3.0 if len(set(weights)) == 1 else 6.0
    for tensor in read(tmp_path / "mean").values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, want))


def test_the_command(tmp_path, capsys):
    folders = [str(checkpoint(tmp_path / str(seed), seed)) for seed in range(2)]
    assert main(["average", *folders, "--target", str(tmp_path / "mean"), "--weights", "1", "3", "--no-fsync"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "mean")
    assert main(["average", *folders, "--target", str(tmp_path / "mean")]) == 2
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["average", *folders, "--target", str(tmp_path / "file" / "mean")]) == 2
    assert "is a file, so there can be no folder below it" in capsys.readouterr().err
    assert main(["average", *folders, "--target", ""]) == 2
    assert "empty path" in capsys.readouterr().err
