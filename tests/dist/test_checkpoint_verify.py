"""`verify`: both forwards, layer by layer, agree for every family, and a changed weight is found in its layer."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, reference, sequences, write_tiny

from models import convert_forward_hf
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import COMPANIONS, ImportOptions
from models.convert_verify import parity_of

FAMILIES = ("qwen3_moe_mixed", "llama_tied", "qwen2", "qwen3_next", "qwen3_5", "qwen3_5_moe_vision")
ROWS = [row.tolist() for row in sequences([13, 13])]
CHILD = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from models.convert_forward import run

rows = json.loads(sys.argv[1])
for name in sys.argv[2:]:
    folder = Path(name)
    seen = run(folder / "megatron", folder / "megatron" / "hugging_face", rows)
    save_file({key: tensor.contiguous() for key, tensor in seen.items()}, folder / "ours.safetensors")
"""


def change(folder, name):
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder per family with the Hugging Face checkpoint, the Megatron one, and Megatron's outputs; one child for all."""
    root = tmp_path_factory.mktemp("verify")
    for family in (*FAMILIES, "changed"):
        (root / family / "hf").mkdir(parents=True)
        write_tiny(root / family / "hf", "qwen3_moe" if family == "changed" else family)
        mtp = "drop" if family.startswith("qwen3_5") else "keep"
        hf_to_megatron(root / family / "hf", root / family / "megatron", ImportOptions(mtp=mtp, fsync=False))
    change(root / "changed" / "hf", "model.layers.2.self_attn.o_proj.weight")
    folders = [str(root / family) for family in (*FAMILIES, "changed")]
    subprocess.run([sys.executable, "-c", CHILD, json.dumps(ROWS), *folders], check=True)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_agree(runs, family):
    theirs = convert_forward_hf.run(runs / family / "hf", ROWS)
    parity = parity_of(load_file(runs / family / "ours.safetensors"), theirs)
    assert parity.ok, parity
    assert parity.first_different_layer() is None
    assert list(parity.layers) == ["layer 0", "layer 1", "layer 2", "logits"]


@pytest.mark.parametrize("family", ["qwen3_moe_mixed", "qwen3_next", "llama_tied"])
def test_layer_by_layer_is_transformers_whole_forward(runs, family):
    layered = convert_forward_hf.run(runs / family / "hf", ROWS)["logits"]
    with torch.no_grad():
        whole = reference(runs / family / "hf")(torch.tensor(ROWS)).logits.flatten(0, 1)
    assert whole.shape == (26, VOCAB)
    torch.testing.assert_close(layered, whole, rtol=1e-5, atol=1e-5)


def test_a_changed_weight_shows_in_its_layer(runs):
    theirs = convert_forward_hf.run(runs / "changed" / "hf", ROWS)
    parity = parity_of(load_file(runs / "changed" / "ours.safetensors"), theirs)
    assert not parity.ok
    assert parity.first_different_layer() == "layer 2"


def test_the_companions_are_enough_for_the_way_back(runs, tmp_path):
    folder = runs / "qwen3_5_moe_vision"
    megatron_to_hf(folder / "megatron", tmp_path / "back", ExportOptions(fsync=False))
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "hf" / "model.safetensors").read_bytes()
    assert (folder / "megatron" / COMPANIONS / "carried.safetensors").is_file()
