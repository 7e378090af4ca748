"""What only an assembled run knows about itself: the implementations really used, and digests of what it started from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash
from torch import nn

from mcore_rl.assemble import Parts
from mcore_rl.config.algorithm import INITIAL
from mcore_rl.config.schema import RunConfig
from mcore_rl.data.band_task import BandTask
from mcore_rl.manifest import RunFacts, build_manifest, file_sha256, text_sha256, write_manifest
from mcore_rl.run import Run

_READ_BYTES = 1 << 24
_ROLES = {"norm": "norm", "attention": "core_attention", "experts": "experts", "router": "router"}


def record_manifest(parts: Parts, run: Run, optimizer: str, extra: Mapping[str, object]) -> None:
    """Write manifest.json on rank 0, before the first step, so that a run that fails has its conditions on record too.

    extra: what the stage itself has to say; it replaces entries of that name.
    """
    launch = json.loads(run.folder.launch.read_text(encoding="utf-8")) if run.folder.launch.exists() else {}
    facts = RunFacts(
        tokenizer_sha256=file_sha256(parts.model_path / "tokenizer.json"),
        chat_template_sha256=text_sha256(parts.task.renderer.text("What is 1+1?")),
        model_digest=weights_digest(parts.model_path),
        implementations={"optimizer": optimizer, **implementations(parts.trainer.chunks)},
        reward_version=f"{run.reward_version} {run.extraction}",
        extra={"engine": run.sampler().name, "data": parts.task.facts(), "kl": kl_facts(parts), **extra},
    )
    write_manifest(run.folder, build_manifest(parts.config, facts, launch=launch))


def require_band_of_model(parts: Parts) -> None:
    """ValueError when the band this run trains on was probed with other starting weights than it starts from."""
    config = parts.config.task
    if not isinstance(parts.task, BandTask) or config.band_any_model:
        return
    probed, mine = parts.task.band.conditions.model_digest, weights_digest(parts.model_path)
    if probed != mine:
        raise ValueError(
            f"task.band_file={config.band_file}: its pass rates are of a model with digest {probed}, this run starts from "
            f"{mine}; probe this model, or set task.band_any_model=true"
        )


def distill_facts(config: RunConfig) -> dict[str, object]:
    """What a distillation learns from, in place of an algorithm it does not run."""
    distill = config.distill
    teachers = {name: path for name, path in (("teacher", distill.teacher), ("full_teacher", distill.full_teacher)) if path}
    digests = {f"{name}_digest": weights_digest(Path(path)) for name, path in teachers.items()}
    settings = {"top_k": distill.top_k, "entropy_coef": distill.entropy_coef}
    return {"algorithm": {"distillation": {**teachers, **digests, **settings}}, "advantage_normalisation": None}


def kl_facts(parts: Parts) -> dict[str, object] | None:
    """The KL term and the digest of the weights it measures from; None without one."""
    kl = parts.config.algorithm.kl
    if not kl.coef:
        return None
    where = None if kl.reference == INITIAL else weights_digest(Path(kl.reference))
    return {"coef": kl.coef, "placement": kl.placement.value, "estimator": kl.estimator.value, "reference_digest": where}


def implementations(chunks: Sequence[nn.Module]) -> dict[str, str]:
    """Role -> class that really does it on this rank (its package says TransformerEngine, Apex, torch or ours)."""
    found: dict[str, str] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            leaf = name.rsplit(".", 1)[-1]
            for role, mark in _ROLES.items():
                if role not in found and leaf.endswith(mark):
                    found[role] = f"{type(module).__module__}.{type(module).__qualname__}"
    return found


def weights_digest(folder: Path) -> str:
    """64-bit digest (xxh3) of every safetensors file's name and content, in name order."""
    digest = xxhash.xxh3_64()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return f"xxh3_64:{digest.hexdigest()}"
