"""The model and the layout, from config.json alone: no weight is read and nothing is built."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mcore_rl.config.algorithm import INITIAL, KlConfig
from mcore_rl.config.device import uses_cuda
from mcore_rl.config.layout import check_token_budget, parallel_layout
from mcore_rl.config.requirement import require
from mcore_rl.config.schema import DType, ModelConfig, Placement, RouterMode, RunConfig
from mcore_rl.data.tokenizer import build_tokenizer, load_tokenizer
from models.registry import read_spec, spec_from_config
from models.spec import DeltaNetSpec, ModelSpec

CPU_DELTA_NET_HEADS = (64, 128)


def model_spec(model: ModelConfig) -> ModelSpec:
    """Spec of the checkpoint at model.path, or of model.build. ValueError naming key, path and what is missing."""
    if model.path is not None:
        return spec_of_folder(Path(model.path))
    if model.build is None:
        raise ValueError("model.path=null: give a Hugging Face folder, or model=quickstart_moe to build a small model")
    try:
        return spec_from_config({"architectures": [model.build.architecture], **model.build.hf_config})
    except ValueError as error:
        raise ValueError(f"model.build: {error}") from error


def model_tokenizer(model: ModelConfig, spec: ModelSpec) -> PreTrainedTokenizerFast:
    """The tokenizer the run will use; ValueError where the model has fewer rows than it has tokens."""
    if model.path is not None:
        tokenizer, key = load_tokenizer(model.path), f"model.path={model.path}"
    else:
        name = model.build.tokenizer if model.build else ""
        tokenizer, key = build_tokenizer(name), f"model.build.hf_config.vocab_size={spec.vocab_size}"
    require(
        len(tokenizer) <= spec.vocab_size, key, f"the tokenizer has {len(tokenizer)} tokens, the model {spec.vocab_size} rows"
    )
    return tokenizer


def validate_layout(config: RunConfig, spec: ModelSpec) -> None:
    """Every divisibility error of layout and model, and options that this model or device cannot have."""
    parallel_layout(config.layout).validate(spec.dims())
    check_token_budget(config.layout, config.rollout.max_model_len)
    if spec.moe is None:
        mode = config.router.mode
        require(mode is RouterMode.plain, f"router.mode={mode.name}", f"{spec.architecture} has no router; use router=plain")
        auxiliary = config.router.aux_loss_coef
        require(auxiliary == 0.0, f"router.aux_loss_coef={auxiliary}", f"{spec.architecture} has no experts; use 0")
        warm_up = config.sft.aux_loss_coef
        require(
            not config.sft.steps or warm_up == 0.0, f"sft.aux_loss_coef={warm_up}", f"{spec.architecture} has no experts; use 0"
        )
    if spec.delta_net is not None:
        _validate_delta_net(config, spec.delta_net)
    positions = spec.max_positions
    length = config.rollout.max_model_len
    require(length <= positions, f"rollout.max_model_len={length}", f"the model has {positions} positions")


def _validate_delta_net(config: RunConfig, sizes: DeltaNetSpec) -> None:
    """What vLLM's CPU kernel for GatedDeltaNet can do; a server by URL may run on anything."""
    if uses_cuda(config.device) or config.rollout.placement is not Placement.owned:
        return
    dtype = config.rollout.dtype
    require(
        dtype is DType.bfloat16,
        f"rollout.dtype={dtype.value}",
        "vLLM computes GatedDeltaNet on a CPU in bfloat16; use that",
    )
    heads = (sizes.k_head_dim, sizes.v_head_dim)
    require(
        all(head in CPU_DELTA_NET_HEADS for head in heads),
        f"GatedDeltaNet heads of {heads}",
        f"vLLM's CPU kernel takes {CPU_DELTA_NET_HEADS} only; use a GPU or a server (rollout=url)",
    )


def validate_reference(kl: KlConfig, spec: ModelSpec) -> None:
    """A reference folder must hold a model of the very shape that is trained: its weights stand in for the policy's."""
    if kl.reference == INITIAL:
        return
    setting = f"algorithm.kl.reference={kl.reference}"
    require(kl.coef > 0.0, setting, "is read with algorithm.kl.coef > 0 only")
    found = spec_of_folder(Path(kl.reference), "algorithm.kl.reference")
    differing = [field.name for field in fields(ModelSpec) if getattr(found, field.name) != getattr(spec, field.name)]
    require(not differing, setting, f"another model than the trained one; they differ in {', '.join(differing)}")


def spec_of_folder(folder: Path, name: str = "model.path") -> ModelSpec:
    """Spec of the checkpoint in `folder`. ValueError naming the setting, the folder and what is missing."""
    key = f"{name}={folder}"
    require(folder.is_dir(), key, "no such folder; a Hugging Face folder (config.json, safetensors, tokenizer) is needed")
    require((folder / "config.json").is_file(), key, "has no config.json, so it is not a Hugging Face folder")
    require(any(folder.glob("*.safetensors")), key, "has no .safetensors file; convert the checkpoint to safetensors first")
    return read_spec(folder)
