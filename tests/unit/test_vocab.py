"""Log-prob and entropy against float64 log_softmax: values, gradients, chunks, padding, temperature."""

import pytest
import torch

from parallel.vocab import Readout, linear_logprob_entropy, vocab_parallel_logprob_entropy

TOKENS, VOCAB, PADDED, HIDDEN = 23, 61, 64, 12


def problem():
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(PADDED, HIDDEN)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS)


def reference(logits, targets, temperature=1.0):
    log_probs = (logits.double()[:, :VOCAB] / temperature).log_softmax(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 23, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_from_logits(chunk, temperature):
    hidden, weight, targets, upstream = problem()
    logits = (hidden @ weight.T).requires_grad_()
    untouched = logits.detach().clone()
    exact = logits.detach().double().requires_grad_()
    expected, expected_entropy = reference(exact, targets, temperature)
    readout = Readout(VOCAB, temperature=temperature, chunk_tokens=chunk)
    logprob, entropy = vocab_parallel_logprob_entropy(logits, targets, readout)
    torch.testing.assert_close(logprob.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=2e-6)
    (grad,) = torch.autograd.grad(logprob @ upstream, logits)
    (expected_grad,) = torch.autograd.grad(expected @ upstream.double(), exact)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=2e-6)
    assert grad[:, VOCAB:].abs().max() == 0.0
    assert torch.equal(logits, untouched) and logprob.dtype == torch.float32 and not entropy.requires_grad


@pytest.mark.parametrize("chunk", [5, 512])
def test_from_hidden(chunk):
    hidden, weight, targets, upstream = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    exact_hidden, exact_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected, expected_entropy = reference(exact_hidden @ exact_weight.T, targets, 0.7)
    readout = Readout(VOCAB, temperature=0.7, chunk_tokens=chunk)
    logprob, entropy = linear_logprob_entropy(hidden, weight, targets, readout)
    torch.testing.assert_close(logprob.double(), expected, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=4e-6)
    grads = torch.autograd.grad(logprob @ upstream, [hidden, weight])
    expected_grads = torch.autograd.grad(expected @ upstream.double(), [exact_hidden, exact_weight])
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_values_do_not_depend_on_the_chunk():
    hidden, weight, targets, _ = problem()
    logits = hidden @ weight.T
    whole = vocab_parallel_logprob_entropy(logits, targets, Readout(VOCAB))
    cut = vocab_parallel_logprob_entropy(logits, targets, Readout(VOCAB, chunk_tokens=3))
    assert torch.equal(whole[0], cut[0]) and torch.equal(whole[1], cut[1])


def test_temperature_by_hand():
    # logits 2, 1, 0 at T = 0.5
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    logprob, _ = vocab_parallel_logprob_entropy(logits, torch.arange(3), Readout(3, temperature=0.5))
    torch.testing.assert_close(logprob, torch.tensor([-0.1429, -2.1429, -4.1429]), rtol=0, atol=5e-5)


def test_padding_content_is_irrelevant():
    hidden, weight, targets, _ = problem()
    logits = hidden @ weight.T
    expected = vocab_parallel_logprob_entropy(logits, targets, Readout(VOCAB))
    for poison in (1e9, float("nan"), float("inf")):
        logits[:, VOCAB:] = poison
        result = vocab_parallel_logprob_entropy(logits, targets, Readout(VOCAB))
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]]).requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.tensor([0]), Readout(3))
    (grad,) = torch.autograd.grad(logprob.sum(), logits)
    assert logprob.item() == 0.0 and entropy.item() == 0.0 and grad.isfinite().all()


def test_no_tokens():
    logits = torch.zeros(0, 8).requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(logits, torch.zeros(0, dtype=torch.int64), Readout(8))
    (grad,) = torch.autograd.grad(logprob.sum(), logits)
    assert logprob.shape == entropy.shape == (0,) and grad.shape == (0, 8)


def test_refusals():
    with pytest.raises(ValueError, match="cannot hold vocab_size=9"):
        Readout(9).shard(8)
    with pytest.raises(ValueError, match="temperature=0"):
        Readout(4, temperature=0.0)
