"""The chunked gated delta rule is the token-by-token one, in values and gradients, and nothing crosses a segment border."""

import math
import sys
from itertools import pairwise

import pytest
import torch

from models.delta_net_kernel import DeltaNetKernel, check_kernel, preflight
from models.gated_delta_rule import (
    DeltaRuleInputs,
    causal_convolution,
    chunked_gated_delta_rule,
    recurrent_gated_delta_rule,
)

K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 5, 3
LENGTHS = [1, 2, 63, 64, 65, 130]


def inputs(tokens, *, seed=0, dtype=torch.float32, decay=1.0):
    torch.manual_seed(seed)
    x = DeltaRuleInputs(
        q=torch.randn(tokens, K_HEADS, K_DIM),
        k=torch.randn(tokens, K_HEADS, K_DIM),
        v=torch.randn(tokens, V_HEADS, V_DIM),
        log_decay=-decay * torch.rand(tokens, V_HEADS),
        beta=torch.rand(tokens, V_HEADS),
    )
    return DeltaRuleInputs(*(t.to(dtype).requires_grad_() for t in x))


def borders_of(lengths):
    return (0, *torch.tensor(lengths).cumsum(0).tolist())


def with_gradients(rule, x, borders):
    """Output and the gradients of a weighted sum of it."""
    out = rule(x, borders)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), torch.autograd.grad((out * weights).sum(), x)


def close(got, want, tolerance):
    return (got - want).norm() <= tolerance * want.norm()


def test_first_tokens_by_hand():
    """One head, two tokens: o_1 = beta_1 (k_1.q_1) v_1 / sqrt(2); the second by the rule written out."""
    unit = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    x = DeltaRuleInputs(
        q=unit[:, None] * 3,
        k=unit[:, None] * 7,
        v=torch.tensor([[2.0], [5.0]], dtype=torch.float64)[:, None],
        log_decay=torch.tensor([[-1.0], [math.log(0.5)]], dtype=torch.float64),
        beta=torch.tensor([[0.5], [0.25]], dtype=torch.float64),
    )
    # S_1 = (1, 0)^T x 0.5 x 2; then half of it is left, k_2 finds 0.6 x 0.5 = 0.3 and writes 0.25 (5 - 0.3)
    second = torch.tensor([0.5 + 0.6 * 1.175, 0.8 * 1.175], dtype=torch.float64) @ unit[1]
    want = torch.tensor([1.0, second]) / math.sqrt(2)
    for rule in (recurrent_gated_delta_rule, chunked_gated_delta_rule):
        assert torch.allclose(rule(x, (0, 2)).flatten(), want.double(), rtol=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_is_recurrent(length):
    x = inputs(length)
    got, got_gradients = with_gradients(chunked_gated_delta_rule, x, (0, length))
    want, want_gradients = with_gradients(recurrent_gated_delta_rule, x, (0, length))
    assert (got - want).abs().max() <= 1e-5
    everything = torch.cat([g.flatten() for g in want_gradients]).norm()
    for g, w in zip(got_gradients, want_gradients, strict=True):
        assert (g - w).norm() <= 1e-5 * w.norm() + 1e-7 * everything


@pytest.mark.parametrize("decay", [1e-4, 1.0, 30.0])
def test_chunked_is_recurrent_in_double(decay):
    """With hardly any decay and with one that forgets everything; the order of sums is all that differs."""
    x = inputs(150, dtype=torch.float64, decay=decay)
    got, got_gradients = with_gradients(chunked_gated_delta_rule, x, (0, 20, 150))
    want, want_gradients = with_gradients(recurrent_gated_delta_rule, x, (0, 20, 150))
    assert close(got, want, 1e-12)
    for g, w in zip(got_gradients, want_gradients, strict=True):
        assert close(g, w, 1e-10)


@pytest.mark.parametrize("rule", [chunked_gated_delta_rule, recurrent_gated_delta_rule])
def test_packed_is_alone(rule):
    lengths = [65, 1, 130, 63, 2, 64]
    borders = borders_of(lengths)
    x = inputs(borders[-1])
    packed, packed_gradients = with_gradients(rule, x, borders)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    for start, length in zip(borders[:-1], lengths, strict=True):
        part = DeltaRuleInputs(*(t.detach()[start : start + length].requires_grad_() for t in x))
        alone = rule(part, (0, length))
        gradients = torch.autograd.grad((alone * weights[start : start + length]).sum(), part)
        assert (packed[start : start + length] - alone).abs().max() <= 1e-5
        for whole, one in zip(packed_gradients, gradients, strict=True):
            assert (whole[start : start + length] - one).norm() <= 1e-5 * one.norm() + 1e-7


@pytest.mark.parametrize("noisy", range(4))
def test_noise_in_one_sample_leaves_its_neighbours_bits(noisy):
    borders = borders_of([65, 3, 64, 130])
    clean = inputs(borders[-1])
    start, stop = borders[noisy], borders[noisy + 1]
    noise = inputs(borders[-1], seed=7)
    changed = []
    for one, other in zip(clean, noise, strict=True):
        mixed = one.detach().clone()
        mixed[start:stop] = other.detach()[start:stop] * 1e3
        changed.append(mixed)
    changed[2][start] = torch.inf
    before = chunked_gated_delta_rule(clean, borders)
    after = chunked_gated_delta_rule(DeltaRuleInputs(*changed), borders)
    others = torch.ones(borders[-1], dtype=torch.bool)
    others[start:stop] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[start:stop], after[start:stop])


@pytest.mark.parametrize("rule", [chunked_gated_delta_rule, recurrent_gated_delta_rule])
def test_zero_keys_have_finite_gradients(rule):
    x = inputs(70)
    x = x._replace(q=torch.zeros_like(x.q).requires_grad_(), k=torch.zeros_like(x.k).requires_grad_())
    out, gradients = with_gradients(rule, x, (0, 70))
    assert not out.any()
    assert all(g.isfinite().all() for g in gradients)


def test_later_tokens_change_nothing():
    x = inputs(130)
    whole = chunked_gated_delta_rule(x, (0, 130))
    for stop in (1, 64, 100):
        assert (chunked_gated_delta_rule(DeltaRuleInputs(*(t[:stop] for t in x)), (0, stop)) - whole[:stop]).abs().max() <= 1e-6


def test_bfloat16_inputs_are_computed_in_float32():
    x = inputs(100, dtype=torch.bfloat16)
    out = chunked_gated_delta_rule(x, (0, 100))
    exact = recurrent_gated_delta_rule(DeltaRuleInputs(*(t.double() for t in x)), (0, 100))
    assert out.dtype is torch.bfloat16
    assert torch.allclose(out.double(), exact, rtol=2**-8, atol=1e-5)


def test_borders_must_cover_the_tokens():
    for rule in (chunked_gated_delta_rule, recurrent_gated_delta_rule):
        with pytest.raises(ValueError, match="runs from 0 to 9, but there are 10 tokens"):
            rule(inputs(10), (0, 4, 9))


def convolve_by_loop(x, weight, borders):
    out = torch.zeros_like(x)
    for start, stop in pairwise(borders):
        for t in range(start, stop):
            for channel in range(x.shape[1]):
                total = sum(weight[channel, 0, 3 - back] * x[t - back, channel] for back in range(4) if t - back >= start)
                out[t, channel] = total * torch.sigmoid(total)
    return out


def test_convolution_is_the_loop_over_channels():
    torch.manual_seed(0)
    borders = borders_of([5, 1, 2, 9])
    x = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 1, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(17, 6, dtype=torch.float64)
    got, want = causal_convolution(x, weight, borders), convolve_by_loop(x, weight, borders)
    assert torch.allclose(got, want, rtol=1e-12)
    for g, w in zip(
        torch.autograd.grad((got * weights).sum(), (x, weight)),
        torch.autograd.grad((want * weights).sum(), (x, weight)),
        strict=True,
    ):
        assert torch.allclose(g, w, rtol=1e-10)


def test_convolution_of_a_row_shorter_than_the_kernel():
    x, weight = torch.randn(2, 3), torch.randn(3, 1, 4)
    assert torch.allclose(causal_convolution(x, weight, (0, 2)), convolve_by_loop(x, weight, (0, 2)), atol=1e-6)


def test_output_depends_on_four_inputs_of_its_segment():
    x, weight = torch.randn(12, 3, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda value: causal_convolution(value, weight, (0, 5, 12)), x)
    for t in range(12):
        seen = [s for s in range(12) if jacobian[t, :, s].any()]
        first = 0 if t < 5 else 5
        assert seen == list(range(max(first, t - 3), t + 1))


def test_a_kernel_changes_its_channel_only():
    x, weight = torch.randn(9, 5), torch.randn(5, 1, 4)
    other = weight.clone()
    other[3] += 1
    changed = (causal_convolution(x, weight, (0, 9)) != causal_convolution(x, other, (0, 9))).any(0)
    assert changed.tolist() == [False, False, False, True, False]


def test_infinities_do_not_cross_a_border():
    x, weight = torch.randn(10, 3), torch.randn(3, 1, 4)
    clean = causal_convolution(x, weight, (0, 4, 10))
    x[3] = torch.inf
    assert torch.equal(causal_convolution(x, weight, (0, 4, 10))[4:], clean[4:])


def test_preflight_on_the_cpu():
    assert 0 < preflight(torch.device("cpu")) < 1e-5
    with pytest.raises(RuntimeError, match="away from its reference"):
        preflight(torch.device("cpu"), tolerance=1e-12)


def test_a_missing_kernel_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)  # as if it were not installed
    check_kernel(torch.device("cpu"))
    with pytest.raises(ValueError, match="flash-linear-attention"):
        check_kernel(torch.device("cuda"))


def test_kernels_are_called_as_their_package_documents():
    """One row as a batch of one, int64 borders; q and k go in as they are, with fewer heads than v."""
    borders = (0, 3, 10)

    def chunk_gated_delta_rule(q, k, v, *, g, beta, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        assert q.shape == k.shape == (1, 10, K_HEADS, K_DIM)
        assert use_qk_l2norm_in_kernel
        assert scale is None
        assert cu_seqlens.dtype is torch.int64
        row = DeltaRuleInputs(q[0], k[0], v[0], g[0], beta[0])
        return recurrent_gated_delta_rule(row, tuple(cu_seqlens.tolist()))[None], None

    def causal_conv1d(x, weight=None, activation=None, cu_seqlens=None):
        assert weight.shape == (6, 4)
        assert activation == "silu"
        assert cu_seqlens.dtype is torch.int64
        return causal_convolution(x[0], weight[:, None], tuple(cu_seqlens.tolist()))[None], None

    kernel = DeltaNetKernel(chunk_gated_delta_rule, causal_conv1d)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    x, row, weight = inputs(10), torch.randn(10, 6), torch.randn(6, 1, 4)
    assert torch.allclose(kernel.rule(x, cu_seqlens), chunked_gated_delta_rule(x, borders), atol=1e-5)
    assert torch.equal(kernel.convolution(row, weight, cu_seqlens), causal_convolution(row, weight, borders))
