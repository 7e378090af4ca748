"""Conversion without Megatron: the way there and back gives the same files, interrupted or not, and nothing half."""

import filecmp
import json
import multiprocessing
import os
import shutil
import time

import pytest
import torch
from made_checkpoints import CONFIGS, fuse, mtp_tensors, tensors_of, write
from safetensors.torch import load_file

from models import checkpoint_writer, convert_export, hf_write
from models.checkpoint_reader import MegatronReader, is_distributed_checkpoint
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_inspect import inspect_checkpoint
from models.convert_megatron import ImportOptions
from models.convert_reshard import reshard
from models.convert_staging import Staging, silent
from models.convert_verify import compare_tensors, wrong_digests
from models.hf_io import CheckpointReader

QUICK = ImportOptions(fsync=False)
BACK = ExportOptions(fsync=False)
VISION = {"model.visual.blocks.0.attn.weight": torch.arange(6).reshape(2, 3), "model.visual.norm": torch.ones(3).half()}


def assert_same_files(one, other, without=None):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    names = [name for name in names if (one / name).is_file() and name != without]
    _, different, unreadable = filecmp.cmpfiles(one, other, names, shallow=False)
    assert not different
    assert not unreadable


def there_and_back(tmp_path, hf, options=QUICK):
    hf_to_megatron(hf, tmp_path / "megatron", options)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", BACK)
    return tmp_path / "back"


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_family_comes_back_file_by_file(tmp_path, family, dtype):
    config = CONFIGS[family]
    tensors = tensors_of(config, dtype) | (VISION | mtp_tensors(config) if family == "qwen3_5_vision" else {})
    hf = write(tmp_path / "hf", config, tensors, shards=3)
    assert_same_files(hf, there_and_back(tmp_path, hf))
    assert compare_tensors(tmp_path / "megatron", hf).different == ()
    assert not list(wrong_digests(tmp_path / "megatron"))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("tp", [1, 2])
def test_fused_experts_come_back_fused(tmp_path, family, tp):
    config = CONFIGS[family]
    hf = write(tmp_path / "hf", config, fuse(tensors_of(config, torch.bfloat16)))
    assert_same_files(hf, there_and_back(tmp_path, hf, ImportOptions(tp=tp, etp=tp, fsync=False)))


def test_other_dtypes_than_the_references_are_told_in_the_configuration(tmp_path):
    """A model that was trained in fp32 from a bf16 reference: nothing is rounded, and config.json says float32."""
    config = CONFIGS["qwen3_moe"] | {"dtype": "bfloat16"}
    reference = write(tmp_path / "reference", config, tensors_of(config, torch.bfloat16), shards=2)
    trained = write(tmp_path / "hf", config, tensors_of(config))
    hf_to_megatron(trained, tmp_path / "megatron", QUICK)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ExportOptions(reference=reference, fsync=False))
    reader = CheckpointReader(tmp_path / "back")
    assert sorted(file.path.name for file in reader.files) == sorted(path.name for path in reference.glob("*.safetensors"))
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors_of(config).items())
    assert json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8")) == config | {"dtype": "float32"}


def test_experts_lie_where_megatron_looks_for_them(tmp_path):
    """gate in the first half of the rows, up in the second, layer and expert as leading axes (hidden 12, ffn 6)."""
    tensors = tensors_of(CONFIGS["qwen3_moe"])
    hf = write(tmp_path / "hf", CONFIGS["qwen3_moe"], tensors)
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    reader = MegatronReader(tmp_path / "megatron")
    stored = reader.stored("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    assert stored.shape == (3, 3, 12, 12)
    at = {chunk.offset: reader.chunk(stored, chunk) for chunk in stored.chunks}
    assert torch.equal(at[1, 2, 0, 0][0, 0], tensors["model.layers.1.mlp.experts.2.gate_proj.weight"])
    assert torch.equal(at[1, 2, 6, 0][0, 0], tensors["model.layers.1.mlp.experts.2.up_proj.weight"])
    assert reader.stored("embedding.word_embeddings.weight").shape == (256, 12)


def test_mtp_in_the_other_style_than_the_decoder(tmp_path):
    config = CONFIGS["qwen3_5_vision"]
    for number, tensors in enumerate(
        (fuse(tensors_of(config)) | mtp_tensors(config), tensors_of(config) | fuse(mtp_tensors(config)))
    ):
        folder = tmp_path / str(number)
        hf = write(folder / "hf", config, tensors)
        assert_same_files(hf, there_and_back(folder, hf))


def test_mtp_is_kept_whole_or_dropped_with_the_configuration(tmp_path):
    config, lost = CONFIGS["qwen3_5_vision"], "mtp.layers.0.self_attn.q_proj.weight"
    blocks = mtp_tensors(config)
    half = write(tmp_path / "half", config, tensors_of(config) | {n: t for n, t in blocks.items() if n != lost})
    with pytest.raises(ValueError, match=r"MTP layer 0 lacks self_attn.q_proj.weight"):
        hf_to_megatron(half, tmp_path / "no", QUICK)
    none = write(tmp_path / "none", config, tensors_of(config))
    with pytest.raises(ValueError, match="promises 1 MTP layers, but there is no mtp tensor"):
        hf_to_megatron(none, tmp_path / "no", QUICK)
    whole = write(tmp_path / "hf", config, tensors_of(config) | blocks)
    back = there_and_back(tmp_path, whole, ImportOptions(mtp="drop", fsync=False))
    assert CheckpointReader(back).names() == frozenset(tensors_of(config))
    told = json.loads((back / "config.json").read_text(encoding="utf-8"))
    assert told["text_config"].pop("mtp_num_hidden_layers") == 0
    assert told == {**config, "text_config": {k: v for k, v in config["text_config"].items() if k != "mtp_num_hidden_layers"}}


def test_text_only_export_is_a_checkpoint_of_the_decoder(tmp_path):
    config = CONFIGS["qwen3_5_vision"]
    hf = write(tmp_path / "hf", config, tensors_of(config) | VISION | mtp_tensors(config))
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "text", ExportOptions(text_only=True, fsync=False))
    text = tensors_of(config) | mtp_tensors(config)
    want = {name.replace("model.language_model.", "model."): tensor for name, tensor in text.items()}
    found = load_file(tmp_path / "text" / "model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    again = there_and_back(tmp_path / "again", tmp_path / "text")
    assert_same_files(tmp_path / "text", again)
    with pytest.raises(ValueError, match="is a decoder already"):
        megatron_to_hf(tmp_path / "again" / "megatron", tmp_path / "no", ExportOptions(text_only=True, fsync=False))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe_mixed", "llama_tied"])
def test_resharding_changes_pieces_and_no_bit(tmp_path, family):
    config = CONFIGS[family]
    hf = write(tmp_path / "hf", config, tensors_of(config), shards=2)
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    reshard(tmp_path / "megatron", tmp_path / "cut", ImportOptions(tp=2, etp=2, fsync=False), shard_bytes=1)
    one, two = (inspect_checkpoint(tmp_path / name) for name in ("megatron", "cut"))
    assert {t.name for t in one.tensors} == {t.name for t in two.tensors}
    assert sum(t.pieces for t in two.tensors) > sum(t.pieces for t in one.tensors)
    megatron_to_hf(tmp_path / "cut", tmp_path / "back", BACK)
    assert_same_files(hf, tmp_path / "back")
    reshard(hf, tmp_path / "small", QUICK, shard_bytes=2000)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 2
    assert {t.name: t.digest for t in inspect_checkpoint(tmp_path / "small", digests=True).tensors} == {
        t.name: t.digest for t in inspect_checkpoint(hf, digests=True).tensors
    }


def test_a_cut_that_does_not_divide_is_refused(tmp_path):
    hf = write(tmp_path / "hf", CONFIGS["qwen2"], tensors_of(CONFIGS["qwen2"]))
    with pytest.raises(ValueError, match=r"decoder.layers\S+ dimension \d of \[\d+.*\] does not divide into 7"):
        hf_to_megatron(hf, tmp_path / "out", ImportOptions(tp=7, fsync=False))


def convert(how, source, target, say):
    if how == "import":
        hf_to_megatron(source, target, QUICK, say)
    else:
        megatron_to_hf(source, target, BACK, say)


def convert_until(how, source, target, count, pipe):
    """Runs in a child: stops for good before the count-th tensor is written, and says so."""
    written = iter(range(count))

    def stopping(whole):
        def write(*arguments):
            if next(written, None) is None:
                pipe.send("now")
                time.sleep(60.0)
            return whole(*arguments)

        return write

    checkpoint_writer.write_item = stopping(checkpoint_writer.write_item)
    hf_write.ShardFile.put = stopping(hf_write.ShardFile.put)
    convert(how, source, target, silent)


@pytest.mark.parametrize("how", ["import", "export"])
@pytest.mark.parametrize("count", [0, 1, 30, 50])
def test_killed_in_the_middle_it_never_looks_complete_and_goes_on(tmp_path, how, count):
    config = CONFIGS["qwen3_moe"]
    hf = write(tmp_path / "hf", config, tensors_of(config), shards=3)
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    source = hf if how == "import" else tmp_path / "megatron"
    target, hidden = tmp_path / "out", tmp_path / ".out.incomplete"
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=convert_until, args=(how, source, target, count, theirs))
    child.start()
    assert ours.recv() == "now"
    child.kill()
    child.join()
    assert not target.exists()
    assert not is_distributed_checkpoint(hidden)
    with pytest.raises(ValueError, match="holds neither"):
        CheckpointReader(hidden)
    steps = []
    convert(how, source, target, steps.append)
    taken_over = [step for step in steps if step.resumed]
    assert taken_over == steps[: len(taken_over)]
    assert len(taken_over) >= (count >= 30)
    assert not hidden.exists()
    if how == "export":
        assert_same_files(hf, target)
    else:
        assert_same_files(tmp_path / "megatron", target, without=".metadata")
        assert compare_tensors(target, hf).different == ()


def test_a_changed_source_starts_over(tmp_path):
    with Staging(tmp_path / "out", "one") as staging:
        (staging.folder / "a").write_text("a")
        staging.finish_file("a")
    with Staging(tmp_path / "out", "one") as staging:
        assert staging.has_file("a")
        (staging.folder / "a").write_text("longer")
        assert not staging.has_file("a")
        with pytest.raises(ValueError, match="is being written by another process"):
            Staging(tmp_path / "out", "one")
    with Staging(tmp_path / "out", "two") as staging:
        assert not staging.done
        assert not (staging.folder / "a").exists()
        staging.finish_file(staging.folder.joinpath("b").touch() or "b")
        staging.complete()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b"]
    with pytest.raises(ValueError, match="already exists"):
        Staging(tmp_path / "out", "two")


def test_a_changed_reference_starts_over(tmp_path):
    """What is carried over comes from its files, so an interrupted export must not go on with others."""
    config = CONFIGS["qwen3_moe"]
    hf = write(tmp_path / "hf", config, tensors_of(config), shards=3)
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    options = ExportOptions(reference=hf)
    before = convert_export._fingerprint(tmp_path / "megatron", hf, options)
    assert before == convert_export._fingerprint(tmp_path / "megatron", hf, options)
    shard = next(hf.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    assert before != convert_export._fingerprint(tmp_path / "megatron", hf, options)


def test_a_journal_row_cut_short_is_ignored(tmp_path):
    with Staging(tmp_path / "out", "one") as staging:
        staging.finish("a", 1)
        journal = staging.folder / "journal.jsonl"
    journal.write_text(journal.read_text() + '\n{"unit": "b", "rec')
    with Staging(tmp_path / "out", "one") as staging:
        staging.finish("c", 3)
    with Staging(tmp_path / "out", "one") as staging:
        assert staging.done == {"a": 1, "c": 3}


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    hf = write(tmp_path / "hf", CONFIGS["qwen3"], tensors_of(CONFIGS["qwen3"]))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ValueError, match=r"GB are needed, but .* has 0.00 GB free"):
        hf_to_megatron(hf, tmp_path / "out", QUICK)
    assert not list((tmp_path / ".out.incomplete").glob("*.distcp"))
