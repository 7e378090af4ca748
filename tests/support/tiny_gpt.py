"""A small plain Megatron GPTModel whose weights depend on their names only, and how its tensors are cut over the ranks.

Used by the tests of parallel/: they compare layouts with one rank, so the same full model must exist on every layout.
"""

import re
import zlib

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

VOCAB = 96
LAYERS = 4
EXPERTS = 4


def config(layout, *, moe=True, **changes):
    settings = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "pipeline_dtype": torch.float32,
    }
    if moe:
        settings |= {
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
        }
    return TransformerConfig(**(settings | changes))


def build(groups, *, moe=True, tied=False, **changes):
    """The model chunks of this rank, with the weights of `full_tensor`."""
    layout = groups.layout
    chunks = []
    for stage in range(layout.chunks):
        settings = config(layout, moe=moe, **changes)
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, vp_stage=stage if layout.vpp else None)
        chunk = GPTModel(
            settings,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            rotary_base=10000,
            pre_process=groups.first_stage and stage == 0,
            post_process=groups.last_stage and stage == layout.chunks - 1,
            vp_stage=stage if layout.vpp else None,
        )
        with torch.no_grad():
            for name, parameter in names(chunk, groups):
                parameter.copy_(cut(full_tensor(name), name, groups))
        chunks.append(chunk)
    return chunks


def names(chunk, groups):
    """(name in the whole model, parameter) of a chunk: layers and experts numbered globally, tied output as embedding."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    per_rank = EXPERTS // groups.layout.ep
    for name, parameter in chunk.named_parameters():
        whole = re.sub(r"layers\.(\d+)", lambda found: f"layers.{numbers[int(found[1])]}", name)
        whole = re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{int(found[1]) + groups.at.ep * per_rank}", whole)
        if whole == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            whole = "embedding.word_embeddings.weight"
        yield whole, parameter


SHAPES = {
    "word_embeddings.weight": (VOCAB, 32),
    "output_layer.weight": (VOCAB, 32),
    "linear_qkv.weight": (64, 32),
    "linear_proj.weight": (32, 32),
    "q_layernorm.weight": (8,),
    "k_layernorm.weight": (8,),
    "layernorm.weight": (32,),
    "router.weight": (EXPERTS, 32),
    "mlp.linear_fc1.weight": (96, 32),
    "mlp.linear_fc2.weight": (32, 48),
    "linear_fc1.weight": (48, 32),
    "linear_fc2.weight": (32, 24),
}


def full_tensor(name):
    shape = next(shape for end, shape in SHAPES.items() if name.endswith(end))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1 + 0.1 * values if len(shape) == 1 else 0.2 * values


def cut(full, name, groups):
    """This rank's part of a full tensor."""
    experts = ".experts." in name
    size, index = (groups.layout.etp, groups.at.etp) if experts else (groups.layout.tp, groups.at.tp)
    if size == 1:
        return full
    if name.endswith("linear_fc1.weight"):
        gate, up = full.chunk(2)
        return torch.cat([gate.chunk(size)[index], up.chunk(size)[index]])
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")):
        return full.chunk(size)[index]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return full.chunk(size, dim=1)[index]
    return full


def samples(count, *, seed=0):
    """`count` sequences of uneven even lengths: token ids [T], labels [T], weights fp32 [T]."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = 6 + 2 * (index % 4)
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        weights = torch.rand(length, generator=generator) - 0.3
        made.append((ids[:-1], ids[1:], weights))
    return made


def token_losses(chunk, ids, labels):
    """-log p per token [1, T] on the last stage, hidden states elsewhere."""
    length = ids.numel()
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    return chunk(ids[None], torch.arange(length)[None], mask, labels=labels[None])


def forward_step(sample, chunk):
    ids, labels, weights = sample
    output = token_losses(chunk, ids, labels)

    def finish(losses):
        return (losses[0].float() * weights).sum(), losses[0].detach().clone()

    return output, finish


def share_of(groups, everything):
    """The samples of this data-parallel rank."""
    return everything[groups.at.dp :: groups.layout.dp]
