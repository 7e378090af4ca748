"""The only place that constructs Megatron's GPTModel, and the one forward that everyone uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from models.checkpoint_layout import layers_alike
from models.delta_net_kernel import check_kernel
from models.layer_spec import block_spec, resolve_impl
from models.parameters import canonical_parameters, unwrapped
from models.registry import weight_map
from models.router_policy import RouterControl, RouterPolicy
from models.spec import ModelSpec
from models.split_marks import mark_split_weights
from parallel.context import shard_sequence
from parallel.groups import ProcessGroups
from parallel.layout import ParallelLayout


@dataclass(frozen=True)
class BuildOptions:
    """How to build a spec. impl: auto, te or local. recompute: keep only layer inputs, run layers again in backward."""

    dtype: torch.dtype = torch.float32
    impl: str = "auto"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    recompute: bool = False
    router: RouterPolicy = field(default_factory=RouterPolicy)


def check_buildable(spec: ModelSpec, layout: ParallelLayout, options: BuildOptions) -> None:
    """ValueError naming the key for what the layout, Megatron or the policy cannot do; needs no process group."""
    layout.validate(spec.dims())
    resolve_impl(options.impl, options.device)
    if spec.moe is None and options.router.mode != "plain":
        raise ValueError(f"router.mode = {options.router.mode} needs a mixture-of-experts model; {spec.architecture} is dense")
    if spec.moe is not None and spec.moe.top_k == 1 and spec.moe.norm_topk_prob:
        raise ValueError("num_experts_per_tok = 1 with norm_topk_prob = true gives the router no gradient; it is not supported")
    if spec.delta_net is not None:
        check_kernel(options.device)


def transformer_config(spec: ModelSpec, layout: ParallelLayout, options: BuildOptions) -> TransformerConfig:
    """Megatron's configuration: no dropout, no biases but qkv, and no fusions without TransformerEngine."""
    te = resolve_impl(options.impl, options.device) == "te"
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        attention_output_gate=spec.attention_gate,
        layernorm_zero_centered_gamma=spec.zero_centered_norms,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=options.dtype,
        bf16=options.dtype is torch.bfloat16,
        pipeline_dtype=options.dtype,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=options.device.type == "cpu",
        persist_layer_norm=te,
        bias_activation_fusion=te,
        bias_dropout_fusion=te,
        apply_rope_fusion=te,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        hetereogenous_dist_checkpoint=not layers_alike(spec),
        **_parallel_fields(layout),
        **_recompute_fields(options),
        **_expert_fields(spec, options, te=te),
    )


def _parallel_fields(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sp and layout.tp > 1,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        # With both given and no stage between them, Megatron divides by the number of stages between them.
        "num_layers_in_last_pipeline_stage": None if layout.pp == 2 and layout.first_stage_layers else layout.last_stage_layers,
    }


def _recompute_fields(options: BuildOptions) -> dict[str, Any]:
    if not options.recompute:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _expert_fields(spec: ModelSpec, options: BuildOptions, *, te: bool) -> dict[str, Any]:
    """Softmax over the chosen logits when the probabilities are renormalised, softmax over all of them when not."""
    alltoall = {"moe_token_dispatcher_type": "alltoall"}
    if spec.moe is None:
        return alltoall
    return alltoall | {
        "num_moe_experts": spec.moe.num_experts,
        "moe_router_topk": spec.moe.top_k,
        "moe_ffn_hidden_size": spec.moe.ffn_size,
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)] if spec.dense_layers else 1,
        "moe_shared_expert_intermediate_size": spec.moe.shared_ffn_size,
        "moe_shared_expert_gate": spec.moe.shared_ffn_size is not None,
        "moe_router_pre_softmax": not spec.moe.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32" if options.dtype is torch.bfloat16 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": te,
    }


def build_model(spec: ModelSpec, groups: ProcessGroups, options: BuildOptions) -> list[GPTModel]:
    """This rank's model chunks (more than one with virtual pipeline stages), with uninitialised weights.

    ValueError as `check_buildable`.
    """
    layout = groups.layout
    check_buildable(spec, layout, options)
    config = transformer_config(spec, layout, options)
    stream = (groups.at.dp, groups.at.cp, groups.at.tp if config.sequence_parallel else 0)
    impl, control = resolve_impl(options.impl, options.device), RouterControl(options.router, stream)
    chunks = []
    for stage in range(layout.chunks):
        layers = layout.chunk_layers(spec.num_layers, groups.at.pp, stage)
        block = block_spec(config, spec, layers, impl=impl, control=control)
        chunks.append(_chunk(spec, config, block, groups, stage))
    mark_split_weights(chunks)
    if spec.other_dtypes:
        _keep_own_dtypes(chunks, spec, groups)
    return chunks


def _keep_own_dtypes(chunks: list[GPTModel], spec: ModelSpec, groups: ProcessGroups) -> None:
    """A router that the checkpoint stores in fp32 beside bf16 weights stays in fp32, whatever the model is built in."""
    parameters = canonical_parameters(chunks, spec, groups.layout, dist.get_rank())
    for rule in weight_map(spec):
        if rule.own_dtype and rule.megatron in parameters and rule.tensors[0].dtype is torch.float32:
            parameter = parameters[rule.megatron]
            parameter.data = parameter.data.float()


def _chunk(spec: ModelSpec, config: TransformerConfig, block: Any, groups: ProcessGroups, stage: int) -> GPTModel:
    layout = groups.layout
    model = GPTModel(
        config,
        block,
        vocab_size=spec.padded_vocab(layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=groups.first_stage and stage == 0,
        post_process=groups.last_stage and stage == layout.chunks - 1,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(spec.rope.theta),
        rotary_percent=spec.rope.fraction,
        pg_collection=groups.megatron,
        vp_stage=None if layout.vpp is None else stage,
    )
    model.rotary_pos_emb.inv_freq = spec.rope.frequencies(spec.head_dim)
    return model


def forward_packed(chunk: torch.nn.Module, token_ids: Tensor, cu_seqlens: Tensor, max_len: int) -> Tensor:
    """Run one packed row of whole sequences through a chunk; every caller's only way in.

    token_ids: int64 [T]; cu_seqlens: int32 [S + 1], segment borders from 0 to T, no empty segment; max_len: longest segment.
    Positions restart at 0 in every segment. Returns logits [T / cp, padded vocabulary / tp] on the last pipeline stage, else
    the hidden states [T / cp (/ tp with sequence parallelism), 1, H], of the tokens that parallel.context.shard_indices
    gives this context-parallel rank. ValueError when the arguments do not fit together.
    """
    _check_row(token_ids, cu_seqlens, max_len)
    model = unwrapped(chunk)
    mine = shard_sequence(token_ids, cu_seqlens, model.pg_collection.cp)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=max_len, max_seqlen_kv=max_len
    )
    output = chunk(mine[None], None, None, packed_seq_params=packed)
    return output[0] if model.post_process else output


def _check_row(token_ids: Tensor, cu_seqlens: Tensor, max_len: int) -> None:
    """Megatron takes max_len = T with several segments for one long sequence and would rotate by the wrong positions."""
    if token_ids.dim() != 1 or cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() < 2:
        raise ValueError(f"forward_packed wants token_ids [T], int32 cu_seqlens [S + 1]; got {token_ids.shape}, {cu_seqlens}")
    if cu_seqlens.numel() > 2 and max_len >= token_ids.numel():
        raise ValueError(
            f"max_len = {max_len} cannot be the longest of {cu_seqlens.numel() - 1} segments of {token_ids.numel()} tokens"
        )
