"""The decoder of a wrapper model (vision tower and all) as a checkpoint of its own, its MTP layers included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from models.convert_carried import is_mtp
from models.families import FAMILIES
from models.hf_write import FilePlan, Slot, plan_shards
from models.spec import ModelSpec

_PREFIX = "model."


def _own_name(spec: ModelSpec) -> tuple[str, str]:
    """Architecture and model type of the decoder alone. ValueError for a model that is nothing but a decoder."""
    found = FAMILIES[spec.architecture].text_only
    if found is None:
        raise ValueError(f"{spec.architecture} is a decoder already; there is nothing to leave out")
    return found


def text_only_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The decoder's own config.json."""
    architecture, model_type = _own_name(spec)
    text = dict(config[FAMILIES[spec.architecture].text_config or ""])
    kept = {key: config[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in config}
    return {**text, **kept, "architectures": [architecture], "model_type": model_type}


def text_only_plans(
    plans: Iterable[FilePlan], spec: ModelSpec, decoder_parts: Callable[[Slot], list[str] | None]
) -> tuple[tuple[FilePlan, ...], dict[str, str]]:
    """New shards with the decoder's tensors under their own names, and new name -> name in the wrapper."""
    _own_name(spec)
    renamed: dict[str, str] = {}
    slots: list[Slot] = []
    for slot in (slot for plan in plans for slot in plan.slots):
        if decoder_parts(slot) is None and not is_mtp(slot.name):
            continue
        name = slot.name
        if name.startswith(spec.text_prefix):
            name = _PREFIX + name.removeprefix(spec.text_prefix)
        renamed[name] = slot.name
        slots.append(replace(slot, name=name))
    return plan_shards(slots), renamed
