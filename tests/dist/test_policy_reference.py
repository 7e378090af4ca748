"""A reference that lives in the policy's own modules: its log-probs are the reference's, and not a bit of the policy moves."""

import policy_ranks
import pytest
import torch
from algorithm_cases import save_checkpoint, tokens

from mcore_rl.config.algorithm import KlConfig
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.policy_reference import ReferencePolicy, held_reference
from mcore_rl.types import Pass, TrainBatch
from models.registry import read_spec
from parallel.layout import ParallelLayout

LAYOUTS = [ParallelLayout(), ParallelLayout(world=2, tp=2, sp=True), ParallelLayout(world=2, pp=2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, and another of the same shape."""
    paths = [tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("reference")]
    for seed, path in enumerate(paths):
        save_checkpoint(path, seed=seed)
    return paths


def after_an_update(groups, device, folder, reference):
    """Log-probs of the reference after one update, what the policy says before and after asking, and whether a bit moved."""
    chunks = policy_ranks.build_chunks(groups, folder)
    held = held_reference(chunks, read_spec(folder), groups, KlConfig(coef=0.1, reference=reference))
    policy = policy_ranks.make_policy(groups, folder, chunks=chunks, optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0))
    asked = ReferencePolicy(policy, held)
    first = asked.logprobs(tokens(), Pass.REFERENCE).logprobs
    weights = tuple(mask / 100 for mask in tokens().loss_mask)
    policy.update(TrainBatch(tokens(), weights, torch.ones(8)))
    before, own = policy_ranks.full_tensors(policy.weights()), policy.logprobs(tokens(), Pass.OLD).logprobs
    second = asked.logprobs(tokens(), Pass.REFERENCE).logprobs
    again = policy.logprobs(tokens(), Pass.OLD).logprobs
    same = all(torch.equal(before[name], tensor) for name, tensor in policy.weights())
    try:
        with held.in_place():
            raise KeyError("inside")
    except KeyError:
        same = same and all(torch.equal(before[name], tensor) for name, tensor in policy.weights())
    return first, second, own, again, same


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("which", ["initial", "folder"])
def test_reference(ranks, folders, layout, which):
    policy, other = folders
    reference = "initial" if which == "initial" else str(other)
    (expected,) = ranks.run(policy_ranks.scoring, LAYOUTS[0], policy if which == "initial" else other, tokens(), Pass.EVAL)
    for first, second, own, again, same in ranks.run(after_an_update, layout, policy, reference):
        assert same
        assert all(torch.equal(one, two) for one, two in zip(own, again, strict=True))
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        for got, wanted in zip(second, expected[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
        assert max(float((one - two).abs().max()) for one, two in zip(own, second, strict=True)) > 1e-2
