"""TRL's side of `make bench`: GRPOTrainer with the sequence-level ratio. Runs in `.venv-trl`, never in the project's own.

.venv-trl/bin/python tools/bench_trl.py CHECKPOINT PROMPTS OUT
"""

# datasets and trl are not in the environment that is type-checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_case import (
    CLIP_HIGH,
    CLIP_LOW,
    COMPLETION_TOKENS,
    LEARNING_RATE,
    PROMPTS_PER_STEP,
    SAMPLES,
    STEPS,
    WARM_UPS,
    orders,
    read_prompts,
    reward,
    say,
)
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Gate(TrainerCallback):
    """Holds every step back until the driver asks for it, and times it."""

    def __init__(self) -> None:
        """No step has been asked for yet."""
        self.orders = orders()
        self.started = 0.0
        self.generated_s = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Wait for the order, then start the clock."""
        next(self.orders)
        self.generated_s = 0.0
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stop the clock and answer."""
        seconds = time.perf_counter() - self.started
        say(seconds=seconds, stages={"rollout": self.generated_s, "rest": seconds - self.generated_s})


class Timed(GRPOTrainer):
    """GRPOTrainer that tells how long generation took."""

    gate: Gate

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        made = super()._generate_single_turn(*args, **kwargs)
        self.gate.generated_s += time.perf_counter() - started
        return made


def score(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Rewards of a batch. Stops the benchmark when a completion has not the length that was agreed."""
    if wrong := {len(ids) for ids in completion_ids} - {COMPLETION_TOKENS}:
        raise SystemExit(f"TRL made completions of {sorted(wrong)} tokens, {COMPLETION_TOKENS} were asked")
    return [reward(ids) for ids in completion_ids]


def settings(out: str) -> GRPOConfig:
    """One optimizer step per batch, fp32, CPU, on-policy: the current log-probs serve as the old ones."""
    return GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=COMPLETION_TOKENS,
        generation_kwargs={"min_new_tokens": COMPLETION_TOKENS},
        temperature=1.0,
        beta=0.0,
        router_aux_loss_coef=0.0,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=WARM_UPS + STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )


def main() -> None:
    """Build, say ready, step on order."""
    checkpoint, prompts, out = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [row for step in read_prompts(Path(prompts)) for row in step]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    for row in rows:
        if tokenizer(row["text"])["input_ids"] != row["ids"]:
            raise SystemExit(f"TRL's tokenizer reads {row['text']!r} as other ids than ours")
    data = Dataset.from_dict({"prompt": [row["text"] for row in rows]})
    gate = Gate()
    trainer = Timed(checkpoint, [score], settings(out), data, processing_class=tokenizer, callbacks=[gate])
    trainer.gate = gate
    parameters = list(trainer.model.parameters())
    if {p.dtype for p in parameters} != {torch.float32}:
        raise SystemExit("TRL's model is not in fp32")
    say(ready=True, parameters=sum(p.numel() for p in parameters))
    trainer.train()


if __name__ == "__main__":
    main()
