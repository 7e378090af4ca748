"""Tensors that travel with a model without being a part of the decoder: vision towers, multi-token prediction, buffers.

They are copied bit by bit. Multi-token prediction (MTP) is kept whole or dropped with the configuration told so, never half.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config_keys import count
from models.hf_io import CheckpointReader, some
from models.registry import carried_names, load_config, weight_map
from models.spec import ModelSpec

MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
MTP_PARTS = ("fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_MTP = re.compile(r"(?:^|\.)mtp\.")
_MTP_LAYER = re.compile(r"^(?:.*\.)?mtp\.layers\.(\d+)\.(.*)$")
_LAYER = re.compile(r"^(.*\.layers\.\d+)\.(.*)$")
_BUFFER = "rotary_emb.inv_freq"
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Carried:
    """names: stored names to copy; dropped: stored names to leave out; config: config.json's text when it changes."""

    names: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    config: str | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    return load_config(folder / "config.json")


def is_mtp(name: str) -> bool:
    """True for a tensor of a multi-token prediction block."""
    return _MTP.search(name) is not None


def promised_mtp_layers(config: dict[str, Any]) -> int:
    """How many MTP layers the configuration speaks of; 0 when it is silent. ValueError naming a key that is no count."""
    return max((count(part, key) for part in _parts(config) for key in MTP_KEYS), default=0)


def _denied(config: dict[str, Any]) -> str | None:
    """The key that says outright that there is no MTP layer; published configurations are often silent about theirs."""
    given = [key for part in _parts(config) for key in MTP_KEYS if part.get(key) is not None]
    return given[0] if given and not promised_mtp_layers(config) else None


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def without_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the same model without MTP layers."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    told = [(part, key) for part in _parts(changed) for key in MTP_KEYS if key in part]
    for part, key in told or [(changed, MTP_KEYS[1])]:
        part[key] = 0
    return changed


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration of the same model stored in `dtype` (as torch spells it); the same object when it says so already."""
    told = [(part, key) for part in _parts(config) for key in ("dtype", "torch_dtype") if part.get(key) not in (None, dtype)]
    if not told:
        return config
    changed: dict[str, Any] = json.loads(json.dumps(config))
    for part in _parts(changed):
        part.update({key: dtype for key in ("dtype", "torch_dtype") if part.get(key) is not None})
    return changed


def carried_tensors(reader: CheckpointReader, spec: ModelSpec, mtp: str) -> Carried:
    """What to copy beside the decoder, for mtp = keep or drop. ValueError naming a tensor of a half MTP block."""
    if mtp not in ("keep", "drop"):
        raise ValueError(f"mtp = {mtp!r} is unknown; known: keep, drop")
    stored = reader.stored_names()
    others = carried_names(spec.architecture, stored) | {name for name in stored if name.endswith(_BUFFER)}
    blocks = {name for name in others if is_mtp(name)}
    config = read_config(reader.folder)
    if mtp == "drop":
        promised = promised_mtp_layers(config)
        text = json.dumps(without_mtp(config), indent=2) + "\n" if blocks or promised else None
        return Carried(tuple(sorted(others - blocks)), tuple(sorted(blocks)), text)
    _check_whole(reader, spec, config, blocks)
    return Carried(tuple(sorted(others)))


def _check_whole(reader: CheckpointReader, spec: ModelSpec, config: dict[str, Any], blocks: set[str]) -> None:
    promised = promised_mtp_layers(config)
    where = reader.folder / "config.json"
    names = {name for name in reader.names() if is_mtp(name)}
    layers: dict[str, set[str]] = {}
    for name in names:
        match = _MTP_LAYER.match(name)
        if match is not None:
            layers.setdefault(match[1], set()).add(match[2])
    denied = _denied(config)
    if blocks and denied:
        raise ValueError(f"{where} says {denied} = 0, but MTP tensors are stored: {some(blocks)}; drop them (mtp=drop)")
    if promised and not blocks:
        raise ValueError(f"{where} promises {promised} MTP layers, but there is no mtp tensor: drop them (mtp=drop)")
    if promised and len(layers) != promised:
        raise ValueError(f"{where} promises {promised} MTP layers, but {len(layers)} are stored: {some(blocks)}")
    around = {name for name in names if _MTP_LAYER.match(name) is None}
    lost = [part for part in MTP_PARTS if not any(name.endswith(f"mtp.{part}") for name in around)] if names else []
    if lost:
        raise ValueError(f"{reader.folder}: the MTP block lacks {some(f'mtp.{part}' for part in lost)}; drop it (mtp=drop)")
    kinds = _layer_kinds(spec)
    for number, suffixes in layers.items():
        nearest = min(kinds, key=lambda kind: len(kind ^ suffixes))
        missing = nearest - suffixes
        if missing:
            raise ValueError(f"{reader.folder}: MTP layer {number} lacks {some(missing)}")


def _layer_kinds(spec: ModelSpec) -> set[frozenset[str]]:
    """The sets of names that decoder layers of this model have; an MTP layer is one of them."""
    kinds: dict[str, set[str]] = {}
    for rule in weight_map(spec):
        for tensor in rule.tensors:
            match = _LAYER.match(tensor.name)
            if match is not None:
                kinds.setdefault(match[1], set()).add(match[2])
    return {frozenset(kind) for kind in kinds.values()}


def decoder_names(reader: CheckpointReader, spec: ModelSpec, carried: Carried) -> frozenset[str]:
    """The checkpoint's decoder tensors, experts one by one. A tied head that is stored as well must equal the embedding."""
    apart = set(carried.names) | set(carried.dropped)
    names = frozenset(name for name in reader.names() if not _belongs(reader, name, apart))
    if not (spec.tied_embeddings and TIED_HEAD in names):
        return names
    embedding = f"{spec.text_prefix}embed_tokens.weight"
    if reader.dtype(TIED_HEAD) is not reader.dtype(embedding):
        kinds = f"{TIED_HEAD} is {reader.dtype(TIED_HEAD)} and {embedding} is {reader.dtype(embedding)}"
        raise ValueError(f"{reader.path_of(TIED_HEAD)}: tie_word_embeddings is true, but {kinds}; leave {TIED_HEAD} out")
    if not reader.read(TIED_HEAD).equal(reader.read(embedding)):
        raise ValueError(f"{reader.path_of(TIED_HEAD)}: tie_word_embeddings is true, but {TIED_HEAD} is not {embedding}")
    return names - {TIED_HEAD}


def _belongs(reader: CheckpointReader, name: str, stored: Iterable[str]) -> bool:
    return (reader.entry(name).name if reader.is_fused(name) else name) in stored
