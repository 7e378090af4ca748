"""Single settings of a Hugging Face `config.json`: numbers, the rotary embedding, which layer is of which kind."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from models.spec import Llama3Scaling, Rope

MAX_SIZE = 1_000_000_000
LIMITS = {
    "num_hidden_layers": 2_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "hidden_size": 10_000_000,
    "vocab_size": 100_000_000,
}
"""The largest size that is read, far above any published model; MAX_SIZE for every other integer.

Layers and experts are counted out, one rule for each parameter, before anything can be compared with the checkpoint.
"""
MAX_EXPERTS_IN_ALL = 250_000
DEFAULT_THETA = 10000.0
FULL_ATTENTION_INTERVAL = 4


def integer(config: Mapping[str, Any], key: str) -> int:
    """A positive integer, at most the key's limit; ValueError naming the key otherwise."""
    value, most = config.get(key), LIMITS.get(key, MAX_SIZE)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r} is not a positive integer")
    if value > most:
        raise ValueError(f"{key} = {value} is more than any model has; at most {most:,} is read")
    return value


def integer_or(config: Mapping[str, Any], key: str, default: int) -> int:
    """As integer; the default where the key is missing, null or 0."""
    return count(config, key) or default


def count(config: Mapping[str, Any], key: str) -> int:
    """As integer, or 0; 0 where the key is missing or null as well."""
    value = config.get(key)
    return 0 if value is None or (type(value) is int and value == 0) else integer(config, key)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false; the default where the key is missing. ValueError for null, which transformers refuses as well."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r} is not true or false")
    return value


def check_experts_in_all(num_layers: int, num_experts: int) -> None:
    """ValueError when the experts of all layers together are more than any model has."""
    if num_layers * num_experts > MAX_EXPERTS_IN_ALL:
        raise ValueError(
            f"num_hidden_layers = {num_layers} of {num_experts} experts make {num_layers * num_experts:,} experts, more than any "
            f"model has; at most {MAX_EXPERTS_IN_ALL:,} are read"
        )


def number(config: Mapping[str, Any], key: str) -> float:
    """A positive number; ValueError naming the key otherwise."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{key} = {value!r} is not a positive number")
    return float(value)


def fraction(config: Mapping[str, Any], key: str) -> float:
    """A number above 0 and at most 1; ValueError naming the key otherwise."""
    value = number(config, key)
    if value > 1:
        raise ValueError(f"{key} = {value} is too large; at most 1")
    return value


def rope(config: Mapping[str, Any], head_dim: int, default_fraction: float) -> Rope:
    """rope_parameters (transformers 5) or rope_theta + rope_scaling (transformers 4).

    default_fraction: of each head that turns, where `partial_rotary_factor` is missing; it must be 1 in a family whose
    default is 1. The sections of Qwen3.5's three position grids need no reading: for text the three positions are one.
    """
    parameters = _rope_settings(config)
    given = [source for source in (parameters, config) if source.get("rope_theta") is not None]
    theta = number(given[0], "rope_theta") if given else DEFAULT_THETA
    turned = _turned(parameters, config, head_dim, default_fraction)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta, fraction=turned)
    if kind != "llama3":
        raise ValueError(f"rope_type = {kind!r} is not supported; known: default, llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in parameters]
    if missing:
        raise ValueError(f"rope_type = 'llama3' needs {', '.join(missing)}")
    factor, low, high = (number(parameters, key) for key in keys[:3])
    return Rope(theta, Llama3Scaling(factor, low, high, integer(parameters, keys[3])), turned)


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the one key that is given. When both are, transformers reads rope_scaling alone: they must say the same."""
    found: list[Mapping[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{key} = {value!r} is not an object with settings of the rotary embedding")
        found.append(value or {})
    new, old = found
    if new and old:
        beside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        one, other = (beside | _in_new_spelling(settings) for settings in found)
        if one != other:
            raise ValueError(f"rope_parameters = {dict(new)} and rope_scaling = {dict(old)} differ: give only one of them")
    return new or old


def _in_new_spelling(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": settings.get("type", "default"), **{key: value for key, value in settings.items() if key != "type"}}


def _turned(parameters: Mapping[str, Any], config: Mapping[str, Any], head_dim: int, default: float) -> float:
    key = "partial_rotary_factor"
    given = [source for source in (parameters, config) if source.get(key) is not None]
    part = fraction(given[0], key) if given else default
    rotated = int(head_dim * part)
    if default == 1.0 and part != 1.0:
        raise ValueError(f"{key} = {part} is not supported for this architecture; supported: 1.0")
    if rotated < 2 or rotated % 2:
        raise ValueError(f"{key} = {part} turns {rotated} of head_dim = {head_dim}: an even number of at least 2 is needed")
    return part


def linear_layers(config: Mapping[str, Any], num_layers: int, *, hybrid: bool) -> tuple[int, ...]:
    """0-based numbers of the linear-attention layers: layer_types, or all but every full_attention_interval-th."""
    known = ("full_attention", "linear_attention") if hybrid else ("full_attention",)
    kinds = config.get("layer_types")
    if kinds is None:
        interval = integer({"full_attention_interval": FULL_ATTENTION_INTERVAL, **config}, "full_attention_interval")
        kinds = [known[-1] if (layer + 1) % interval else known[0] for layer in range(num_layers)]
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"layer_types = {kinds!r} is not a list with the kind of every layer; kinds: {', '.join(known)}")
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise ValueError(f"layer_types holds {unknown[0]!r}, which is not supported; supported: {', '.join(known)}")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers = {num_layers}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def layers_without_experts(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """0-based numbers of a mixture-of-experts model's dense layers: mlp_only_layers and decoder_sparse_step.

    ValueError when no layer at all has experts.
    """
    only = config.get("mlp_only_layers")
    only = [] if only is None else only
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise ValueError(f"mlp_only_layers = {only!r} is not a list of layer numbers")
    step = integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    beyond = [layer for layer in only if not 0 <= layer < num_layers]
    if beyond:
        raise ValueError(f"mlp_only_layers = {only} names layer {beyond[0]}, but num_hidden_layers = {num_layers}")
    dense = tuple(layer for layer in range(num_layers) if layer in only or (layer + 1) % step)
    if len(dense) == num_layers:
        raise ValueError(f"mlp_only_layers = {only} and decoder_sparse_step = {step} leave none of {num_layers} layers experts")
    return dense
