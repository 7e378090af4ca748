"""Parameters that every family has, and those of its dense feed-forward layers."""

from __future__ import annotations

from models.mapping import FuseGatedQkv, FuseGateUp, FuseQkv, Rename, VocabRows
from models.spec import VOCAB_MULTIPLE, ModelSpec
from models.weight_map import Place, Template

LAYER = "decoder.layers.{layer}."
HF_LAYER = "{text}layers.{layer}."
ATTENTION = HF_LAYER + "self_attn."
MLP = HF_LAYER + "mlp."


def _full_attention(spec: ModelSpec, layer: int) -> bool:
    return not spec.is_linear(layer)


def _dense(spec: ModelSpec, layer: int) -> bool:
    return not spec.has_experts(layer)


EMBEDDING = Template(
    "embedding.word_embeddings.weight",
    ("{text}embed_tokens.weight",),
    lambda s: VocabRows(s.vocab_size, s.hidden_size, VOCAB_MULTIPLE),
    place=Place.FIRST,
)
FINAL_NORM = Template(
    "decoder.final_layernorm.weight", ("{text}norm.weight",), lambda s: Rename((s.hidden_size,)), place=Place.LAST
)
HEAD = Template(
    "output_layer.weight",
    ("lm_head.weight",),
    lambda s: VocabRows(s.vocab_size, s.hidden_size, VOCAB_MULTIPLE),
    place=Place.LAST,
)
TIED_HEAD = Template(HEAD.megatron, EMBEDDING.hugging_face, HEAD.op, place=Place.LAST, exported=False)

INPUT_NORM = Template(
    LAYER + "input_layernorm.weight", (HF_LAYER + "input_layernorm.weight",), lambda s: Rename((s.hidden_size,))
)
MLP_NORM = Template(
    LAYER + "pre_mlp_layernorm.weight", (HF_LAYER + "post_attention_layernorm.weight",), lambda s: Rename((s.hidden_size,))
)
QKV = Template(
    LAYER + "self_attention.linear_qkv.weight",
    (ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight"),
    lambda s: (FuseGatedQkv if s.attention_gate else FuseQkv)(s.num_heads, s.num_kv_heads, s.head_dim, s.hidden_size),
    applies=_full_attention,
)
QKV_BIAS = Template(
    LAYER + "self_attention.linear_qkv.bias",
    (ATTENTION + "q_proj.bias", ATTENTION + "k_proj.bias", ATTENTION + "v_proj.bias"),
    lambda s: FuseQkv(s.num_heads, s.num_kv_heads, s.head_dim),
    applies=lambda s, layer: s.qkv_bias and _full_attention(s, layer),
)
ATTENTION_OUTPUT = Template(
    LAYER + "self_attention.linear_proj.weight",
    (ATTENTION + "o_proj.weight",),
    lambda s: Rename((s.hidden_size, s.num_heads * s.head_dim), 1),
    applies=_full_attention,
)
QK_NORM = tuple(
    Template(
        LAYER + f"self_attention.{part}_layernorm.weight",
        (ATTENTION + f"{part}_norm.weight",),
        lambda s: Rename((s.head_dim,)),
        applies=lambda s, layer: s.qk_norm and _full_attention(s, layer),
    )
    for part in ("q", "k")
)
ATTENTION_LAYER = (QKV, ATTENTION_OUTPUT, QKV_BIAS, *QK_NORM)
DENSE_MLP = (
    Template(
        LAYER + "mlp.linear_fc1.weight",
        (MLP + "gate_proj.weight", MLP + "up_proj.weight"),
        lambda s: FuseGateUp(s.ffn_size, s.hidden_size),
        applies=_dense,
    ),
    Template(
        LAYER + "mlp.linear_fc2.weight",
        (MLP + "down_proj.weight",),
        lambda s: Rename((s.hidden_size, s.ffn_size), 1),
        applies=_dense,
    ),
)
