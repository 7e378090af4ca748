"""`mcore-rl contract`: the two runs' files, the two engines one after the other, and the verdict file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.algorithms.divergence import TopList
from mcore_rl.config.compose import load_config
from mcore_rl.config.device import uses_cuda
from mcore_rl.config.schema import EngineKind, Placement, RunConfig
from mcore_rl.contract import check_comparable, gate_a, gate_b, gate_c, verdict
from mcore_rl.evaluate import EvalResult
from mcore_rl.rollout.likeliest import Answer, likeliest, start_scorer
from mcore_rl.run_folder import RunFolder, write_json
from mcore_rl.telemetry.jsonl import read_rows
from models.registry import read_spec

FULL_VOCABULARY = 4096
TOP_K = 64


def run_contract(target: Path, accelerated: Path, out: Path, *, responses: int, samples: int = 10_000) -> dict[str, Any]:
    """The verdict on two run folders, also written to `out`. ValueError for runs that cannot be compared.

    Both engines hold the target run's exported checkpoint and score the last `responses` responses of its rollouts.
    """
    folders = [RunFolder(target), RunFolder(accelerated)]
    for folder in folders:
        if not folder.config.is_file():
            raise ValueError(f"contract: {folder.root} is not the folder of a run: it has no {folder.config.name}")
    configs = [_config(folder) for folder in folders]
    check_comparable(*(yaml.safe_load(folder.config.read_text(encoding="utf-8")) for folder in folders))
    answers = last_responses(folders[0].rollouts, responses)
    gates = {
        "B_step_seconds": gate_b(*(_rows(folder.metrics) for folder in folders)),
        "C_held_out": gate_c(*(_evaluation(folder) for folder in folders), samples=samples),
    }
    logs = out.parent / "contract_logs"
    found = [
        distributions(config, folders[0].checkpoint, answers, logs / f"{name}.log")
        for name, config in zip(("target", "accelerated"), configs, strict=True)
    ]
    result = verdict({"A_forward_kl": gate_a(*found, samples=samples), **gates})
    result |= {"target": str(target), "accelerated": str(accelerated)}
    write_json(out, result)
    return result


def distributions(config: RunConfig, checkpoint: Path, answers: Sequence[Answer], log: Path) -> list[TopList]:
    """What the engine of `config` holds possible at every place of the answers: everything, or the best TOP_K."""
    vocab = read_spec(checkpoint).vocab_size
    count = vocab if vocab <= FULL_VOCABULARY else TOP_K
    device = "cuda" if uses_cuda(config.device) else "cpu"
    link = start_scorer(config.rollout, checkpoint, count, device=device, log_path=log)
    try:
        return likeliest(link, answers, count)
    finally:
        link.close()


def last_responses(rollouts: Path, count: int) -> list[Answer]:
    """The last `count` responses that a run sampled. ValueError when there are fewer."""
    rows = _rows(rollouts)
    if len(rows) < count or count < 1:
        raise ValueError(f"contract: {rollouts} has {len(rows)} responses, {count} are asked for")
    return [(tuple(row["prompt_token_ids"]), tuple(row["token_ids"])) for row in rows[-count:]]


def _config(folder: RunFolder) -> RunConfig:
    config = load_config(folder.config)
    rollout = config.rollout
    if rollout.engine is not EngineKind.vllm or rollout.placement is not Placement.owned:
        raise ValueError(
            f"contract: {folder.root} ran with {rollout.engine.value}/{rollout.placement.value}; vllm/owned is needed"
        )
    return config


def _evaluation(folder: RunFolder) -> EvalResult:
    path = folder.root / "evaluations.json"
    if not path.is_file():
        raise ValueError(f"contract: {path} does not exist; give the folder of a run that ended")
    found = json.loads(path.read_text(encoding="utf-8"))
    if "after" not in found:
        raise ValueError(f"contract: {path} has no evaluation after the run (eval.prompts = 0, or it did not complete)")
    return EvalResult.from_json(found["after"]["greedy"])


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"contract: {path} does not exist; give the folder of a run that ended")
    return read_rows(path)
