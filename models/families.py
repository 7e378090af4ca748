"""The known families as data: which Hugging Face keys they read, which settings they refuse, which parameters they have.

Adding a family that is made of these parts is one more `Family`; new parts are new templates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from models.families_dense import ATTENTION_LAYER, DENSE_MLP, EMBEDDING, FINAL_NORM, HEAD, INPUT_NORM, MLP_NORM, TIED_HEAD
from models.families_hybrid import DELTA_NET_LAYER, FLAT_INPUT, GROUPED_INPUT
from models.families_moe import EXPERTS, SHARED_EXPERT
from models.spec import ModelSpec
from models.weight_map import Template

MTP = r"mtp\."
VISION = r"model\.visual\."


@dataclass(frozen=True)
class Family:
    """A decoder family.

    refused: Hugging Face key -> the only values that are supported (a missing key is fine).
    default_head_dim: used where `head_dim` is missing; None means hidden_size / num_attention_heads.
    delta_net: the templates of a GatedDeltaNet layer, in this family's spelling; () where every layer is softmax attention.
        Such families also have a gate on the attention output and norms that scale by 1 + weight.
    rotary_fraction: used where `partial_rotary_factor` is missing; norm_topk_prob: used where that key is missing.
    text_config: the decoder's settings lie under that key, and its names begin with text_prefix.
    carried: patterns (re.match) of tensors that are no part of the decoder; see ModelSpec.carried.
    text_only: the architecture and model_type of the decoder alone, for a wrapper.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    moe: bool = False
    shared_expert: bool = False
    delta_net: tuple[Template, ...] = ()
    default_head_dim: int | None = None
    rotary_fraction: float = 1.0
    norm_topk_prob: bool = False
    refused: dict[str, tuple[object, ...]] = field(default_factory=dict)
    text_config: str | None = None
    text_prefix: str = "model."
    carried: tuple[str, ...] = ()
    text_only: tuple[str, str] | None = None


NO_SLIDING_WINDOW: dict[str, tuple[object, ...]] = {"use_sliding_window": (False, None)}
NO_BIAS: dict[str, tuple[object, ...]] = {"attention_bias": (False, None), "mlp_bias": (False, None)}

HYBRID = Family(
    qk_norm=True,
    default_head_dim=256,
    rotary_fraction=0.25,
    norm_topk_prob=True,
    delta_net=(FLAT_INPUT, *DELTA_NET_LAYER),
    refused=NO_BIAS | NO_SLIDING_WINDOW | {"attn_output_gate": (True, None), "norm_topk_prob": (True, None)},
    carried=(MTP, VISION),
)
HYBRID_MOE = replace(HYBRID, moe=True, shared_expert=True)


def _wrapped(family: Family, architecture: str, model_type: str) -> Family:
    """The same decoder inside a model with a vision tower, which is carried along."""
    return replace(family, text_config="text_config", text_prefix="model.language_model.", text_only=(architecture, model_type))


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(refused=NO_BIAS),
    "Qwen2ForCausalLM": Family(qkv_bias=True, refused=NO_SLIDING_WINDOW),
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128, refused=NO_BIAS | NO_SLIDING_WINDOW),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, moe=True, refused=NO_BIAS | NO_SLIDING_WINDOW),
    "Qwen3NextForCausalLM": replace(
        HYBRID_MOE,
        delta_net=(GROUPED_INPUT, *DELTA_NET_LAYER),
        refused=NO_BIAS | NO_SLIDING_WINDOW,
        carried=(MTP,),
    ),
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5MoeForCausalLM": HYBRID_MOE,
    "Qwen3_5ForConditionalGeneration": _wrapped(HYBRID, "Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": _wrapped(HYBRID_MOE, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}


def templates(spec: ModelSpec) -> tuple[Template, ...]:
    """Every kind of parameter the model can have, in export order."""
    mixer = (*ATTENTION_LAYER, *FAMILIES[spec.architecture].delta_net)
    head = TIED_HEAD if spec.tied_embeddings else HEAD
    return (EMBEDDING, INPUT_NORM, *mixer, MLP_NORM, *DENSE_MLP, *EXPERTS, *SHARED_EXPERT, FINAL_NORM, head)
