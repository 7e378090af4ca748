"""A small random model as a Hugging Face folder, made from transformers' own classes: nothing downstream knows it is small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from mcore_rl.config.schema import BuildConfig
from mcore_rl.data.tokenizer import build_tokenizer, stop_token_ids

OWN_INIT = "conv1d"
READ_BUT_NOT_DECLARED = {"head_dim"}  # by Qwen3MoeConfig of transformers 5


def build_tiny(path: str | Path, build: BuildConfig, seed: int) -> Path:
    """Write config, fp32 safetensors (per-expert names), tokenizer and generation config; the same bytes for the same seed.

    Every matrix is normal(0, init_std), the router included (transformers starts it at zero); norms, biases and short
    convolutions keep the architecture's own initial values. Returns the folder.
    ValueError on an unknown architecture or key, or a vocabulary smaller than the tokenizer's.
    """
    folder = Path(path)
    tokenizer = build_tokenizer(build.tokenizer)
    config = hf_config(build, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"transformers made {type(model).__name__} of {build.architecture}")
    _initialise(model, build.init_std, seed)
    model.generation_config = GenerationConfig(eos_token_id=list(stop_token_ids(tokenizer)), pad_token_id=tokenizer.pad_token_id)
    with _quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def hf_config(build: BuildConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """The architecture's own config class filled from build.hf_config; stop and pad ids come from the tokenizer."""
    config_class = _config_class(build.architecture)
    known = config_class().to_dict().keys() | (config_class.attribute_map or {}).keys() | READ_BUT_NOT_DECLARED
    if unknown := sorted(set(build.hf_config) - known):
        raise ValueError(f"model.build.hf_config.{unknown[0]}: {config_class.__name__} has no such key")
    own = {"initializer_range": build.init_std, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = config_class(**{**_plain(build.hf_config), **own})
    config.architectures = [build.architecture]
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"model.build.hf_config.vocab_size={config.vocab_size}: the tokenizer has {len(tokenizer)} tokens")
    return config


def _config_class(architecture: str) -> type[PreTrainedConfig]:
    """transformers' config class for a causal language model class name."""
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name == architecture:
            return CONFIG_MAPPING[model_type]
    raise ValueError(f"model.build.architecture: transformers has no causal language model '{architecture}'")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of transformers inside."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping as builtin dicts, all the way down (configurations hand in their own mapping types)."""
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _initialise(model: PreTrainedModel, std: float, seed: int) -> None:
    """Fill every matrix from one seeded generator, in parameter order; a tied head is one parameter and filled once."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and OWN_INIT not in name:
            torch.nn.init.normal_(parameter, mean=0.0, std=std, generator=generator)
