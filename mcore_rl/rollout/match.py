"""Does an engine run the model that is trained? Compared fact by fact before its first sync, shown as a table.

A sync proves numbers; this proves what is made of them: how many experts, which of them a token goes to, in which
precision, with which tokenizer. Nothing here needs vLLM or Megatron.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.schema import RolloutConfig
from models.spec import ModelSpec

ABSENT = "absent"
NO_DRAFT = "none"
_SAME, _FITS, _WRONG = "same", "fits", "MISMATCH"


@dataclass(frozen=True)
class Fact:
    """One line of the table. verdict: same, fits (differs as configured), or MISMATCH."""

    name: str
    trainer: str
    engine: str
    verdict: str


def trainer_facts(spec: ModelSpec, model_path: Path, rollout: RolloutConfig) -> dict[str, Any]:
    """What an engine must run. Router and precision are what the trainer declares for its engines (rollout.dtype).

    No draft model: a sync sends the decoder alone, and a draft that stays as it was would be rejected ever more often.
    """
    facts: dict[str, Any] = {
        "architecture": spec.architecture,
        "layers": spec.num_layers,
        "vocabulary": spec.vocab_size,
        "precision": rollout.dtype.value,
        "max_length": rollout.max_model_len,
        "logprobs": "raw_logprobs",
        "draft": NO_DRAFT,
        **text_facts(model_path),
    }
    if spec.moe is not None:
        facts |= {
            "moe_layers": sum(spec.has_experts(layer) for layer in range(spec.num_layers)),
            "experts": spec.moe.num_experts,
            "top_k": spec.moe.top_k,
            "norm_topk_prob": spec.moe.norm_topk_prob,
            "scoring": "softmax",
            "router_dtype": rollout.dtype.value,
        }
    return facts


def text_facts(folder: Path) -> dict[str, str]:
    """sha256 (first 16 digits) of the tokenizer and of the chat template in a model folder; `absent` where there is none."""
    tokenizer, jinja, settings = folder / "tokenizer.json", folder / "chat_template.jinja", folder / "tokenizer_config.json"
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else None
    if template is None and settings.is_file():
        template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    return {
        "tokenizer": _sha(tokenizer.read_bytes()) if tokenizer.is_file() else ABSENT,
        "chat_template": ABSENT if template is None else _sha(str(template).encode()),
    }


def compare_facts(trainer: Mapping[str, Any], engine: Mapping[str, Any]) -> list[Fact]:
    """Every fact of both sides, the trainer's first; an engine's folder that can be read here gives its tokenizer."""
    folder = Path(str(engine.get("model_folder", "")))
    theirs = {**engine, **(text_facts(folder) if folder.is_dir() else {})}
    names = [*trainer, *(name for name in theirs if name not in trainer)]
    return [_fact(name, trainer.get(name), theirs.get(name)) for name in names]


def check_facts(name: str, facts: list[Fact]) -> None:
    """ValueError naming the engine and every fact that does not match."""
    wrong = [fact for fact in facts if fact.verdict == _WRONG]
    if wrong:
        said = "; ".join(f"{fact.name} is {fact.engine} in the engine and {fact.trainer} in the trainer" for fact in wrong)
        raise ValueError(f"rollout engine {name} runs another model: {said}")


def table(name: str, facts: list[Fact]) -> str:
    """The comparison as lines of text."""
    rows = [("fact", "trainer", "engine", ""), *((f.name, f.trainer, f.engine, f.verdict) for f in facts)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows]
    return "\n".join([f"engine {name}", *lines])


def _fact(name: str, trainer: Any, engine: Any) -> Fact:
    return Fact(name, _shown(trainer), _shown(engine), _verdict(name, trainer, engine))


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _verdict(name: str, trainer: Any, engine: Any) -> str:
    if trainer == engine:
        return _SAME
    if trainer is None:  # the engine's own affair: where it keeps its experts, and its files
        return _FITS
    if name == "max_length":
        return _FITS if engine is not None and engine >= trainer else _WRONG
    if name in ("tokenizer", "chat_template") and (engine is None or ABSENT in (trainer, engine)):
        return _FITS  # it gets token ids; a folder without these files is no other model
    if name == "router_dtype" and engine in (None, "float32"):
        return _FITS  # finer than declared, or no layer of its own that could tell
    return _WRONG


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
