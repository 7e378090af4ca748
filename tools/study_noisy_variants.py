"""What the study of a noisy sampler compares, and the configuration of each run. No Megatron, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.compose import compose_config
from mcore_rl.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "study_noisy_sampler"
SEEDS = (0, 1, 2)
NOISE_STD = 0.2
PROBE_LIMIT_NATS = 50.0  # the probe compares clean with noisy weights; NaN still fails
_BATCH = ("train.steps=12", "train.prompts_per_step=16", "train.samples_per_prompt=8", "train.updates_per_batch=2")
_CORRECTED = "algorithm.correction.enabled=true"


@dataclass(frozen=True)
class Variant:
    """One run per seed. noisy False: the engine gets the clean weights, as in any run."""

    name: str
    says: str
    overrides: tuple[str, ...]
    noisy: bool = True


VARIANTS = (
    Variant("gspo_exact", "GSPO, exact sampler (control)", ("algorithm=gspo",), noisy=False),
    Variant("grpo", "token-level GRPO, recomputed `old`", ("algorithm=grpo",)),
    Variant("gspo", "GSPO, recomputed `old`", ("algorithm=gspo",)),
    Variant(
        "gspo_bypass",
        "GSPO, the sampler's log-probs under the ratio, nothing else",
        (
            "algorithm=gspo",
            _CORRECTED,
            "algorithm.correction.denominator=sampler",
            "algorithm.correction.token=none",
            "algorithm.correction.sequence=none",
        ),
    ),
    Variant(
        "gspo_correction",
        "GSPO + correction, denominator=sampler",
        ("algorithm=gspo", _CORRECTED, "algorithm.correction.denominator=sampler"),
    ),
    Variant(
        "gspo_correction_trainer",
        "GSPO + correction, denominator=trainer",
        ("algorithm=gspo", _CORRECTED, "algorithm.correction.denominator=trainer"),
    ),
)


def chosen(names: Sequence[str]) -> tuple[Variant, ...]:
    """The variants called so. ValueError for an unknown name."""
    known = {variant.name: variant for variant in VARIANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no variant called {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names)


def study_config(variant: Variant, seed: int, overrides: Sequence[str], folder: Path = FOLDER) -> RunConfig:
    """The quickstart, smaller and at twice its learning rate, with this variant's algorithm; `overrides` come last."""
    return compose_config(
        [
            "experiment=quickstart",
            "optimizer.lr=1e-4",
            *variant.overrides,
            f"name=seed{seed}",
            f"out_dir={folder}",
            f"seed={seed}",
            *_BATCH,
            f"sync.probe_max_nats={PROBE_LIMIT_NATS}",
            "telemetry.wandb=disabled",
            "telemetry.rollouts_logged=0",
            *overrides,
        ]
    )
