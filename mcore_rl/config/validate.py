"""Everything that can be known to be wrong before a rank or an engine starts.

The order is from cheap to dear: fields, device, model and layout, then the task with the model's own tokenizer.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

from mcore_rl.algorithms.validate import validate_algorithm
from mcore_rl.config.device import uses_cuda
from mcore_rl.config.requirement import require
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.schema import Device, Impl, RunConfig
from mcore_rl.config.validate_distill import validate_distill
from mcore_rl.config.validate_fields import validate_fields
from mcore_rl.config.validate_model import model_spec, model_tokenizer, validate_layout, validate_reference
from mcore_rl.data.band_task import BandTask
from mcore_rl.data.build import BuiltTask, build_task
from mcore_rl.data_gate import gate_band
from mcore_rl.probe_file import check_same_prompts, read_probe
from mcore_rl.rewards.user_reward import UserReward
from mcore_rl.rollout.sleep import check_level
from mcore_rl.types import Prompt
from models.delta_net_kernel import check_kernel

MAX_LOCAL_RANKS = 256


def validate(config: RunConfig, stage: str = "train", *, local_ranks: int | None = None) -> None:
    """Raise ValueError, one line with key, value and what would be right, for the first thing that cannot work.

    stage: train, sft, distill, eval or probe. local_ranks: ranks this host will run (None: somebody else places them).
    """
    validate_fields(config)
    require(stage != "sft" or config.sft.steps > 0, f"sft.steps={config.sft.steps}", "mcore-rl sft needs at least 1 step")
    if stage == "train":
        validate_algorithm(config.algorithm, samples_per_prompt=config.train.samples_per_prompt)
    _device(config, local_ranks)
    spec = model_spec(config.model)
    validate_layout(config, spec)
    if spec.delta_net is not None and uses_cuda(config.device):
        check_kernel(torch.device("cuda"))
    if stage == "train":
        validate_reference(config.algorithm.kl, spec)
    tokenizer = model_tokenizer(config.model, spec)
    if stage == "distill":
        validate_distill(config, spec, tokenizer)
    validate_task(config, tokenizer, stage)
    validate_reward_function(config.reward)


def _device(config: RunConfig, local_ranks: int | None) -> None:
    if config.device is Device.cuda:
        require(torch.cuda.is_available(), "device=cuda", "torch finds no CUDA device; use device=cpu")
    cuda = uses_cuda(config.device)
    require(cuda or config.model.impl is not Impl.te, "model.impl=te", "TransformerEngine needs a GPU; use model.impl=auto")
    check_level(config.rollout.sleep_level, cuda=cuda)
    count = torch.cuda.device_count() if cuda else 0
    if local_ranks is not None:
        why = "all ranks would start on this host; start those of several hosts with torchrun"
        require(local_ranks <= MAX_LOCAL_RANKS, f"layout.world={local_ranks}", f"at most {MAX_LOCAL_RANKS}: {why}")
    if cuda and local_ranks is not None:
        require(
            local_ranks <= count,
            f"layout.world={local_ranks}",
            f"this host has {count} CUDA devices; start the ranks of several hosts with torchrun, or use device=cpu",
        )


def validate_reward_function(config: RewardConfig) -> None:
    """Load reward.function in a process of its own and end it again. ValueError when it cannot be loaded."""
    if config.function is not None:
        UserReward(config).close()


def validate_task(config: RunConfig, tokenizer: PreTrainedTokenizerFast, stage: str = "train") -> None:
    """Build the task as the run will and draw from it: files, patterns, difficulty, enough prompts, short enough."""
    rollout = config.rollout
    limit = rollout.max_model_len - rollout.max_tokens
    task = build_task(
        config.task,
        tokenizer,
        seed=config.seed,
        reward=config.reward,
        template_kwargs=config.model.chat_template_kwargs,
        max_prompt_tokens=limit,
    )
    if stage == "train" and isinstance(task, BandTask):
        gate_band(task.band, config.data_gate)
    prompts = task.prompts(0, 16) + task.eval_prompts("test", config.eval.prompts) + _gate_prompts(config, task, stage)
    if stage == "probe":
        prompts += _probed(config, task)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    require(
        longest <= limit,
        f"rollout.max_model_len={rollout.max_model_len}",
        f"the longest prompt has {longest} tokens and rollout.max_tokens={rollout.max_tokens} follow; "
        f"at least {longest + rollout.max_tokens} are needed",
    )


def _probed(config: RunConfig, task: BuiltTask) -> list[Prompt]:
    """The prompts of the probe. ValueError when those of data_gate.append_to are not the first of them."""
    prompts, path = task.probe_prompts(0, config.data_gate.prompts), config.data_gate.append_to
    if path is not None:
        check_same_prompts(path, read_probe(path)[1], prompts)
    return prompts


def _gate_prompts(config: RunConfig, task: BuiltTask, stage: str) -> list[Prompt]:
    if stage == "distill":
        return task.eval_prompts("val", config.distill.gate_prompts)
    return task.eval_prompts("val", config.sft.check_prompts) if config.sft.steps else []
