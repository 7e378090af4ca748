"""What can be wrong with a distillation before anything starts: its numbers, its teacher, their common tokenizer."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from mcore_rl.config.requirement import at_least, require
from mcore_rl.config.schema import EngineKind, RunConfig
from mcore_rl.config.validate_model import spec_of_folder
from mcore_rl.data.render import Renderer
from mcore_rl.data.tokenizer import load_tokenizer
from models.spec import ModelSpec

QUESTION = "What is 12 + 30?"


def validate_distill(config: RunConfig, student: ModelSpec, tokenizer: PreTrainedTokenizerFast) -> None:
    """ValueError naming key and value for the first thing that cannot work."""
    distill = config.distill
    require(
        bool(distill.teacher),
        f"distill.teacher={distill.teacher or 'null'}",
        "mcore-rl distill needs the Hugging Face folder of a teacher",
    )
    sizes = [("top_k", distill.top_k), ("gate_prompts", distill.gate_prompts)]
    sizes += [("teacher_tensor_parallel", distill.teacher_tensor_parallel)]
    at_least(1, [(f"distill.{name}", value) for name, value in sizes])
    steps = distill.flat_steps
    require(steps == 0 or steps >= 2, f"distill.flat_steps={steps}", "two halves are compared: 0 (never) or at least 2")
    for name, value in (("flat_nats", distill.flat_nats), ("gate_max_kl_nats", distill.gate_max_kl_nats)):
        require(math.isfinite(value) and value >= 0.0, f"distill.{name}={value}", "must be finite and not negative")
    require(-1.0 <= distill.min_lead <= 1.0, f"distill.min_lead={distill.min_lead}", "a share of the prompts in [-1, 1]")
    coef = distill.entropy_coef
    require(math.isfinite(coef), f"distill.entropy_coef={coef}", "a finite number is needed")
    require(config.rollout.engine is EngineKind.vllm, "rollout.engine=trainer", "a teacher is a vLLM engine; so is its student's")
    require(config.algorithm.aggregation is not None, "algorithm.aggregation=null", "it says how tokens are averaged; choose one")
    for key, path in (("distill.teacher", distill.teacher), ("distill.full_teacher", distill.full_teacher)):
        require(path != "", f"{key}=", "an empty path; leave it out or name a folder")
        if path is not None:
            _teacher(key, Path(path), config, student, tokenizer)


def _teacher(key: str, folder: Path, config: RunConfig, student: ModelSpec, tokenizer: PreTrainedTokenizerFast) -> None:
    spec, top_k = spec_of_folder(folder, key), config.distill.top_k
    theirs = load_tokenizer(folder, key)
    same = _digest(theirs) == _digest(tokenizer)
    require(same, f"{key}={folder}", "its tokenizer is not the student's (by sha256): ids would not match")
    alike = _rendered(config, theirs, f"{key}={folder}") == _rendered(config, tokenizer, "model.path")
    require(alike, f"{key}={folder}", "its chat template renders a conversation otherwise than the student's")
    require(
        theirs.eos_token_id == tokenizer.eos_token_id,
        f"{key}={folder}",
        f"its answers end with token {theirs.eos_token_id}, the student's with {tokenizer.eos_token_id}",
    )
    longest = config.rollout.max_model_len
    require(
        longest < spec.max_positions,
        f"rollout.max_model_len={longest}",
        f"{key}={folder} has {spec.max_positions} positions and needs one more than the longest answer",
    )
    least = min(spec.vocab_size, student.vocab_size)
    require(top_k <= least, f"distill.top_k={top_k}", f"the models have {least} tokens")


def _rendered(config: RunConfig, tokenizer: PreTrainedTokenizerFast, key: str) -> str:
    """A question as the run would ask it with this tokenizer."""
    task = config.task
    try:
        return Renderer(tokenizer, task.system_prompt, task.prompt_suffix, config.model.chat_template_kwargs).text(QUESTION)
    except TemplateError as refusal:
        raise ValueError(f"{key}: its chat template refuses the run's prompts: {refusal}") from refusal


def _digest(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
