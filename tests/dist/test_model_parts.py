"""Single parts of a Megatron layer, as the model builds them, against their definition or transformers' module."""

import math

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from model_ranks import loaded
from tiny_models import tiny_model, write_tiny

from models.norm import RMSNorm
from models.router import router_pass
from parallel.layout import ParallelLayout

ONE = ParallelLayout()


def shared_expert_on_rank(groups, device, folder, hidden, gate):
    """Output of layer 0's shared expert with its gate's weight filled with `gate` (None: the checkpoint's)."""
    _, chunks = loaded(groups, folder)
    shared = chunks[0].decoder.layers[0].mlp.shared_experts
    with torch.no_grad():
        if gate is not None:
            shared.gate_weight.fill_(gate)
        return shared(hidden[:, None])[:, 0]


@pytest.mark.parametrize(("gate", "factor"), [(0.0, 0.5), (100.0, 1.0), (-100.0, 0.0), (None, None)])
def test_the_shared_experts_gate(ranks, tmp_path, gate, factor):
    """Weight 0 lets exactly half of it through, a large one all of it, a large negative one nothing."""
    model = write_tiny(tmp_path, "qwen3_5_moe")
    block = model.model.layers[0].mlp
    hidden = torch.rand(7, 48, generator=torch.Generator().manual_seed(2)) + 0.1
    (got,) = ranks.run(shared_expert_on_rank, ONE, str(tmp_path), hidden, gate)
    with torch.no_grad():
        plain = block.shared_expert(hidden)
        want = plain * (block.shared_expert_gate(hidden).sigmoid() if factor is None else factor)
    assert plain.abs().max() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def moe_layer_on_rank(groups, device, folder, hidden):
    """Output of layer 0's feed-forward part, and its router's probabilities."""
    _, chunks = loaded(groups, folder)
    layer = chunks[0].decoder.layers[0].mlp
    with torch.no_grad(), router_pass(chunks, "eval", torch.ones(len(hidden), dtype=torch.bool)):
        probabilities, _ = layer.router(hidden[:, None])
        output, _ = layer(hidden[:, None])
    return output[:, 0], probabilities


@pytest.mark.parametrize(("renormalised", "scores"), [(True, (0.7311, 0.2689)), (False, (0.6439, 0.2369))])
def test_router_scores(ranks, tmp_path, renormalised, scores):
    """Logits 2, 1, 0, -1 with two chosen: a softmax over those two, or over all four; and transformers' whole layer."""
    model = tiny_model("qwen3_next", num_experts=4, norm_topk_prob=renormalised)
    block = model.model.layers[0].mlp
    with torch.no_grad():
        block.gate.weight[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    model.save_pretrained(tmp_path)
    hidden = torch.randn(9, 48, generator=torch.Generator().manual_seed(3))
    hidden[0] = torch.eye(48)[0]
    ((output, probabilities),) = ranks.run(moe_layer_on_rank, ONE, str(tmp_path), hidden)
    torch.testing.assert_close(probabilities[0], torch.tensor([*scores, 0.0, 0.0]), rtol=0, atol=5e-5)
    with torch.no_grad():
        torch.testing.assert_close(output, block(hidden[None])[0], rtol=1e-5, atol=1e-6)


def rotated_on_rank(groups, device, folder, heads):
    """Packed heads [T, heads, head dim] of one sequence after the model's own rotary embedding."""
    _, chunks = loaded(groups, folder)
    angles = chunks[0].rotary_pos_emb(len(heads))
    borders = torch.tensor([0, len(heads)], dtype=torch.int32)
    return apply_rotary_pos_emb(heads, angles, config=chunks[0].config, cu_seqlens=borders, cp_group=groups.megatron.cp)


def test_a_quarter_of_each_head_turns(ranks, tmp_path):
    """x1 cos - x2 sin and x2 cos + x1 sin with angle position x theta^(-2i/4), i = 0, 1; the other 12 dimensions stay."""
    write_tiny(tmp_path, "qwen3_5")
    heads = torch.randn(101, 3, 16, generator=torch.Generator().manual_seed(4))
    (got,) = ranks.run(rotated_on_rank, ONE, str(tmp_path), heads)
    assert torch.equal(got[..., 4:], heads[..., 4:])
    for position in (0, 7, 100):
        for i, angle in enumerate((position * 1.0, position * 0.01)):
            x1, x2 = heads[position, :, i], heads[position, :, i + 2]
            torch.testing.assert_close(got[position, :, i], x1 * math.cos(angle) - x2 * math.sin(angle), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[position, :, i + 2], x2 * math.cos(angle) + x1 * math.sin(angle), rtol=1e-5, atol=1e-5)


class Config:
    """What a norm reads of Megatron's configuration."""

    params_dtype = torch.bfloat16
    sequence_parallel = False

    def __init__(self, *, zero_centered):
        self.layernorm_zero_centered_gamma = zero_centered


@pytest.mark.parametrize("zero_centered", [True, False])
def test_what_a_norm_scales_by(zero_centered):
    """Zero-centred: 1 + weight in fp32, though 1 + weight = 1 in bf16; a new norm of either kind scales by 1."""
    norm = RMSNorm(Config(zero_centered=zero_centered), 4, eps=0.0)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert torch.equal(norm(x), x)
    with torch.no_grad():
        norm.weight.fill_(0.001)
    small = float(torch.tensor(0.001, dtype=torch.bfloat16))
    torch.testing.assert_close(norm(x), x * (1.0 + small if zero_centered else small), rtol=1e-6, atol=0)
