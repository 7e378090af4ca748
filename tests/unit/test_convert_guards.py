"""What a conversion refuses before it writes: cuts that do not divide, and files beside the checkpoint that were changed."""

import json

import pytest
import torch
from made_checkpoints import CONFIGS, tensors_of, write

from mcore_rl.cli import main
from models.checkpoint_reader import OWN_FILE
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import CARRIED_FILE, COMPANIONS, LAYOUT_FILE, ImportOptions
from models.convert_reshard import reshard
from models.convert_verify import compare_tensors, wrong_digests

QUICK = ImportOptions(fsync=False)
BACK = ExportOptions(fsync=False)
VISION = {"model.visual.blocks.0.attn.weight": torch.arange(6.0).reshape(2, 3)}


@pytest.fixture
def hf(tmp_path):
    config = CONFIGS["qwen3_5_vision"]
    return write(tmp_path / "hf", config, tensors_of(config) | VISION, shards=2)


@pytest.fixture
def megatron(hf, tmp_path):
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(mtp="drop", fsync=False))
    return tmp_path / "megatron"


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("key", ["tp", "etp"])
def test_a_cut_that_cannot_be_is_refused_before_anything_is_written(tmp_path, capsys, key):
    """Ten million pieces of a vocabulary that is padded for them would take gigabytes and minutes."""
    hf = write(tmp_path / "hf", CONFIGS["qwen3_moe"], tensors_of(CONFIGS["qwen3_moe"]))
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    for command, source in (("convert", hf), ("reshard", tmp_path / "megatron")):
        assert main([command, str(source), str(tmp_path / "out"), f"--{key}", "10000000"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"mcore-rl: {key}=10000000: decoder.layers.")
        assert "does not divide into 10000000 pieces; a divisor of " in error
        assert len(error.splitlines()) == 1
    assert not list(tmp_path.glob("*out*"))


def refused(megatron, tmp_path, match):
    for write_again in (
        lambda: megatron_to_hf(megatron, tmp_path / "out", BACK),
        lambda: megatron_to_hf(megatron, tmp_path / "out", ExportOptions(reference=megatron / COMPANIONS, fsync=False)),
        lambda: reshard(megatron, tmp_path / "out", QUICK, shard_bytes=1),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            write_again()
        assert len(str(caught.value).splitlines()) == 1
        assert not list(tmp_path.glob("*out*"))


def test_a_changed_number_in_the_layout_is_seen(megatron, tmp_path):
    """[2, 3] turned into [3, 2] holds as many bytes: the carried tensor would come back in another shape."""
    layout = megatron / COMPANIONS / LAYOUT_FILE
    change(layout, '"model.visual.blocks.0.attn.weight", "F32", [2, 3]', '"model.visual.blocks.0.attn.weight", "F32", [3, 2]')
    wanted = rf"{LAYOUT_FILE} is not what was written: its digest is \w+, {OWN_FILE} says \w+$"
    refused(megatron, tmp_path, wanted)
    (wrong,) = wrong_digests(megatron)
    assert str(layout) in wrong


def test_a_checkpoint_whose_layout_has_no_digest_says_what_to_do(hf, megatron, tmp_path):
    path = megatron / OWN_FILE
    known = json.loads(path.read_text(encoding="utf-8"))
    del known["layout"]
    path.write_text(json.dumps(known), encoding="utf-8")
    refused(
        megatron, tmp_path, rf"{LAYOUT_FILE} cannot be checked: \S+{OWN_FILE}, of an older version, .* convert the source again$"
    )


def test_the_layout_of_a_resharded_checkpoint_has_a_digest(megatron, tmp_path):
    reshard(megatron, tmp_path / "cut", ImportOptions(tp=2, fsync=False), shard_bytes=1)
    assert not list(wrong_digests(tmp_path / "cut"))
    change(tmp_path / "cut" / COMPANIONS / LAYOUT_FILE, "[2, 3]", "[3, 2]")
    refused(tmp_path / "cut", tmp_path, "is not what was written")


def test_flipped_bits_in_a_carried_tensor_are_seen(megatron, tmp_path):
    path = megatron / COMPANIONS / CARRIED_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    wanted = (
        rf"{CARRIED_FILE}: model\.visual\.blocks\.0\.attn\.weight is not what was written: its digest is \w+, {LAYOUT_FILE} says"
    )
    with pytest.raises(ValueError, match=wanted):
        megatron_to_hf(megatron, tmp_path / "out", BACK)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"files": [1], "index": null}', '{"files": [["a", 1, [["b"]]]], "index": null}']
)
def test_a_layout_that_is_none_is_named_where_nothing_vouches_for_it(megatron, tmp_path, text):
    (megatron / OWN_FILE).unlink()
    (megatron / COMPANIONS / LAYOUT_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{LAYOUT_FILE} does not hold the layout of a Hugging Face folder"):
        megatron_to_hf(megatron, tmp_path / "out", BACK)


def test_a_tokenizer_that_was_changed_is_named(tmp_path):
    config = CONFIGS["qwen3"]
    hf = write(tmp_path / "hf", config, tensors_of(config))
    (hf / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    assert compare_tensors(tmp_path / "megatron", hf).different == ()
    (tmp_path / "megatron" / COMPANIONS / "tokenizer.json").write_text('{"version": "1.1"}', encoding="utf-8")
    assert compare_tensors(tmp_path / "megatron", hf).different == ("tokenizer.json",)
    (hf / "tokenizer.json").unlink()
    assert compare_tensors(tmp_path / "megatron", hf).different == ("tokenizer.json",)
