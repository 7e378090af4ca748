"""Vocabulary split over two tensor-parallel ranks equals one rank in float64, and every shard has its whole gradient."""

import pytest
import torch

from parallel.layout import ParallelLayout
from parallel.vocab import Readout, linear_logprob_entropy, vocab_parallel_logprob_entropy

LAYOUT = ParallelLayout(world=2, tp=2, sp=True)
HIDDEN = 6


def problem(vocab, padded):
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(3 * vocab) % vocab
    hidden = torch.randn(len(targets), HIDDEN, generator=generator)
    weight = torch.randn(padded, HIDDEN, generator=generator)
    return hidden, weight, targets, torch.randn(len(targets), generator=generator)


def shard(groups, padded):
    return slice(groups.at.tp * padded // 2, (groups.at.tp + 1) * padded // 2)


def logits_on_rank(groups, device, vocab, padded):
    hidden, weight, targets, upstream = problem(vocab, padded)
    logits = (hidden @ weight.T)[:, shard(groups, padded)].clone().requires_grad_()
    readout = Readout(vocab, tp_group=groups.tp, temperature=0.8, chunk_tokens=5)
    logprob, entropy = vocab_parallel_logprob_entropy(logits, targets, readout)
    (grad,) = torch.autograd.grad(logprob @ upstream, logits)
    return logprob.detach(), entropy, grad


def hidden_on_rank(groups, device, vocab, padded):
    hidden, weight, targets, upstream = problem(vocab, padded)
    local = weight[shard(groups, padded)].clone().requires_grad_()
    hidden.requires_grad_()
    readout = Readout(vocab, tp_group=groups.tp, temperature=0.8, chunk_tokens=5)
    logprob, entropy = linear_logprob_entropy(hidden, local, targets, readout)
    to_hidden, to_weight = torch.autograd.grad(logprob @ upstream, [hidden, local])
    return logprob.detach(), entropy, to_weight, to_hidden


def reference(vocab, padded):
    hidden, weight, targets, upstream = (t.double() if t.is_floating_point() else t for t in problem(vocab, padded))
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.T
    log_probs = (logits[:, :vocab] / 0.8).log_softmax(-1)
    logprob = log_probs.gather(1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    to_logits, to_hidden, to_weight = torch.autograd.grad(logprob @ upstream, [logits, hidden, weight])
    return logprob.detach(), entropy.detach(), to_logits, to_hidden, to_weight


# the last: all valid rows on rank 0, rank 1 holds padding only
@pytest.mark.parametrize(("vocab", "padded"), [(8, 8), (7, 12), (6, 12)])
def test_logits(ranks, vocab, padded):
    logprob, entropy, to_logits, *_ = reference(vocab, padded)
    results = ranks.run(logits_on_rank, LAYOUT, vocab, padded)
    for got_logprob, got_entropy, _ in results:
        torch.testing.assert_close(got_logprob.double(), logprob, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_entropy.double(), entropy, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(torch.cat([r[2] for r in results], 1).double(), to_logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("vocab", "padded"), [(8, 8), (7, 12), (6, 12)])
def test_hidden(ranks, vocab, padded):
    logprob, entropy, _, to_hidden, to_weight = reference(vocab, padded)
    results = ranks.run(hidden_on_rank, LAYOUT, vocab, padded)
    for got_logprob, got_entropy, _, got_hidden in results:
        torch.testing.assert_close(got_logprob.double(), logprob, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_entropy.double(), entropy, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_hidden.double(), to_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([r[2] for r in results]).double(), to_weight, rtol=1e-5, atol=1e-5)
