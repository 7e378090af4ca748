"""Log-prob and entropy against float64 log_softmax: values, gradients, chunks, padding, temperature, memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.vocab import Readout, linear_logprob_entropy, linear_logprobs_entropy

TOKENS, VOCAB, PADDED, HIDDEN = 23, 61, 64, 12


def problem():
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(PADDED, HIDDEN)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS), torch.randn(TOKENS)


def reference(hidden, weight, targets, temperature=1.0):
    log_probs = ((hidden @ weight.T)[:, :VOCAB] / temperature).log_softmax(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def both(readout):
    """(ours, the float64 reference): log-prob, entropy, gradients of hidden and weight for g . logprob + h . entropy."""
    hidden, weight, targets, g, h = problem()
    results = []
    for dtype, function in ((torch.float32, linear_logprob_entropy), (torch.float64, reference)):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        logprob, entropy = function(*leaves, targets, readout if dtype is torch.float32 else readout.temperature)
        grads = torch.autograd.grad(logprob @ g.to(dtype) + entropy @ h.to(dtype), leaves)
        results.append((logprob.detach(), entropy.detach(), *grads))
    return results


TILES = [(1, 61), (7, 10), (23, 1), (512, 512)]  # tokens, vocabulary rows


def cut_in(tile, vocab=VOCAB, temperature=1.0):
    return Readout(vocab, temperature=temperature, tile_tokens=tile[0], tile_rows=tile[1])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients(tile, temperature):
    ours, theirs = both(cut_in(tile, temperature=temperature))
    assert ours[0].dtype is ours[1].dtype is torch.float32
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5)
    assert ours[3][VOCAB:].abs().max() == 0.0


def test_one_output_alone():
    hidden, weight, targets, g, _ = problem()
    for which in (0, 1):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        ours = torch.autograd.grad(linear_logprob_entropy(*leaves, targets, Readout(VOCAB))[which] @ g, leaves)
        theirs = torch.autograd.grad(reference(*exact, targets)[which] @ g.double(), exact)
        for got, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5)


def test_nothing_depends_on_the_tile():
    whole, _ = both(Readout(VOCAB))
    for tile in ((1, 1), (3, 60), (8, 7)):
        cut, _ = both(cut_in(tile))
        for one, other in zip(whole, cut, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def of_logits(logits, targets, temperature=1.0):
    """The same for given logits: hidden states are the logits, the weight is the identity."""
    vocab = logits.shape[1]
    return linear_logprob_entropy(logits, torch.eye(vocab), targets, Readout(vocab, temperature=temperature))


def test_temperature_by_hand():
    # logits 2, 1, 0 at T = 0.5
    logprob, _ = of_logits(torch.tensor([[2.0, 1.0, 0.0]] * 3), torch.arange(3), temperature=0.5)
    torch.testing.assert_close(logprob, torch.tensor([-0.1429, -2.1429, -4.1429]), rtol=0, atol=5e-5)


def test_gradient_by_hand():
    # uniform over 4: d logp / d logits = onehot - 1/4, and the entropy is at its maximum ln 4 with gradient 0
    logits = torch.zeros(1, 4).requires_grad_()
    logprob, entropy = of_logits(logits, torch.tensor([2]))
    assert entropy.item() == pytest.approx(1.3862944, abs=1e-6)
    (grad,) = torch.autograd.grad(logprob.sum(), logits, retain_graph=True)
    torch.testing.assert_close(grad, torch.tensor([[-0.25, -0.25, 0.75, -0.25]]))
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    assert grad.abs().max() <= 1e-6


def test_padding_rows_are_irrelevant():
    hidden, weight, targets, g, _ = problem()
    hidden.requires_grad_()
    expected = linear_logprob_entropy(hidden, weight, targets, Readout(VOCAB))
    (expected_grad,) = torch.autograd.grad(expected[0] @ g, hidden)
    for poison in (1e9, float("nan"), float("inf")):
        weight[VOCAB:] = poison
        got = linear_logprob_entropy(hidden, weight, targets, Readout(VOCAB))
        (grad,) = torch.autograd.grad(got[0] @ g, hidden)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and torch.equal(grad, expected_grad)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]]).requires_grad_()
    logprob, entropy = of_logits(logits, torch.tensor([0]))
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
    assert logprob.item() == 0.0 and entropy.item() == 0.0 and grad.isfinite().all()


@pytest.mark.parametrize("shift", [50.0, 300.0, 1e4])
@pytest.mark.parametrize("tile", [(512, 512), (7, 10)])
def test_large_logits_cost_no_digits(shift, tile):
    """A common shift leaves log-probs and their gradient as they are; log-sum-exp as one number would round them to it."""
    logits = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(0)) + shift
    exact, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
    targets = torch.arange(TOKENS)
    wanted = exact.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprob, _ = linear_logprob_entropy(ours, torch.eye(VOCAB), targets, cut_in(tile))
    assert (logprob.double() - wanted).abs().max() <= 1e-6
    (grad,) = torch.autograd.grad(logprob.sum(), ours)
    (grad_wanted,) = torch.autograd.grad(wanted.sum(), exact)
    assert (grad.double() - grad_wanted).abs().max() <= 1e-6


@pytest.mark.parametrize("size", [-3e38, -1e38, 1e38, 3e38])
@pytest.mark.parametrize("tile", [(512, 512), (1, 1)])
def test_equal_logits_of_any_size_are_uniform(size, tile):
    logprob, entropy = linear_logprob_entropy(torch.full((2, 4), size), torch.eye(4), torch.tensor([0, 3]), cut_in(tile, vocab=4))
    torch.testing.assert_close(logprob, torch.full((2,), -1.3862944))
    torch.testing.assert_close(entropy, torch.full((2,), 1.3862944))


@pytest.mark.parametrize("wrong", [-1, -100, VOCAB, PADDED - 1, 10**6])
def test_a_target_outside_the_vocabulary_is_refused(wrong):
    hidden, weight, targets, _, _ = problem()
    targets[3] = wrong
    with pytest.raises(ValueError, match=f"target {wrong} is outside the vocabulary of {VOCAB}"):
        linear_logprob_entropy(hidden, weight, targets, Readout(VOCAB))
    with pytest.raises(ValueError, match="one row per token"):
        linear_logprob_entropy(hidden, weight, targets[:-1], Readout(VOCAB))


def test_no_tokens():
    hidden, weight = torch.zeros(0, 8).requires_grad_(), torch.zeros(8, 8).requires_grad_()
    logprob, entropy = linear_logprob_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), Readout(8))
    grads = torch.autograd.grad(logprob.sum(), [hidden, weight])
    assert logprob.shape == entropy.shape == (0,) and grads[0].shape == (0, 8) and not grads[1].any()


def test_bf16_gradient_is_added_up_in_fp32():
    """Tiles of one token: adding 512 bf16 outer products up in bf16 would lose most of a small one to rounding."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    targets = torch.randint(0, 16, (512,))
    found = []
    for chunk in (1, 512):
        leaf = weight.clone().requires_grad_()
        logprob, _ = linear_logprob_entropy(hidden, leaf, targets, cut_in((chunk, 16), vocab=16))
        found.append(torch.autograd.grad(logprob.sum(), leaf)[0].float())
    assert (found[0] - found[1]).norm() <= 1e-2 * found[1].norm()


class LargestLive(TorchDispatchMode):
    """Peak of the bytes of all live tensors made inside, `limit` elements or larger."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.live, self.peak = limit, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= 4 * self.limit:
                key = tensor.untyped_storage().data_ptr()
                if key not in self.live:
                    self.live[key] = tensor.untyped_storage().nbytes()
                    weakref.finalize(tensor.untyped_storage(), self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def test_peak_memory_is_a_tile_or_two():
    tokens, vocab, tile = 512, 5_000, (128, 1_000)
    hidden, weight = torch.randn(tokens, 8).requires_grad_(), torch.randn(vocab, 8).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    with LargestLive(tile[0] * tile[1] // 2) as seen:
        logprob, entropy = linear_logprob_entropy(hidden, weight, targets, cut_in(tile, vocab=vocab))
        torch.autograd.grad(logprob.sum() + entropy.sum(), [hidden, weight])
    assert 0 < seen.peak <= 2 * 4 * tile[0] * tile[1] < 4 * tokens * vocab


def test_refusals():
    with pytest.raises(ValueError, match="cannot hold vocab_size=9"):
        Readout(9).shard(8)
    for temperature in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"temperature={temperature}"):
            Readout(4, temperature=temperature)
    with pytest.raises(ValueError, match="vocab_size=0"):
        Readout(0)


@pytest.mark.parametrize("tile", [(5, 9), (512, 512)])
def test_several_targets_of_a_token(tile):
    """The same token may be asked for twice; every target carries a gradient of its own."""
    hidden, weight, targets, _, h = problem()
    many = torch.stack([targets, (targets + 7) % VOCAB, targets, torch.full_like(targets, VOCAB - 1)], 1)
    g = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(3))
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, entropy = linear_logprobs_entropy(*leaves, many, cut_in(tile))
    ours = torch.autograd.grad((logprobs * g).sum() + entropy @ h, leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    table = (exact[0] @ exact[1].T)[:, :VOCAB].log_softmax(-1)
    wanted = table.gather(1, many)
    theirs = torch.autograd.grad((wanted * g.double()).sum() - (table.exp() * table).sum(-1) @ h.double(), exact)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=2e-5)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-5)
