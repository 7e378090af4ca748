"""The known families as data: which Hugging Face keys they read, which settings they refuse, which parameters they have.

Adding a family that is made of these parts is one more `Family`; new parts are new templates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from models.mapping import FuseGateUp, FuseQkv, Rename, VocabRows
from models.spec import VOCAB_MULTIPLE, ModelSpec, MoeSpec
from models.weight_map import Place, Template

ATTENTION = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."
LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class Family:
    """A decoder family.

    refused: Hugging Face key -> the only values that are supported (a missing key is fine).
    default_head_dim: used where `head_dim` is missing; None means hidden_size / num_attention_heads.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    moe: bool = False
    default_head_dim: int | None = None
    refused: dict[str, tuple[object, ...]] = field(default_factory=dict)


def moe_of(spec: ModelSpec) -> MoeSpec:
    """The expert sizes; ValueError for a dense model."""
    if spec.moe is None:
        raise ValueError(f"{spec.architecture} has no experts")
    return spec.moe


EMBEDDING = Template(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    lambda s: VocabRows(s.vocab_size, s.hidden_size, VOCAB_MULTIPLE),
    place=Place.FIRST,
)
ATTENTION_BLOCK = (
    Template(
        LAYER + "input_layernorm.weight",
        ("model.layers.{layer}.input_layernorm.weight",),
        lambda s: Rename((s.hidden_size,)),
    ),
    Template(
        LAYER + "self_attention.linear_qkv.weight",
        (ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight"),
        lambda s: FuseQkv(s.num_heads, s.num_kv_heads, s.head_dim, s.hidden_size),
    ),
    Template(
        LAYER + "self_attention.linear_proj.weight",
        (ATTENTION + "o_proj.weight",),
        lambda s: Rename((s.hidden_size, s.num_heads * s.head_dim), 1),
    ),
    Template(
        LAYER + "pre_mlp_layernorm.weight",
        ("model.layers.{layer}.post_attention_layernorm.weight",),
        lambda s: Rename((s.hidden_size,)),
    ),
)
QKV_BIAS = Template(
    LAYER + "self_attention.linear_qkv.bias",
    (ATTENTION + "q_proj.bias", ATTENTION + "k_proj.bias", ATTENTION + "v_proj.bias"),
    lambda s: FuseQkv(s.num_heads, s.num_kv_heads, s.head_dim),
)
QK_NORM = (
    Template(LAYER + "self_attention.q_layernorm.weight", (ATTENTION + "q_norm.weight",), lambda s: Rename((s.head_dim,))),
    Template(LAYER + "self_attention.k_layernorm.weight", (ATTENTION + "k_norm.weight",), lambda s: Rename((s.head_dim,))),
)
DENSE_MLP = (
    Template(
        LAYER + "mlp.linear_fc1.weight",
        (MLP + "gate_proj.weight", MLP + "up_proj.weight"),
        lambda s: FuseGateUp(s.ffn_size, s.hidden_size),
    ),
    Template(LAYER + "mlp.linear_fc2.weight", (MLP + "down_proj.weight",), lambda s: Rename((s.hidden_size, s.ffn_size), 1)),
)
EXPERTS = (
    Template(
        LAYER + "mlp.router.weight",
        (MLP + "gate.weight",),
        lambda s: Rename((moe_of(s).num_experts, s.hidden_size)),
        own_dtype=True,
    ),
    Template(
        LAYER + "mlp.experts.{expert}.linear_fc1.weight",
        (MLP + "experts.{expert}.gate_proj.weight", MLP + "experts.{expert}.up_proj.weight"),
        lambda s: FuseGateUp(moe_of(s).ffn_size, s.hidden_size),
        per_expert=True,
    ),
    Template(
        LAYER + "mlp.experts.{expert}.linear_fc2.weight",
        (MLP + "experts.{expert}.down_proj.weight",),
        lambda s: Rename((s.hidden_size, moe_of(s).ffn_size), 1),
        per_expert=True,
    ),
)
FINAL_NORM = Template(
    "decoder.final_layernorm.weight", ("model.norm.weight",), lambda s: Rename((s.hidden_size,)), place=Place.LAST
)
HEAD = Template(
    "output_layer.weight",
    ("lm_head.weight",),
    lambda s: VocabRows(s.vocab_size, s.hidden_size, VOCAB_MULTIPLE),
    place=Place.LAST,
)
TIED_HEAD = Template(HEAD.megatron, EMBEDDING.hugging_face, HEAD.op, place=Place.LAST, exported=False)

NO_SLIDING_WINDOW: dict[str, tuple[object, ...]] = {"use_sliding_window": (False, None)}
NO_BIAS: dict[str, tuple[object, ...]] = {"attention_bias": (False, None), "mlp_bias": (False, None)}
EVERY_LAYER_SPARSE: dict[str, tuple[object, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(refused=NO_BIAS),
    "Qwen2ForCausalLM": Family(qkv_bias=True, refused=NO_SLIDING_WINDOW),
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128, refused=NO_BIAS | NO_SLIDING_WINDOW),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, moe=True, refused=NO_BIAS | NO_SLIDING_WINDOW | EVERY_LAYER_SPARSE),
}


def templates(spec: ModelSpec) -> tuple[Template, ...]:
    """Every kind of parameter the model has, in export order."""
    attention = ATTENTION_BLOCK[:-1] + ((QKV_BIAS,) if spec.qkv_bias else ()) + (QK_NORM if spec.qk_norm else ())
    mlp = EXPERTS if spec.moe is not None else DENSE_MLP
    head = TIED_HEAD if spec.tied_embeddings else HEAD
    return (EMBEDDING, *attention, ATTENTION_BLOCK[-1], *mlp, FINAL_NORM, head)
