"""Folders of safetensors: what is broken is named, what is written is complete or not there at all."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.hf_io import INDEX, CheckpointReader, fuse_experts
from models.hf_write import write_checkpoint


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "x"}', encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "merges.txt").write_text("a b\n", encoding="utf-8")
    return folder


def sharded(folder):
    tensors = [("a.weight", torch.arange(6.0).reshape(2, 3)), ("b.weight", torch.ones(4)), ("c.weight", torch.zeros(8))]
    return tensors, folder / "model-00001-of-00002.safetensors"


def test_single_file(source):
    reader = CheckpointReader(source)
    assert reader.names() == {"a.weight", "b.weight"}
    assert reader.dtype("a.weight") is torch.float32
    assert torch.equal(reader.read("a.weight"), torch.arange(6.0).reshape(2, 3))
    assert not reader.fused_experts


def test_written_in_shards_and_read_back(source, tmp_path):
    tensors, _ = sharded(source)
    target = tmp_path / "out"
    write_checkpoint(target, iter(tensors), source=source, max_shard_bytes=40)
    index = json.loads((target / INDEX).read_text(encoding="utf-8"))
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["metadata"]["total_size"] == 4 * (6 + 4 + 8)
    for file in files:
        with safe_open(target / file, framework="pt") as handle:
            assert set(handle.keys()) == {name for name, where in index["weight_map"].items() if where == file}
            assert handle.metadata() == {"format": "pt"}
    reader = CheckpointReader(target)
    for name, tensor in tensors:
        assert torch.equal(reader.read(name), tensor)
    assert {path.name for path in target.iterdir()} == {*files, INDEX, "config.json", "tokenizer.json", "merges.txt"}
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_one_shard_needs_no_index(source, tmp_path):
    write_checkpoint(tmp_path / "out", iter([("a", torch.ones(2))]), source=source)
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["a"]
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_writer_that_dies_leaves_no_checkpoint(source, tmp_path):
    def tensors():
        yield "a", torch.ones(2)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_checkpoint(tmp_path / "out", tensors(), source=source)
    assert not (tmp_path / "out").exists()
    write_checkpoint(tmp_path / "out", iter([("a", torch.ones(2))]), source=source)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_never_over_another_checkpoint_and_no_tensor_twice(source, tmp_path):
    with pytest.raises(ValueError, match="already exists"):
        write_checkpoint(source, iter([]), source=source)
    with pytest.raises(ValueError, match="a was given twice"):
        write_checkpoint(tmp_path / "out", iter([("a", torch.ones(1)), ("a", torch.ones(1))]), source=source)


def test_truncated_file_is_named(source, tmp_path):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"source/model.safetensors is not a complete safetensors file"):
        CheckpointReader(source)


def test_missing_shard_missing_tensor_and_disagreeing_index_are_named(source, tmp_path):
    tensors, first = sharded(tmp_path / "out")
    write_checkpoint(tmp_path / "out", iter(tensors), source=source, max_shard_bytes=40)
    save_file({"a.weight": torch.ones(2)}, first)
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors and .*index.json disagree about b.weight"):
        CheckpointReader(tmp_path / "out")
    first.unlink()
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors is missing"):
        CheckpointReader(tmp_path / "out")
    (tmp_path / "out" / INDEX).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        CheckpointReader(tmp_path / "out")
    with pytest.raises(ValueError, match=r"has no tensor z\.weight"):
        CheckpointReader(source).read("z.weight")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds neither"):
        CheckpointReader(tmp_path / "empty")


def store(folder, header, data=b"\0" * 24):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


WHOLE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": "abc"}, "entry of a is not one: .*'a' is not a whole number"),
        ({"shape": [-2, -3]}, "entry of a is not one: .*-2 is not a whole number of at least 0"),
        ({"shape": [2.0, 3]}, "entry of a is not one: .*2.0 is not a whole number"),
        ({"shape": 6}, "entry of a is not one"),
        ({"data_offsets": ["a", "b"]}, "entry of a is not one: .*'a' is not"),
        ({"data_offsets": [0.0, 24.0]}, "entry of a is not one"),
        ({"data_offsets": [0, 1, 24]}, "entry of a is not one"),
        ({"data_offsets": None}, "entry of a is not one"),
        ({"dtype": ["F32"]}, "a is stored as .*F32.*, which is unknown"),
        ({"dtype": None}, "a is stored as None, which is unknown"),
    ],
)
def test_entries_of_a_header_that_are_none(source, change, message):
    store(source, {"a": WHOLE})
    assert CheckpointReader(source).shape("a") == (2, 3)
    store(source, {"a": WHOLE | change})
    with pytest.raises(ValueError, match=f"model.safetensors.*{message}"):
        CheckpointReader(source)


def test_headers_and_indexes_that_are_none(source):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            CheckpointReader(source)

    for metadata in (5, {"a": [1]}):
        store(source, {"__metadata__": metadata, "a": WHOLE})
        refused("model.safetensors is not a complete safetensors file: its __metadata__ is")
    store(source, b"[" * 100_000)
    refused("model.safetensors is not a complete safetensors file: its header is not JSON")
    store(source, {}, b"")
    refused("model.safetensors holds no tensor")
    (source / INDEX).write_text('{"weight_map": {}}', encoding="utf-8")
    refused(f"{INDEX}: weight_map is empty")
    for file in ("null", "5"):
        (source / INDEX).write_text(
            '{"weight_map": {"b": "model.safetensors", "a": FILE}}'.replace("FILE", file), encoding="utf-8"
        )
        refused(f"{INDEX}: weight_map has (None|5) for a, which is no file name")
    (source / INDEX).write_text("[" * 100_000, encoding="utf-8")
    refused(f"{INDEX} is not a safetensors index")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_name_file_and_tensor(source, value):
    save_file({"a.weight": torch.tensor([1.0, value])}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: a.weight holds NaN or infinity"):
        CheckpointReader(source).read("a.weight")


def test_integer_tensors_are_refused(source):
    save_file({"a.weight": torch.ones(2, dtype=torch.int8)}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"a\.weight is stored as I8"):
        CheckpointReader(source).dtype("a.weight")


def test_fused_experts_are_read_one_by_one_and_fused_again(source):
    gate_up = torch.arange(3 * 4 * 5, dtype=torch.float32).reshape(3, 4, 5)
    down = 1000 + torch.arange(3 * 5 * 2, dtype=torch.float32).reshape(3, 5, 2)
    stored = {"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down, "m.norm.weight": torch.ones(2)}
    save_file(stored, source / "model.safetensors")
    reader = CheckpointReader(source)
    assert reader.fused_experts
    assert reader.names() == {"m.norm.weight"} | {
        f"m.experts.{expert}.{part}.weight" for expert in range(3) for part in ("gate_proj", "up_proj", "down_proj")
    }
    assert torch.equal(reader.read("m.experts.1.gate_proj.weight"), gate_up[1, :2])
    assert torch.equal(reader.read("m.experts.1.up_proj.weight"), gate_up[1, 2:])
    assert torch.equal(reader.read("m.experts.2.down_proj.weight"), down[2])
    again = dict(fuse_experts(((name, reader.read(name)) for name in sorted(reader.names())), 3))
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    with pytest.raises(ValueError, match=r"not all 4 experts were given for m.experts"):
        list(fuse_experts(((name, reader.read(name)) for name in sorted(reader.names())), 4))
