"""A checkpoint that is damaged, or does not match its configuration, is refused with the file and the tensor named."""

import json
import shutil

import pytest
import torch
from made_checkpoints import CONFIGS, fuse, tensors_of, write
from safetensors.torch import load_file, save_file

from models.checkpoint_reader import COMMON, MARKER, OWN_FILE, is_distributed_checkpoint
from models.checkpoint_writer import OBJECTS_FILE
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import COMPANIONS, ImportOptions
from models.convert_reshard import reshard
from models.convert_verify import compare_tensors, wrong_digests
from models.hf_io import INDEX
from models.registry import read_spec

CONFIG = CONFIGS["qwen3_moe"]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def hf(tmp_path):
    return write(tmp_path / "hf", CONFIG, tensors_of(CONFIG), shards=3)


@pytest.fixture
def megatron(hf, tmp_path):
    hf_to_megatron(hf, tmp_path / "megatron", ImportOptions(fsync=False))
    return tmp_path / "megatron"


def shard_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"][name]


def change(folder, name, edit):
    path = shard_of(folder, name)
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(hf, tmp_path, match):
    with pytest.raises(ValueError, match=match):
        hf_to_megatron(hf, tmp_path / "out", ImportOptions(fsync=False))
    assert not (tmp_path / "out").exists()


def test_truncated_shard(hf, tmp_path):
    path = hf / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    refused(hf, tmp_path, r"00002-of-00003.safetensors is not a complete safetensors file: model\.\S+ ends at byte \d+")


def test_header_cut_short_and_no_header(hf, tmp_path):
    path = hf / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    refused(hf, tmp_path, "00001-of-00003.safetensors is not a complete safetensors file: a header of")
    path.write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00[]")
    refused(hf, tmp_path, "00001-of-00003.safetensors is not a complete safetensors file: its header")


def test_bytes_behind_the_last_tensor(hf, tmp_path):
    path = hf / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    refused(hf, tmp_path, "00003-of-00003.safetensors is not a complete safetensors file: 4 bytes follow")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan(tmp_path, value, dtype):
    tensors = tensors_of(CONFIG, dtype)
    tensors[EXPERT][3, 5] = value
    hf = write(tmp_path / "hf", CONFIG, tensors, shards=3)
    refused(hf, tmp_path, rf"{shard_of(hf, EXPERT).name}: {EXPERT} holds NaN or infinity")


def test_nan_in_a_fused_tensor(tmp_path):
    tensors = fuse(tensors_of(CONFIG))
    tensors["model.layers.1.mlp.experts.gate_up_proj"][2, 7, 0] = torch.nan
    refused(write(tmp_path / "hf", CONFIG, tensors), tmp_path, rf"model.safetensors: {EXPERT} holds NaN")


def test_renamed_key(hf, tmp_path):
    change(hf, EXPERT, lambda t: t.update({"surprise": t.pop(EXPERT)}))
    refused(hf, tmp_path, f"{shard_of(hf, EXPERT).name} and {INDEX} disagree about {EXPERT}, surprise")
    index = json.loads((hf / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["surprise"] = index["weight_map"].pop(EXPERT)
    (hf / INDEX).write_text(json.dumps(index), encoding="utf-8")
    refused(hf, tmp_path, f"hf lacks 1 tensors of the model: {EXPERT}")


def test_unexpected_tensor(tmp_path):
    tensors = tensors_of(CONFIG) | {"model.layers.9.surprise": torch.zeros(2)}
    refused(write(tmp_path / "hf", CONFIG, tensors), tmp_path, "that the model does not have: model.layers.9.surprise")


def test_missing_shard_and_index_out_of_the_folder(hf, tmp_path):
    (hf / "model-00002-of-00003.safetensors").unlink()
    refused(hf, tmp_path, f"00002-of-00003.safetensors is missing, but {INDEX} lists it")
    index = {"weight_map": dict.fromkeys(tensors_of(CONFIG), "../hf/model-00001-of-00003.safetensors")}
    (hf / INDEX).write_text(json.dumps(index), encoding="utf-8")
    refused(hf, tmp_path, "which is not a file of this folder")


@pytest.mark.parametrize(("key", "tensor"), [("vocab_size", "embed_tokens"), ("moe_intermediate_size", "experts.0.gate_proj")])
def test_configuration_that_disagrees_with_shapes(tmp_path, key, tensor):
    hf = write(tmp_path / "hf", CONFIG | {key: CONFIG[key] + 2}, tensors_of(CONFIG))
    refused(hf, tmp_path, rf"model.safetensors: \S*{tensor}.weight is \[\d+, 12\], but .*config.json makes it \[")


def test_more_layers_than_tensors(tmp_path):
    hf = write(tmp_path / "hf", CONFIG | {"num_hidden_layers": 4}, tensors_of(CONFIG))
    refused(hf, tmp_path, "hf lacks 18 tensors of the model: model.layers.3.input_layernorm.weight")


def test_one_expert_in_another_dtype(tmp_path):
    tensors = tensors_of(CONFIG)
    tensors[EXPERT] = tensors[EXPERT].bfloat16()
    refused(write(tmp_path / "hf", CONFIG, tensors), tmp_path, rf"{EXPERT} is torch.bfloat16, but model\S+, stored with it, is")


def test_expert_stored_twice(tmp_path):
    tensors = fuse(tensors_of(CONFIG)) | {EXPERT: tensors_of(CONFIG)[EXPERT]}
    refused(write(tmp_path / "hf", CONFIG, tensors), tmp_path, f"stores {EXPERT} twice")


def test_quantised_checkpoint(tmp_path):
    tensors = tensors_of(CONFIG)
    tensors[EXPERT] = tensors[EXPERT].to(torch.float8_e4m3fn)
    refused(
        write(tmp_path / "hf", CONFIG, tensors), tmp_path, f"{EXPERT} is stored as F8_E4M3: quantised checkpoints are refused"
    )


def test_tied_head_that_differs(tmp_path):
    config = CONFIGS["llama_tied"]
    tensors = tensors_of(config)
    same = write(tmp_path / "same", config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    hf_to_megatron(same, tmp_path / "fine", ImportOptions(fsync=False))
    different = write(tmp_path / "hf", config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1.0})
    refused(different, tmp_path, "model.safetensors: tie_word_embeddings is true, but lm_head.weight is not")


def unreadable(megatron, tmp_path, match):
    with pytest.raises(ValueError, match=match):
        megatron_to_hf(megatron, tmp_path / "back", ExportOptions(fsync=False))
    assert not (tmp_path / "back").exists()


def test_truncated_megatron_file(megatron, tmp_path):
    path = megatron / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    unreadable(megatron, tmp_path, r"__2_0.distcp is truncated: decoder.layers\S+ ends at byte")
    path.unlink()
    unreadable(megatron, tmp_path, r"__2_0.distcp is missing; it holds decoder.layers")


def test_megatron_files_without_marker_or_metadata(megatron, tmp_path):
    (megatron / ".metadata").write_bytes(b"")
    unreadable(megatron, tmp_path, r"\.metadata cannot be read")
    (megatron / ".metadata").unlink()
    unreadable(megatron, tmp_path, r"\.metadata is missing")
    (megatron / MARKER).unlink()
    assert not is_distributed_checkpoint(megatron)
    unreadable(megatron, tmp_path, f"not a complete Megatron checkpoint: it has no {MARKER}")


def overwrite(path, old, new):
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def test_nan_and_flipped_bits_in_a_megatron_file(hf, megatron, tmp_path):
    row = tensors_of(CONFIG)[EXPERT][3]
    changed, broken = row.clone(), row.clone()
    changed[2] += 1
    broken[2] = torch.nan
    path = megatron / "__2_0.distcp"
    overwrite(path, row.numpy().tobytes(), changed.numpy().tobytes())
    assert list(wrong_digests(megatron)) == [f"{path}: decoder.layers.mlp.experts.experts.linear_fc1.weight at [1, 2, 6, 0]"]
    assert compare_tensors(megatron, hf).different == (EXPERT,)
    written = r"__2_0.distcp: decoder\S+experts.linear_fc1.weight at \[1, 2, 6, 0\] is not what was written: its digest is \w+, "
    unreadable(megatron, tmp_path, written + OWN_FILE)
    with pytest.raises(ValueError, match=written + OWN_FILE):
        reshard(megatron, tmp_path / "cut", ImportOptions(tp=2, fsync=False), shard_bytes=1)
    assert not (tmp_path / "cut").exists()
    overwrite(path, changed.numpy().tobytes(), broken.numpy().tobytes())
    (megatron / OWN_FILE).unlink()
    unreadable(megatron, tmp_path, r"experts.linear_fc1.weight holds NaN or infinity at \[1, 2, 6, 0\]")


def flipped(archive: bytes) -> bytes:
    """With one bit of the pickled object changed: the empty dictionary and the end of the stream."""
    at = archive.index(b"}q\x00.")
    return archive[:at] + bytes([archive[at] ^ 1]) + archive[at + 1 :]


def test_megatron_files_that_hold_no_weights(megatron, tmp_path):
    for name, holds in ((COMMON, "Megatron loads"), (OBJECTS_FILE, r"is truncated: \S+_extra_state")):
        kept = (megatron / name).read_bytes()
        (megatron / name).write_bytes(b"")
        unreadable(megatron, tmp_path, rf"{name} .*{holds}")
        (megatron / name).unlink()
        unreadable(megatron, tmp_path, rf"{name} is missing")
        with pytest.raises(ValueError, match=f"{name} is missing"):
            reshard(megatron, tmp_path / "cut", ImportOptions(fsync=False), shard_bytes=1)
        (megatron / name).write_bytes(kept)
    whole = (megatron / COMMON).read_bytes()
    for broken, wrong in (
        (b"junk" * 100, "is no file of torch.save"),
        (whole[:-40], "is no file of"),
        (flipped(whole), "is damaged"),
    ):
        (megatron / COMMON).write_bytes(broken)
        unreadable(megatron, tmp_path, rf"{COMMON} {wrong}")
    (megatron / COMMON).write_bytes(whole)
    (megatron / ".metadata").write_bytes(b"Vtext\n.")  # a pickled string
    unreadable(megatron, tmp_path, r"\.metadata cannot be read")


@pytest.mark.parametrize("text", ["", "[1, 2]", "null", "{}", '{"digests": []}', '{"digests": {"a": 1}}', "[" * 100_000])
def test_digests_that_are_none(hf, megatron, tmp_path, text):
    (megatron / OWN_FILE).write_text(text, encoding="utf-8")
    unreadable(megatron, tmp_path, rf"^\S+{OWN_FILE}\S* .*digests")
    with pytest.raises(ValueError, match=rf"^\S+{OWN_FILE}\S* .*digests"):
        list(wrong_digests(megatron))


def test_a_key_without_a_digest(megatron):
    path = megatron / OWN_FILE
    known = json.loads(path.read_text(encoding="utf-8"))
    del known["digests"]["decoder.final_layernorm.weight"]
    path.write_text(json.dumps(known), encoding="utf-8")
    (wrong,) = wrong_digests(megatron)
    assert "decoder.final_layernorm.weight at [0]" in wrong


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_reshard_of_a_damaged_folder(tmp_path, value):
    tensors = tensors_of(CONFIG)
    tensors[EXPERT][3, 5] = value
    hf = write(tmp_path / "hf", CONFIG, tensors, shards=3)
    with pytest.raises(ValueError, match=rf"{shard_of(hf, EXPERT).name}: {EXPERT} holds NaN or infinity"):
        reshard(hf, tmp_path / "out", ImportOptions(fsync=False), shard_bytes=2000)
    save_file({}, tmp_path / "empty.safetensors")
    (tmp_path / "none").mkdir()
    (tmp_path / "empty.safetensors").rename(tmp_path / "none" / "model.safetensors")
    with pytest.raises(ValueError, match=r"none/model\.safetensors holds no tensor"):
        reshard(tmp_path / "none", tmp_path / "out", ImportOptions(fsync=False), shard_bytes=2000)
    assert not (tmp_path / "out").exists()


def test_broken_frame_in_a_megatron_file(megatron, tmp_path):
    path = megatron / "__2_0.distcp"
    path.write_bytes(bytes(len(path.read_bytes())))
    unreadable(megatron, tmp_path, r"decoder.layers\S+: \S+__2_0.distcp: bytes \d+ to \d+ are not a tensor")


def test_megatron_checkpoint_of_another_configuration(megatron, tmp_path):
    path = megatron / COMPANIONS / "config.json"
    path.write_text(json.dumps(CONFIG | {"moe_intermediate_size": 8}), encoding="utf-8")
    unreadable(megatron, tmp_path, r"experts.linear_fc1.weight is \[3, 3, 12, 12\], but the configuration says \[3, 3, 16, 12\]")
    path.write_text(json.dumps(CONFIGS["qwen2"]), encoding="utf-8")
    unreadable(megatron, tmp_path, r"megatron lacks \d+ tensors of the model: decoder.layers")
    shutil.rmtree(megatron / COMPANIONS)
    unreadable(megatron, tmp_path, "needs a reference folder with its config.json")


def test_the_undamaged_one_is_read(megatron, tmp_path):
    """The tests above change one thing in what is fine otherwise."""
    megatron_to_hf(megatron, tmp_path / "back", ExportOptions(fsync=False))
    assert read_spec(tmp_path / "back") == read_spec(tmp_path / "hf")
    assert not list(wrong_digests(megatron))
