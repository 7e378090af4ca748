"""What a Hugging Face folder must not be: half an MTP block, NaN beside the decoder, quantised, not downloaded whole."""

import json

import pytest
import torch
from made_checkpoints import CONFIGS, mtp_tensors, tensors_of, write
from safetensors.torch import load_file, save_file

from models.checkpoint_reader import OWN_FILE
from models.convert_average import AverageOptions, average
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import CARRIED_FILE, COMPANIONS, LAYOUT_FILE, ImportOptions

QUICK = ImportOptions(fsync=False)
CONFIG = CONFIGS["qwen3_5_vision"]
VISION = "model.visual.blocks.0.attn.weight"


def refused(tmp_path, hf, match, options=QUICK):
    with pytest.raises(ValueError, match=match) as caught:
        hf_to_megatron(hf, tmp_path / "megatron", options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "megatron").exists()


def folder(tmp_path, config=CONFIG, **changes):
    """With a vision tensor and an MTP block; changes: further or other tensors, None to leave one out."""
    tensors = tensors_of(CONFIG) | mtp_tensors(CONFIG) | {VISION: torch.ones(2, 3)} | changes
    return write(tmp_path / "hf", config, {name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize("part", ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"])
def test_half_of_what_is_around_an_mtp_layer(tmp_path, part):
    refused(tmp_path, folder(tmp_path, **{f"mtp.{part}.weight": None}), rf"the MTP block lacks mtp\.{part}\.weight; drop it")


def test_mtp_layers_that_the_configuration_denies(tmp_path):
    text = CONFIG["text_config"] | {"mtp_num_hidden_layers": 0}
    hf = folder(tmp_path, CONFIG | {"text_config": text})
    refused(tmp_path, hf, r"config\.json says mtp_num_hidden_layers = 0, but MTP tensors are stored: mtp\.fc\.weight.*mtp=drop")
    hf_to_megatron(hf, tmp_path / "dropped", ImportOptions(mtp="drop", fsync=False))
    assert (tmp_path / "dropped").is_dir()


@pytest.mark.parametrize("name", [VISION, "mtp.norm.weight"])
def test_nan_in_a_tensor_that_is_only_carried(tmp_path, name):
    shape = (2, 3) if name == VISION else (12,)
    refused(tmp_path, folder(tmp_path, **{name: torch.full(shape, torch.nan)}), rf"safetensors: {name} holds NaN or infinity")


def test_a_quantised_tensor_that_is_only_carried(tmp_path):
    hf = folder(tmp_path, **{VISION: torch.ones(2, 3).to(torch.float8_e4m3fn)})
    refused(tmp_path, hf, rf"safetensors: {VISION} is float8_e4m3fn: quantised checkpoints are not supported")


def test_a_configuration_that_says_quantised(tmp_path):
    hf = folder(tmp_path, CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    refused(tmp_path, hf, r"config\.json: quantization_config = .*fp8.*not supported")


def test_files_beside_the_weights(tmp_path):
    hf = folder(tmp_path)
    (hf / "tokenizer.json").write_text("", encoding="utf-8")
    refused(tmp_path, hf, r"tokenizer\.json is no JSON")
    (hf / "tokenizer.json").unlink()
    (hf / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    refused(tmp_path, hf, r"tokenizer\.json is a link to \S+nowhere, which does not exist")


def test_a_tied_head_of_another_dtype(tmp_path):
    config = CONFIGS["llama_tied"]
    tensors = tensors_of(config, torch.bfloat16)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].float()}
    refused(
        tmp_path, write(tmp_path / "hf", config, tensors | head), r"lm_head\.weight is torch\.float32 and model\.embed_tokens"
    )


def test_averages_of_two_chat_templates(tmp_path):
    sources = [write(tmp_path / name, CONFIGS["qwen3"], tensors_of(CONFIGS["qwen3"])) for name in "ab"]
    for source in sources:
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": source.name}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"b/tokenizer_config\.json: its chat_template is not that of \S+a: their prompts"):
        average(sources, tmp_path / "mean", AverageOptions())


def test_nan_beside_the_decoder_is_refused_on_the_way_back_too(tmp_path):
    """In a reference folder, and in the checkpoint's own copy where it has no digests; before a layer is written."""
    hf = folder(tmp_path)
    hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    broken = tensors_of(CONFIG) | mtp_tensors(CONFIG) | {VISION: torch.full((2, 3), torch.inf)}
    other = write(tmp_path / "other", CONFIG, broken)
    with pytest.raises(ValueError, match=rf"other/model\.safetensors: {VISION} holds NaN or infinity"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ExportOptions(reference=other, fsync=False))
    carried = tmp_path / "megatron" / COMPANIONS / CARRIED_FILE
    save_file(load_file(carried) | {VISION: torch.full((2, 3), torch.nan)}, carried)
    (tmp_path / "megatron" / OWN_FILE).unlink()
    layout = tmp_path / "megatron" / COMPANIONS / LAYOUT_FILE
    layout.write_text(json.dumps({**json.loads(layout.read_text(encoding="utf-8")), "carried": {}}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{CARRIED_FILE}: {VISION} holds NaN or infinity"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ExportOptions(fsync=False))
    assert not (tmp_path / "back").exists()


def test_what_lies_beside_the_decoder_is_looked_at_first(tmp_path):
    """A conversion that cannot end well writes no layer before it says so."""
    hf = folder(tmp_path, **{VISION: torch.full((2, 3), torch.nan)})
    with pytest.raises(ValueError, match="holds NaN"):
        hf_to_megatron(hf, tmp_path / "megatron", QUICK)
    assert not list(tmp_path.rglob("*.distcp"))
