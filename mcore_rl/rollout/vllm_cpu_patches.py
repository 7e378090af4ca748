"""Everything this project must put right in vLLM's CPU build, in one place and for one version.

Each function says what is wrong upstream and what shows it; tests/engine holds a test per function. Runs inside
vLLM's own process and never imports Megatron.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

SUPPORTED = "0.32."


def check_version() -> None:
    """Refuse a vLLM these patches were not written for (RuntimeError)."""
    if not vllm.__version__.startswith(SUPPORTED):
        raise RuntimeError(
            f"vllm {vllm.__version__}: the CPU patches of mcore_rl are written for {SUPPORTED}x; check each and its test"
        )


def reset_moe_prepack(model: torch.nn.Module) -> int:
    """Let the next load prepack the experts again; returns the number of MoE layers.

    vLLM prepacks CPU experts only while `moe_kernel` is None, that is on the first load. A second load would leave
    plain weights where the kernel expects packed ones: no error, log-probs several nats off.
    """
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    for layer in layers:
        layer.quant_method.moe_kernel = None
    return len(layers)


def refresh_tied_heads(model: torch.nn.Module) -> int:
    """Rebuild the packed copy of an LM head that shares its weight with the embedding; returns how many.

    A tied head receives no tensor of its own, so a reload does not process it: its packed matrix keeps the weights of
    the first load while the embedding moves on.
    """
    owners: dict[int, torch.nn.Module] = {}
    refreshed = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        if isinstance(module, ParallelLMHead) and owners.get(id(weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)
            refreshed += 1
        owners.setdefault(id(weight), module)
    return refreshed


def drop_partial_reload(model: torch.nn.Module) -> int:
    """Forget tensors of a weight update that never finished; returns how many layers had any.

    The layerwise loader keeps what it has buffered: the next update would count them again and process a layer with
    tensors of two updates. Callers put the old kernel tensors back with `finalize_layerwise_reload`.
    """
    touched = 0
    for module in model.modules():
        info = get_layerwise_info(module)
        touched += bool(info.loaded_weights)
        info.loaded_weights.clear()
        info.load_numel = 0
    return touched


def map_expert_ids() -> None:
    """Make the CPU experts honour `expert_map`: without it expert parallelism reads out of bounds and dies.

    Ids become local ones; a token routed to an expert of another rank gets weight 0 here. Idempotent.
    """
    original = CPUUnquantizedExperts.apply
    if original.__name__ == "apply_with_expert_map":
        return

    def apply_with_expert_map(self: CPUUnquantizedExperts, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(_APPLY_ARGUMENTS, args, strict=False)) | kwargs
        if named["expert_map"] is not None:
            named["topk_ids"], named["topk_weights"] = local_ids(named["topk_ids"], named["topk_weights"], named["expert_map"])
        original(self, **named)

    CPUUnquantizedExperts.apply = apply_with_expert_map


def rewind_discarded_draws() -> None:
    """Let a seeded request be prefilled in pieces: its generator must not advance for tokens that are thrown away.

    vLLM rewinds by `Generator.set_offset`, which CPU generators refuse ("CPU Generator does not use offset"): any batch
    with more prompt tokens than one step takes fails as soon as its requests have seeds. Idempotent.
    """
    sample, book = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    if sample.__name__ == "sample_and_rewind":
        return

    def sample_and_rewind(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        states = {index: generator.get_state() for index, generator in _discarded(self).items()}
        output = sample(self, *args, **kwargs)
        for index, state in states.items():
            self.input_batch.generators[index].set_state(state)
        return output

    def book_without_rewind(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        hidden = _discarded(self)
        for index in hidden:
            del self.input_batch.generators[index]
        result = book(self, *args, **kwargs)
        self.input_batch.generators.update(hidden)
        return result

    CPUModelRunner._sample = sample_and_rewind
    CPUModelRunner._bookkeeping_sync = book_without_rewind


def _discarded(runner: CPUModelRunner) -> dict[int, torch.Generator]:
    mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    generators = runner.input_batch.generators
    return {int(index): generators[int(index)] for index in mask.nonzero()[0] if int(index) in generators}


def local_ids(topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Global expert ids [T, K] to local ids, with weight 0 where the expert lives elsewhere (map value -1)."""
    local = expert_map[topk_ids.long()]
    weights = (topk_weights * (local >= 0)).contiguous()
    return local.clamp_min(0).to(topk_ids.dtype).contiguous(), weights


_APPLY_ARGUMENTS = (
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "activation",
    "global_num_experts",
    "expert_map",
    "a1q_scale",
    "a2_scale",
    "workspace13",
    "workspace2",
    "expert_tokens_meta",
    "apply_router_weight_on_input",
)
