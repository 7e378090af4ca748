"""Each patch of vLLM's CPU build by itself, against vLLM's own kernels in this process. (Two more are in test_sync_engine.)"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from mcore_rl.rollout import vllm_cpu_patches, vllm_layout, vllm_readback, vllm_transfer


def test_another_vllm_is_refused(monkeypatch):
    vllm_cpu_patches.check_version()
    monkeypatch.setattr(vllm_cpu_patches.vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"vllm 0\.33\.0: the CPU patches of mcore_rl are written for 0\.32\.x"):
        vllm_cpu_patches.check_version()


def test_registering_twice_changes_nothing():
    vllm_transfer.register()
    apply = CPUUnquantizedExperts.apply
    vllm_transfer.register()
    assert CPUUnquantizedExperts.apply is apply


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (96, 160), (192, 416)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_undoes_packing(rows, columns, dtype):
    """192 x 416 has more elements than 16 bits count. Odd values too: infinities, NaN, -0, subnormals survive as bits."""
    weight = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, 0, :5] = torch.tensor([float("inf"), -float("inf"), -0.0, float("nan"), 1e-40]).to(dtype)
    packed = cpu_prepack_moe_weight(weight, "vec")
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert not torch.equal(packed.view(bits), weight.view(bits))
    for one, expert in zip(packed, weight, strict=True):
        assert torch.equal(vllm_readback.unpack(one, "vec").view(bits), expert.view(bits))


def test_a_packing_that_is_no_permutation_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_readback, "cpu_prepack_moe_weight", lambda weight, isa: torch.zeros_like(weight))
    vllm_readback.packing_order.cache_clear()
    with pytest.raises(RuntimeError, match="is no permutation"):
        vllm_readback.packing_order(32, 32, "vec", torch.float32)
    vllm_readback.packing_order.cache_clear()


def moe_reference(hidden, w13, w2, weights, ids):
    """sum_k weight_k * down(silu(gate x) * (up x)), token by token, from the definition."""
    result = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (w13[expert] @ hidden[token]).chunk(2)
            result[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return result


def run_experts(hidden, w13, w2, weights, ids, expert_map):
    output = torch.empty_like(hidden)
    packed = [cpu_prepack_moe_weight(weight, "vec") for weight in (w13, w2)]
    experts = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")
    rest = dict.fromkeys(("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"))
    CPUUnquantizedExperts.apply(
        experts,
        output,
        hidden,
        *packed,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.SILU,
        global_num_experts=6,
        expert_map=expert_map,
        apply_router_weight_on_input=False,
        **rest,
    )
    return output


def test_experts_of_two_workers_add_up_to_all():
    """Expert parallel: each worker has half of the experts and a map; the kernel must not touch the others."""
    vllm_cpu_patches.map_expert_ids()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 64, generator=generator)
    w13 = torch.randn(6, 64, 64, generator=generator) * 0.1
    w2 = torch.randn(6, 64, 32, generator=generator) * 0.1
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(7)]).int()
    weights = torch.rand(7, 2, generator=generator)
    whole = run_experts(hidden, w13, w2, weights, ids, None)
    first = run_experts(hidden, w13[:3], w2[:3], weights, ids, torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32))
    second = run_experts(hidden, w13[3:], w2[3:], weights, ids, torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32))
    torch.testing.assert_close(whole, moe_reference(hidden, w13, w2, weights, ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first + second, whole, atol=1e-6, rtol=1e-5)


def test_one_hugging_face_tensor_that_is_three_outputs_of_the_engine():
    """Qwen3.5's in_proj_qkv on the second of two workers: its own q, k and v rows, which lie apart in the whole tensor."""
    layer = SimpleNamespace(output_sizes=[4, 4, 6, 6], tp_size=2, tp_rank=1)
    parts = vllm_layout._merged_parts(layer, {(0, 1, 2): "qkv", 3: "z"})
    assert parts == [("qkv", 14, 0, 2, 2, 0), ("qkv", 14, 0, 6, 2, 2), ("qkv", 14, 0, 11, 3, 4), ("z", 6, 0, 3, 3, 7)]
