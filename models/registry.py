"""Hugging Face `config.json` -> `ModelSpec`, in the spellings of transformers 4 and 5. Needs no transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.config_keys import (
    check_experts_in_all,
    flag,
    fraction,
    integer,
    integer_or,
    layers_without_experts,
    linear_layers,
    rope,
)
from models.families import FAMILIES, Family, templates
from models.hf_io import INDEX, SINGLE, CheckpointReader
from models.spec import DeltaNetSpec, ModelSpec, MoeSpec
from models.weight_map import Rule, expand

DEFAULT_NORM_EPS = 1e-6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def known_architectures() -> tuple[str, ...]:
    """Names that `config.json` may give under `architectures`."""
    return tuple(sorted(FAMILIES))


def weight_map(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the whole model with its Hugging Face tensors."""
    return expand(templates(spec), spec)


def carried_names(architecture: str, names: Iterable[str]) -> frozenset[str]:
    """Those of a checkpoint's tensors that are no part of the decoder: see ModelSpec.carried."""
    patterns = [re.compile(pattern) for pattern in FAMILIES[architecture].carried]
    return frozenset(name for name in names if any(pattern.match(name) for pattern in patterns))


def load_config(path: Path) -> dict[str, Any]:
    """What a config.json says. ValueError naming the file when it is not a JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, not a JSON object with a model's settings")
    return config


def read_spec(folder: Path) -> ModelSpec:
    """Spec of the Hugging Face checkpoint in `folder` (a folder without weights will do).

    ValueError naming the file when it cannot be read or describes something that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Hugging Face checkpoint folder has a config.json")
    config = load_config(path)
    try:
        spec = spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return _with_stored(spec, folder) if (folder / INDEX).is_file() or (folder / SINGLE).is_file() else spec


def _with_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The dtypes are those of the tensors: `dtype` in the config is what a model is made in, not what was saved."""
    reader = CheckpointReader(folder)
    carried = carried_names(spec.architecture, reader.stored_names())
    decoder = reader.names() - carried_names(spec.architecture, reader.names())
    _check_layer_kinds(spec, decoder, folder / "config.json")
    stored = {name: reader.dtype(name) for name in sorted(decoder)}
    common = Counter(stored.values()).most_common(1)[0][0]
    others = tuple((n, d) for n, d in stored.items() if d is not common)
    return replace(spec, dtype=common, other_dtypes=others, carried=tuple(sorted(carried)))


def _check_layer_kinds(spec: ModelSpec, names: Iterable[str], path: Path) -> None:
    """Before anything is said about tensors that lack: which key of the configuration asks for them."""
    pattern = re.compile(rf"{re.escape(spec.text_prefix)}layers\.(\d{{1,5}})\.(linear|self)_attn\.")
    stored: dict[int, set[str]] = {}
    for match in filter(None, map(pattern.match, names)):
        stored.setdefault(int(match[1]), set()).add(match[2])
    kinds = {"linear": "linear_attention", "self": "full_attention"}
    for layer, found in sorted(stored.items()):
        said = "linear" if spec.is_linear(layer) else "self"
        if layer < spec.num_layers and said not in found:
            raise ValueError(
                f"{path}: layer_types (full_attention_interval where it is missing) makes layer {layer} {kinds[said]}, "
                f"but the tensors stored for it are those of {kinds[found.pop()]}"
            )


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Spec of the model that a `config.json` describes; ValueError naming the key for anything that is not supported."""
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    text = _text(config, family)
    if config.get("quantization_config"):
        raise ValueError(
            f"quantization_config = {str(config['quantization_config'])[:100]}: quantised checkpoints are not supported"
        )
    _refuse(text, architecture, family)
    num_layers, moe = integer(text, "num_hidden_layers"), _moe(text, family)
    hidden_size, num_heads = integer(text, "hidden_size"), integer(text, "num_attention_heads")
    head_dim = integer_or(text, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if moe:
        check_experts_in_all(num_layers, moe.num_experts)
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=integer(text, "moe_intermediate_size" if moe and "intermediate_size" not in text else "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=integer_or(text, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=integer(text, "vocab_size"),
        max_positions=integer(text, "max_position_embeddings"),
        norm_eps=fraction({"rms_norm_eps": DEFAULT_NORM_EPS, **text}, "rms_norm_eps"),
        rope=rope(text, head_dim, family.rotary_fraction),
        tied_embeddings=flag(config, "tie_word_embeddings", flag(text, "tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        moe=moe,
        dense_layers=layers_without_experts(text, num_layers) if moe else (),
        delta_net=_delta_net(text) if family.delta_net else None,
        linear_layers=linear_layers(text, num_layers, hybrid=bool(family.delta_net)),
        attention_gate=bool(family.delta_net),
        zero_centered_norms=bool(family.delta_net),
        text_prefix=family.text_prefix,
        dtype=_dtype(config, text),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    known = [name for name in names if isinstance(name, str) and name in FAMILIES] if isinstance(names, list) else []
    if not known or len(names) != 1:
        raise ValueError(f"architectures = {names} is not supported; known: {', '.join(known_architectures())}")
    return known[0]


def _text(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The decoder's own settings."""
    if family.text_config is None:
        return config
    text = config.get(family.text_config)
    if not isinstance(text, Mapping):
        raise ValueError(f"{family.text_config} = {text!r} is not the decoder's configuration")
    return text


def _refuse(config: Mapping[str, Any], architecture: str, family: Family) -> None:
    for key, allowed in {"hidden_act": ("silu",), **family.refused}.items():
        if key in config and not any(type(config[key]) is type(value) and config[key] == value for value in allowed):
            raise ValueError(f"{key} = {config[key]!r} is not supported for {architecture}; supported: {allowed[0]!r}")


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> torch.dtype:
    given = [source[key] for source in (config, text) for key in ("dtype", "torch_dtype") if source.get(key) is not None]
    name = given[0] if given else "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype = {name!r} is not supported; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _moe(config: Mapping[str, Any], family: Family) -> MoeSpec | None:
    if not family.moe:
        return None
    experts = integer(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    top_k = integer(config, "num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok = {top_k} is more than the {experts} experts")
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        ffn_size=integer(config, "moe_intermediate_size"),
        norm_topk_prob=flag(config, "norm_topk_prob", family.norm_topk_prob),
        shared_ffn_size=integer(config, "shared_expert_intermediate_size") if family.shared_expert else None,
    )


def _delta_net(config: Mapping[str, Any]) -> DeltaNetSpec:
    return DeltaNetSpec(
        num_k_heads=integer(config, "linear_num_key_heads"),
        num_v_heads=integer(config, "linear_num_value_heads"),
        k_head_dim=integer(config, "linear_key_head_dim"),
        v_head_dim=integer(config, "linear_value_head_dim"),
        conv_width=integer(config, "linear_conv_kernel_dim"),
    )
