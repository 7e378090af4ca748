"""Packed attention against attention written out: an explicit mask over all pairs of tokens, in float64."""

from types import SimpleNamespace

import pytest
import torch

from models.attention import PackedAttention, packed_causal_attention
from parallel.context import shard_indices

HEADS, KV_HEADS, DIM = 6, 2, 8


def written_out(query, key, value, lengths, scale):
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(segment))
    allowed = (segment[:, None] == segment[None]) & (position[:, None] >= position[None])
    outputs = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = scale * query[:, head] @ key[:, shared].T
        outputs.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value[:, shared])
    return torch.stack(outputs, 1)


def tensors(lengths, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    made = [torch.randn(total, heads, DIM, generator=generator, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [tensor.requires_grad_() for tensor in made]


def borders(lengths):
    return tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())


@pytest.mark.parametrize("lengths", [[1], [7], [5, 1, 17, 33, 9, 2], [64] * 3, [1] * 20, [40, 3]], ids=str)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_values_and_gradients(lengths, scale):
    inputs = tensors(lengths)
    ours = packed_causal_attention(*inputs, borders(lengths), scale)
    want = written_out(*inputs, lengths, scale or DIM**-0.5)
    torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(want)
    for got, expected in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(want, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("chunks", [[1], [1, 3, 2, 7], [4, 4]], ids=str)
def test_queries_of_a_part_of_the_row(size, chunks):
    """Each context-parallel rank's queries against all keys; the gradient of the keys is the sum over ranks."""
    lengths = [2 * size * chunk for chunk in chunks]
    inputs, cu_seqlens = tensors(lengths), torch.tensor(borders(lengths))
    want = written_out(*inputs, lengths, DIM**-0.5)
    parts = [shard_indices(cu_seqlens, size, rank) for rank in range(size)]
    query, key, value = inputs
    ours = [
        packed_causal_attention(query[mine], key, value, borders(lengths), None, part=(rank, size))
        for rank, mine in enumerate(parts)
    ]
    for got, mine in zip(ours, parts, strict=True):
        torch.testing.assert_close(got, want[mine], rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(want)
    total = sum((got * upstream[mine]).sum() for got, mine in zip(ours, parts, strict=True))
    for got, expected in zip(torch.autograd.grad(total, inputs), torch.autograd.grad(want, inputs, upstream), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_bfloat16_is_close():
    lengths = [5, 12, 3]
    inputs = [tensor.detach().bfloat16() for tensor in tensors(lengths)]
    ours = packed_causal_attention(*inputs, borders(lengths), None)
    want = written_out(*(tensor.double() for tensor in inputs), lengths, DIM**-0.5)
    assert ours.dtype is torch.bfloat16
    assert float((ours - want).norm() / want.norm()) < 0.01


def test_a_token_sees_neither_neighbours_nor_the_future():
    lengths = [4, 6]
    query, key, value = tensors(lengths)
    out = packed_causal_attention(query, key, value, borders(lengths), None)
    (grad,) = torch.autograd.grad(out[6].sum(), value)
    seen = grad.abs().sum((1, 2)) > 0
    assert seen.tolist() == [False] * 4 + [True] * 3 + [False] * 3


def test_borders_must_cover_the_row():
    with pytest.raises(ValueError, match=r"runs from 0 to 4, but there are 5 tokens"):
        packed_causal_attention(*tensors([5]), (0, 4), None)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"layout.cp = 2: the attention was given no process groups"):
        PackedAttention(SimpleNamespace(context_parallel_size=2, attention_dropout=0.0))
    with pytest.raises(ValueError, match=r"attention_dropout = 0.1"):
        PackedAttention(SimpleNamespace(context_parallel_size=1, attention_dropout=0.1))
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1, attention_dropout=0.0))
    with pytest.raises(ValueError, match="needs packed sequences"):
        attention(*tensors([5]))
