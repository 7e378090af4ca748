"""One GatedDeltaNet layer in the ranks, with weights and inputs given whole. Imported inside the ranks."""

import sys

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories, apply_factory_merges
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from models.delta_net_mapping import DeltaNetConv, FuseDeltaNetFlat, FuseDeltaNetGrouped, HeadVector
from models.gated_delta_net import GatedDeltaNet
from models.mapping import Rename
from models.split_marks import mark_split_weights
from parallel.context import gather_sequence, shard_sequence
from parallel.gather import gather_shards
from parallel.optimizer import OptimizerSettings, build_ddp, build_optimizer

HIDDEN = 24
EPS = 1e-6


def operations(sizes, style):
    """Megatron name -> (Hugging Face names, op)."""
    grouped = (["in_proj_qkvz.weight", "in_proj_ba.weight"], FuseDeltaNetGrouped(sizes, HIDDEN))
    flat = ([f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")], FuseDeltaNetFlat(sizes, HIDDEN))
    return {
        "in_proj.weight": grouped if style == "qwen3_next" else flat,
        "conv1d.weight": (["conv1d.weight"], DeltaNetConv(sizes)),
        "A_log": (["A_log"], HeadVector(sizes)),
        "dt_bias": (["dt_bias"], HeadVector(sizes)),
        "out_norm.weight": (["norm.weight"], Rename((sizes.v_head_dim,))),
        "out_proj.weight": (["out_proj.weight"], Rename((HIDDEN, sizes.value_size), 1)),
    }


def configuration(layout, **changes):
    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": EPS,
        "perform_initialization": False,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sp,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(settings | changes))


def build(groups, sizes, **changes):
    """As a TransformerLayer builds it, with every parameter poisoned."""
    layer = GatedDeltaNet(
        configuration(groups.layout, **changes), layer_number=1, delta_net=sizes, pg_collection=groups.megatron, name="any"
    )
    mark_split_weights([layer])
    for parameter in layer.parameters():
        parameter.data.fill_(torch.nan)
    return layer


def fresh_decay_rates(groups, device, sizes):
    """A_log and dt_bias as a new layer of a bfloat16 model draws them."""
    torch.manual_seed(0)
    settings = configuration(groups.layout, params_dtype=torch.bfloat16)
    layer = GatedDeltaNet(settings, layer_number=1, delta_net=sizes, pg_collection=groups.megatron, name="any")
    assert layer.in_proj.weight.dtype is torch.bfloat16
    return layer.A_log.detach().clone(), layer.dt_bias.detach().clone()


def fill(groups, layer, tensors, ops):
    for name, (theirs, op) in ops.items():
        shard = op.shard(op.fuse([tensors[their] for their in theirs]), groups.at.tp, groups.layout.tp)
        parameter = layer.get_parameter(name)
        assert parameter.shape == shard.shape
        parameter.data.copy_(shard)


def packed(groups, rows):
    """Rows laid end to end, each padded for the layout with noise that must not matter; (row, cu_seqlens, real tokens)."""
    multiple = 2 * groups.layout.cp * groups.layout.tp
    noise = torch.Generator().manual_seed(5)
    parts, real, borders = [], [], [0]
    for row in rows:
        padding = -row.shape[0] % multiple
        parts += [row, torch.randn(padding, row.shape[1], generator=noise).to(row.dtype)]
        real.append(torch.arange(borders[-1], borders[-1] + row.shape[0]))
        borders.append(borders[-1] + row.shape[0] + padding)
    return torch.cat(parts), torch.tensor(borders, dtype=torch.int32), torch.cat(real)


def local(groups, row, cu_seqlens):
    """This rank's tokens: its part of the row, and with sequence parallelism its slice of that."""
    mine = shard_sequence(row, cu_seqlens, groups.cp)
    return mine.chunk(groups.layout.tp)[groups.at.tp] if groups.layout.sp else mine


def whole(groups, mine, cu_seqlens):
    if groups.layout.sp:
        mine = torch.cat(gather_shards(mine, groups.tp))
    return gather_sequence(mine.detach(), cu_seqlens, groups.cp)


def forward(groups, layer, hidden, cu_seqlens, *, recompute=False):
    longest = int(cu_seqlens.diff().max())
    parameters = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )

    def run(x):
        return layer(x[:, None], None, packed_seq_params=parameters, rotary_pos_emb=None)

    output, bias = tensor_parallel.checkpoint(run, False, hidden) if recompute else run(hidden)
    assert bias is None
    return output[:, 0]


def run_layer(groups, device, *, sizes, style, tensors, rows, weights, recompute=False):
    """Outputs and input gradients of the real tokens [T, H], and this rank's shards of all parameter gradients."""
    layer = build(groups, sizes)
    fill(groups, layer, tensors, operations(sizes, style))
    row, cu_seqlens, real = packed(groups, rows)
    loss_weights = torch.zeros_like(row).index_copy_(0, real, torch.cat(weights))
    hidden = local(groups, row, cu_seqlens).clone().requires_grad_()
    output = forward(groups, layer, hidden, cu_seqlens, recompute=recompute)
    (output * local(groups, loss_weights, cu_seqlens)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=groups.cp)
    return {
        "output": whole(groups, output, cu_seqlens)[real],
        "input": whole(groups, hidden.grad, cu_seqlens)[real],
        "gradients": gradients,
    }


def outputs_only(groups, device, *, sizes, style, tensors, batches):
    """Outputs of the real tokens for each list of rows."""
    layer = build(groups, sizes)
    fill(groups, layer, tensors, operations(sizes, style))
    results = []
    with torch.no_grad():
        for rows in batches:
            row, cu_seqlens, real = packed(groups, rows)
            output = forward(groups, layer, local(groups, row, cu_seqlens), cu_seqlens)
            results.append(whole(groups, output, cu_seqlens)[real])
    return results


def trained(groups, device, *, sizes, style, tensors, rows, weights, dtype):
    """One clipped Adam step under DDP and the distributed optimizer: gradient norm, dtypes, parameters before and after."""
    layer = build(groups, sizes, params_dtype=dtype, bf16=dtype is torch.bfloat16)
    fill(groups, layer, tensors, operations(sizes, style))
    chunk = Float16Module(layer.config, layer) if dtype is torch.bfloat16 else layer
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    (model,) = build_ddp([chunk], groups)
    optimizer = build_optimizer([model], OptimizerSettings(lr=1e-3, weight_decay=0.1, clip_grad=0.05))
    optimizer.zero_grad()
    row, cu_seqlens, real = packed(groups, rows)
    loss_weights = torch.zeros_like(row).index_copy_(0, real, torch.cat(weights))
    output = forward(groups, layer, local(groups, row, cu_seqlens).to(dtype), cu_seqlens)
    (output.float() * local(groups, loss_weights, cu_seqlens)).sum().backward()
    model.finish_grad_sync()
    step = optimizer.step()
    after = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    main_grads = {parameter.main_grad.dtype for parameter in layer.parameters()}
    return {"norm": step.grad_norm, "before": before, "after": after, "main_grads": main_grads}


def sharded_pieces(groups, device, *, sizes, style, tensors):
    """(key, shape of the whole, offset, data) of everything a distributed checkpoint gets from this rank."""
    layer = build(groups, sizes)
    fill(groups, layer, tensors, operations(sizes, style))
    kept, state = (layer.sharded_state_dict(prefix="layer.") for _ in range(2))
    apply_factories(state)
    pieces, _ = extract_sharded_tensors(state)
    loaded = dict_list_map_outplace(lambda piece: piece.data, pieces)
    factories, _ = extract_matching_values(kept, lambda value: isinstance(value, ShardedTensorFactory))
    back = apply_factory_merges(loaded, factories)
    assert all(torch.equal(back[f"layer.{name}"], parameter) for name, parameter in layer.named_parameters())
    return [(piece.key, piece.global_shape, piece.global_offset, piece.data.detach()) for piece in nested_values(pieces)]


def build_without_kernel(groups, device, sizes):
    """The message of the error."""
    sys.modules["fla"] = None  # as if it were not installed
    try:
        build(groups, sizes, use_cpu_initialization=False)
    except ValueError as error:
        return str(error)
    finally:
        del sys.modules["fla"]
    return None
