"""Gates by hand: KL against its definition, verdicts on either side of the limit, runs that may not be compared."""

import math
from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms.divergence import TopList, list_kl
from mcore_rl.contract import check_comparable, gate_a, gate_b, gate_c, verdict
from mcore_rl.contract_engines import last_responses, run_contract
from mcore_rl.evaluate import EvalResult


def logs(*rows):
    """Every token of the vocabulary at each place, likeliest first."""
    values, ids = torch.tensor(rows, dtype=torch.float64).sort(1, descending=True)
    return TopList(ids, values.log())


def test_kl_over_full_distributions_is_the_definition():
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 50, generator=generator, dtype=torch.float64).softmax(-1)
    found = list_kl(logs(p.tolist()), logs(q.tolist()))
    assert float(found.kl) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)
    assert float(found.shared_mass) == pytest.approx(1.0)


def test_kl_over_the_best_k_counts_the_rest_as_one_event():
    """p = .5 .3 | .2 and q = .4 .3 | .3: shared tokens 0 and 1, the rest is one event."""
    target = TopList(torch.tensor([[0, 1, 2]]), torch.tensor([[0.5, 0.3, 0.1]]).log())
    accelerated = TopList(torch.tensor([[1, 0]]), torch.tensor([[0.3, 0.4]]).log())
    found = list_kl(target, accelerated)
    assert float(found.shared_mass) == pytest.approx(0.8)
    assert float(found.kl) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.2 * math.log(0.2 / 0.3), rel=1e-6)
    whole = list_kl(logs([0.5, 0.3, 0.1, 0.1]), logs([0.4, 0.3, 0.05, 0.25]))
    assert float(found.kl) < float(whole.kl)
    nothing = list_kl(TopList(torch.tensor([[7]]), torch.tensor([[0.5]]).log()), accelerated)
    assert (float(nothing.kl), float(nothing.shared_mass)) == (0.0, 0.0)
    with pytest.raises(ValueError, match="1 and 3 places"):
        list_kl(target, logs(*[[0.5, 0.5]] * 3))


def test_identical_engines_pass_with_zero_and_noise_crosses_the_limit():
    same = [logs(*[[0.7, 0.3]] * 3), logs([0.2, 0.8])]
    gate = gate_a(same, same, samples=200)
    assert gate.verdict == "pass"
    assert gate.figures["mean_forward_kl_nats"] == gate.figures["high_nats"] == gate.figures["top1_disagreement"] == 0.0
    other = [logs(*[[0.3, 0.7]] * 3), logs([0.8, 0.2])]
    gate = gate_a(same, other, samples=200)
    first, second = 0.4 * math.log(7 / 3), 0.6 * math.log(4)
    assert gate.figures["mean_forward_kl_nats"] == pytest.approx((3 * first + second) / 4)
    assert gate.figures["max_kl_nats"] == pytest.approx(second)
    assert gate.figures["top1_disagreement"] == 1.0
    assert (gate.verdict, gate.figures["tokens"]) == ("fail", 4.0)
    one_bad = gate_a([same[0]] * 20, [*[same[0]] * 19, other[0]], samples=2000)
    assert one_bad.verdict == "unclear"
    with pytest.raises(ValueError, match="did not score the same"):
        gate_a(same, same[:1], samples=10)


def test_step_seconds_leave_the_first_step_out():
    slow = [{"seconds/rollout": 90.0}, {"seconds/rollout": 2.0, "seconds/update": 1.0, "loss": 7.0}, {"seconds/rollout": 5.0}]
    fast = [{"seconds/rollout": 99.0}, {"seconds/rollout": 1.0}]
    gate = gate_b(slow, fast)
    assert (gate.verdict, gate.figures["target_step_s"], gate.figures["ratio"]) == ("pass", 4.0, 0.25)
    assert gate_b(fast, slow).verdict == "fail"
    with pytest.raises(ValueError, match="at least two steps"):
        gate_b(slow[:1], fast)


def evaluation(correct):
    names = tuple(str(i) for i in range(len(correct)))
    rate = sum(correct) / len(correct)
    rates = (rate, 0.1, 1.0, 1.0, 0.0, rate, 5.0)
    return EvalResult("test", len(correct), "greedy", 8, "boxed", "1", 4, *rates, names, tuple(correct))


def test_held_out_accuracy_is_compared_prompt_by_prompt():
    good, bad = evaluation([1] * 60 + [0] * 40), evaluation([1] * 30 + [0] * 70)
    assert gate_c(good, bad, samples=500).verdict == "fail"
    assert gate_c(bad, good, samples=500).verdict == "pass"
    gate = gate_c(good, evaluation([1] * 59 + [0] * 40 + [1]), samples=500)
    assert (gate.verdict, gate.figures["difference"]) == ("pass", 0.0)
    with pytest.raises(ValueError, match="max_tokens is 8 before and 9 after"):
        gate_c(good, replace(bad, max_tokens=9), samples=10)


def test_the_verdict_is_the_worst_gate():
    same = [logs([0.7, 0.3])]
    passed = gate_a(same, same, samples=10)
    assert verdict({"A": passed})["verdict"] == "pass"
    assert verdict({"A": passed, "B": replace(passed, verdict="unclear")})["verdict"] == "unclear"
    assert verdict({"A": replace(passed, verdict="unclear"), "B": replace(passed, verdict="fail")})["verdict"] == "fail"


def test_runs_may_differ_in_the_engine_alone(tmp_path):
    config = {"seed": 1, "rollout": {"dtype": "float32"}, "name": "a"}
    check_comparable(config, {**config, "rollout": {"dtype": "bfloat16"}, "name": "b"})
    with pytest.raises(ValueError, match="the runs differ in algorithm, seed"):
        check_comparable(config, {**config, "seed": 2, "algorithm": {}})
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text('{"prompt_token_ids": [1], "token_ids": [2]}\n{"prompt_token_ids": [3, 4], "token_ids": [5]}\n')
    assert last_responses(rollouts, 1) == [((3, 4), (5,))]
    with pytest.raises(ValueError, match="has 2 responses, 3 are asked for"):
        last_responses(rollouts, 3)
    rollouts.write_text('{"prompt_token_ids": [1], "token_\n')
    with pytest.raises(ValueError, match=r"rollouts.jsonl, line 1: not JSON"):
        last_responses(rollouts, 1)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run"):
        run_contract(tmp_path, tmp_path, tmp_path / "out.json", responses=1)
