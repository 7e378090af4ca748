"""Hugging Face `config.json` -> `ModelSpec`, in the spellings of transformers 4 and 5. Needs no transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.families import FAMILIES, Family, templates
from models.hf_io import INDEX, SINGLE, CheckpointReader
from models.spec import Llama3Scaling, ModelSpec, MoeSpec, Rope
from models.weight_map import Rule, expand

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_THETA = 10000.0


def known_architectures() -> tuple[str, ...]:
    """Names that `config.json` may give under `architectures`."""
    return tuple(sorted(FAMILIES))


def weight_map(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the whole model with its Hugging Face tensors."""
    return expand(templates(spec), spec)


def read_spec(folder: Path) -> ModelSpec:
    """Spec of the Hugging Face checkpoint in `folder` (a folder without weights will do).

    ValueError naming the file when it cannot be read or describes something that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Hugging Face checkpoint folder has a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    try:
        spec = spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return _with_stored_dtypes(spec, folder) if (folder / INDEX).is_file() or (folder / SINGLE).is_file() else spec


def _with_stored_dtypes(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The dtypes are those of the tensors: `dtype` in the config is what a model is made in, not what was saved."""
    reader = CheckpointReader(folder)
    stored = {name: reader.dtype(name) for name in sorted(reader.names())}
    common = Counter(stored.values()).most_common(1)[0][0]
    return replace(spec, dtype=common, other_dtypes=tuple((n, d) for n, d in stored.items() if d is not common))


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Spec of the model that a `config.json` describes; ValueError naming the key for anything that is not supported."""
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse(config, architecture, family)
    hidden_size, num_heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    return ModelSpec(
        architecture=architecture,
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=_integer(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or family.default_head_dim or hidden_size // num_heads,
        vocab_size=_integer(config, "vocab_size"),
        max_positions=_integer(config, "max_position_embeddings"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        moe=_moe(config) if family.moe else None,
        dtype=_dtype(config),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    known = [name for name in names if name in FAMILIES]
    if len(names) != 1 or not known:
        raise ValueError(f"architectures = {names} is not supported; known: {', '.join(known_architectures())}")
    return known[0]


def _refuse(config: Mapping[str, Any], architecture: str, family: Family) -> None:
    for key, allowed in {"hidden_act": ("silu",), **family.refused}.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"{key} = {config[key]!r} is not supported for {architecture}; supported: {allowed[0]!r}")


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r} is not a positive integer")
    return value


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype = {name!r} is not supported; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _moe(config: Mapping[str, Any]) -> MoeSpec:
    experts = _integer(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    top_k = _integer(config, "num_experts_per_tok")
    renormalised = bool(config.get("norm_topk_prob", False))
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok = {top_k} is more than the {experts} experts")
    return MoeSpec(experts, top_k, _integer(config, "moe_intermediate_size"), renormalised)


def _rope(config: Mapping[str, Any]) -> Rope:
    """rope_parameters (transformers 5) or rope_theta + rope_scaling (transformers 4)."""
    parameters: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise ValueError(f"rope_type = {kind!r} is not supported; known: default, llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in parameters]
    if missing:
        raise ValueError(f"rope_type = 'llama3' needs {', '.join(missing)}")
    factor, low, high, positions = (parameters[key] for key in keys)
    return Rope(theta, Llama3Scaling(float(factor), float(low), float(high), int(positions)))
