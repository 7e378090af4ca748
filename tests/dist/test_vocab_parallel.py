"""Vocabulary split over two tensor-parallel ranks equals one rank in float64, and every shard has its whole gradient."""

import pytest
import torch

from parallel.layout import ParallelLayout
from parallel.vocab import Readout, linear_logprob_entropy

LAYOUT = ParallelLayout(world=2, tp=2, sp=True)
HIDDEN = 6


def problem(vocab, padded):
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(3 * vocab) % vocab
    hidden = torch.randn(len(targets), HIDDEN, generator=generator)
    weight = torch.randn(padded, HIDDEN, generator=generator)
    return hidden, weight, targets, *torch.randn(2, len(targets), generator=generator)


def on_rank(groups, device, vocab, padded):
    hidden, weight, targets, g, h = problem(vocab, padded)
    local = weight[groups.at.tp * padded // 2 : (groups.at.tp + 1) * padded // 2].clone().requires_grad_()
    hidden.requires_grad_()
    readout = Readout(vocab, tp_group=groups.tp, temperature=0.8, tile_tokens=5, tile_rows=3)
    logprob, entropy = linear_logprob_entropy(hidden, local, targets, readout)
    to_hidden, to_weight = torch.autograd.grad(logprob @ g + entropy @ h, [hidden, local])
    return logprob.detach(), entropy.detach(), to_weight, to_hidden


def reference(vocab, padded):
    hidden, weight, targets, g, h = (t.double() if t.is_floating_point() else t for t in problem(vocab, padded))
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs = ((hidden @ weight.T)[:, :vocab] / 0.8).log_softmax(-1)
    logprob = log_probs.gather(1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    to_hidden, to_weight = torch.autograd.grad(logprob @ g + entropy @ h, [hidden, weight])
    return logprob.detach(), entropy.detach(), to_weight, to_hidden


# the last: all valid rows on rank 0, rank 1 holds padding only
@pytest.mark.parametrize(("vocab", "padded"), [(8, 8), (7, 12), (6, 12)])
def test_two_shards_are_the_whole(ranks, vocab, padded):
    logprob, entropy, to_weight, to_hidden = reference(vocab, padded)
    results = ranks.run(on_rank, LAYOUT, vocab, padded)
    for got_logprob, got_entropy, _, got_hidden in results:
        torch.testing.assert_close(got_logprob.double(), logprob, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(got_entropy.double(), entropy, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(got_hidden.double(), to_hidden, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(torch.cat([r[2] for r in results]).double(), to_weight, rtol=1e-5, atol=1e-5)


def identity(groups, device):
    """Logits that are chosen: hidden states are the logits, the weight is this rank's part of the identity."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, 0.0, 3.0, -2.0]] * 3)
    local = torch.eye(8)[groups.at.tp * 4 : groups.at.tp * 4 + 4].clone().requires_grad_()
    targets = torch.tensor([0, 5, 7])
    logprob, _ = linear_logprob_entropy(logits, local, targets, Readout(8, tp_group=groups.tp))
    # d logp / d logit_j = onehot - softmax; with upstream 1 on row i, d / d weight_j = (onehot - softmax)_j x logits_i
    return [torch.autograd.grad(logprob[i], local, retain_graph=True)[0][:, 6] / 3.0 for i in range(3)], logits, targets


def test_every_shard_has_onehot_minus_softmax(ranks):
    results = ranks.run(identity, LAYOUT)
    (_, logits, targets), grads = results[0], [torch.cat([r[0][i] for r in results]) for i in range(3)]
    expected = torch.eye(8)[targets] - logits.softmax(-1)
    torch.testing.assert_close(torch.stack(grads), expected, rtol=0, atol=1e-6)
