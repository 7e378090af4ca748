"""The decisions of the stages that need no engine and no ranks: who gets `old`, the shuffled control, the warm-up gate."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.clock import StageClock
from mcore_rl.config.schema import RouterMode, RunConfig, SftConfig
from mcore_rl.probe import probe_batch
from mcore_rl.sft import GateCheck, is_check
from mcore_rl.stages import shuffled, training_sampling, with_old_logprobs, with_reference
from mcore_rl.types import Pass, Prompt, Score, TokenBatch, TokenValues, TrainBatch
from models.routes import Routes


def batch(name):
    tokens = TokenBatch((torch.tensor([1, 2, 3]),), (torch.tensor([False, True, True]),), (name,))
    return TrainBatch(tokens, (torch.tensor([0.0, 0.5, 0.5]),), torch.ones(1))


@dataclass
class ScoringPolicy:
    calls: list = field(default_factory=list)
    routes: object = None

    def logprobs(self, tokens, pass_name):
        self.calls.append((tokens.sample_ids[0], pass_name))
        return TokenValues((torch.tensor([0.0, -1.0, -2.0]),), (torch.zeros(3),), self.routes)


def run_with(mode):
    config = RunConfig()
    config.router.mode = mode
    return SimpleNamespace(
        config=config, policy=ScoringPolicy(), stop_token_ids=(2,), clock=StageClock(), reference=None, own_sampler=None
    )


def test_the_first_update_is_its_own_old():
    run = run_with(RouterMode.plain)
    first, second = with_old_logprobs(run, [batch("a"), batch("b")])
    assert first.old_logprobs is None
    assert torch.equal(second.old_logprobs[0], torch.tensor([0.0, -1.0, -2.0]))
    assert run.policy.calls == [("b", Pass.OLD)]


def test_a_jittered_forward_is_nobodys_old():
    run = run_with(RouterMode.jitter)
    updates = with_old_logprobs(run, [batch("a"), batch("b")])
    assert all(update.old_logprobs is not None for update in updates)
    assert run.policy.calls == [("a", Pass.OLD), ("b", Pass.OLD)]


def test_what_the_trainer_recorded_while_sampling_is_its_old():
    run = run_with(RouterMode.plain)
    run.own_sampler = object()
    recorded = (torch.tensor([0.0, -3.0, -4.0]),)
    updates = with_old_logprobs(run, [replace(batch(name), sampler_logprobs=recorded) for name in "ab"])
    assert all(update.old_logprobs is recorded for update in updates) and run.policy.calls == []


def test_routes_to_replay_come_from_an_old_pass_even_where_the_trainer_sampled():
    run = run_with(RouterMode.replay)
    run.own_sampler = object()
    run.policy.routes = (Routes((0, 1), torch.zeros(3, 2, 1, dtype=torch.uint8), torch.ones(3, dtype=torch.bool)),)
    first, second = with_old_logprobs(run, [batch("a"), batch("b")])
    assert first.old_logprobs is None and first.tokens.routes is None
    assert second.tokens.routes is run.policy.routes and run.policy.calls == [("b", Pass.OLD)]


@pytest.mark.parametrize("section", ["correction", "clip_cov", "kl"])
def test_what_is_made_from_old_asks_for_it(section):
    run = run_with(RouterMode.plain)
    run.config.algorithm.correction.enabled = section == "correction"
    run.config.algorithm.clip_cov.fraction = 0.1 * (section == "clip_cov")
    run.config.algorithm.kl.coef = 0.1 * (section == "kl")
    updates = with_old_logprobs(run, [batch("a")])
    assert updates[0].old_logprobs is not None and run.policy.calls == [("a", Pass.OLD)]


def test_the_reference_is_asked_once_an_update():
    run = run_with(RouterMode.plain)
    assert with_reference(run, [batch("a")])[0].reference_logprobs is None
    run.reference = ScoringPolicy()
    (update,) = with_reference(run, [batch("a")])
    assert update.reference_logprobs[0].tolist() == [0.0, -1.0, -2.0]
    assert run.reference.calls == [("a", Pass.REFERENCE)] and run.policy.calls == []


def test_shuffled_rewards_are_the_same_rewards_elsewhere():
    scores = [Score(float(i), i % 2 == 0, str(i), True, False) for i in range(64)]
    once, again, other = shuffled(scores, 0, 3), shuffled(scores, 0, 3), shuffled(scores, 0, 4)
    assert once == again != other
    assert once != scores
    assert sorted(s.reward for s in once) == sorted(s.reward for s in scores)


def test_every_step_samples_with_a_seed_of_its_own():
    run = run_with(RouterMode.plain)
    seeds = [training_sampling(run, step).seed for step in range(50)]
    assert len(set(seeds)) == 50
    run.config.seed = 1
    assert training_sampling(run, 0).seed not in seeds
    assert training_sampling(run, 0).stop_token_ids == (2,)


def test_when_the_gate_is_looked_at():
    config = SftConfig(steps=250, first_check_step=200, check_every=20)
    assert [step for step in range(1, 251) if is_check(config, step)] == [200, 220, 240, 250]


@pytest.mark.parametrize(
    ("accuracy", "format_rate", "passes"),
    [(0.15, 0.97, True), (0.60, 1.0, True), (0.149, 1.0, False), (0.601, 1.0, False), (0.4, 0.969, False)],
)
def test_the_gate(accuracy, format_rate, passes):
    config = SftConfig(min_accuracy=0.15, max_accuracy=0.60, min_format=0.97)
    assert GateCheck(1, accuracy, format_rate).passes(config) is passes


@dataclass
class FixedTask:
    rows: list

    def eval_prompts(self, split, count):
        assert split == "val"
        return [Prompt(f"v{i}", tuple(ids), "q", "a") for i, ids in enumerate(self.rows[:count])]


def test_probe_scores_every_token_after_the_first():
    found = probe_batch(FixedTask([[5, 6, 7], [8, 9, 1, 2]]), 2, 3)
    assert [ids.tolist() for ids in found.token_ids] == [[5, 6, 7], [8, 9, 1]]
    assert [mask.tolist() for mask in found.loss_mask] == [[False, True, True]] * 2


def test_a_probe_that_could_prove_nothing_is_refused():
    with pytest.raises(ValueError, match="too short"):
        probe_batch(FixedTask([[5]]), 1, 10)
