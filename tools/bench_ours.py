"""Our side of `make bench`: one rank of the real loop (Megatron, vLLM, proved sync) on the case's own reward.

RANK=.. WORLD_SIZE=.. python tools/bench_ours.py CONFIG PROMPTS
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bench_case import COMPLETION_TOKENS, orders, read_prompts, reward, say

from mcore_rl.config.compose import load_config
from mcore_rl.guard import die_with_parent
from mcore_rl.jobs import opened
from mcore_rl.run import Run
from mcore_rl.stages import advantages, draw_prompts, record, roll_out, score, sync, update
from mcore_rl.step_metrics import StepOutcome
from mcore_rl.types import Completion, Prompt, Score
from parallel.collectives import on_rank0


@dataclass(frozen=True)
class Case:
    """types.Task with the case's prompts, in file order, and its reward on whole completions."""

    steps: list[list[dict[str, object]]]

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a step; the file holds exactly as many as are asked."""
        rows = self.steps[step]
        if len(rows) != count:
            raise ValueError(f"step {step} has {len(rows)} prompts, {count} were asked")
        return [Prompt(f"s{step}-p{i}", tuple(cast(list[int], r["ids"])), str(r["text"]), "") for i, r in enumerate(rows)]

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Graded reward. ValueError when the completion has not the length that was agreed."""
        if len(completion.token_ids) != COMPLETION_TOKENS:
            raise ValueError(f"{prompt.prompt_id}: {len(completion.token_ids)} tokens, {COMPLETION_TOKENS} were asked")
        return Score(reward(list(completion.token_ids)), False, None, False, True)

    def text(self, completion: Completion) -> str:
        """The benchmark judges token ids; they are no text."""
        return ""

    def eval_prompts(self, split: str, count: int) -> list[Prompt]:
        """Not part of the benchmark."""
        raise NotImplementedError(f"the benchmark has no {split} split ({count} prompts were asked)")

    def demonstrations(self, step: int, count: int) -> list[tuple[Prompt, tuple[int, ...]]]:
        """Not part of the benchmark."""
        raise NotImplementedError(f"the benchmark has no demonstrations (step {step}, {count} were asked)")


def one_step(run: Run, step: int) -> None:
    """A step of `mcore_rl.loop.train`, stage by stage."""
    prompts = draw_prompts(run, step)
    completions = roll_out(run, prompts, step)
    scores = score(run, prompts, completions)
    planned = advantages(run, prompts, completions, scores, step)
    reports = update(run, planned)
    synced = sync(run)
    record(run, step, StepOutcome(prompts, completions, scores, planned.rollout, planned.updates, reports, synced))


def main() -> None:
    """Build, first sync, say ready, step on order (rank 0 hears it, the others follow)."""
    config, prompts = (Path(argument) for argument in sys.argv[1:])
    die_with_parent()
    with opened(load_config(config)) as (_, run, _):
        run.task = Case(read_prompts(prompts))
        run.stop_token_ids = ()
        sync(run)
        run.clock.take_step()
        is_rank0 = run.engine is not None
        if is_rank0:
            say(ready=True, parameters=sum(meta.nbytes // meta.dtype.itemsize for meta in run.policy.weights().metadata()))
        asked = orders()
        step = 0
        while on_rank0(lambda: next(asked, "closed") is None):
            started, before = time.perf_counter(), dict(run.clock.total_s)
            one_step(run, step)
            seconds = time.perf_counter() - started
            stages = {name: total - before.get(name, 0.0) for name, total in run.clock.total_s.items()}
            if is_rank0:
                say(seconds=seconds, stages=stages)
            step += 1


if __name__ == "__main__":
    main()
