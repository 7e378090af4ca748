"""`mcore-rl contract` with real engines: fp32 against bf16 on the same checkpoint and the same prefixes."""

import json

import hf_trainer
import pytest
import torch

from mcore_rl.cli import main
from mcore_rl.config.compose import compose_config, resolved_yaml
from mcore_rl.contract_engines import distributions
from mcore_rl.evaluate import EvalResult
from mcore_rl.run_folder import RunFolder


def made_run(root, dtype, step_s, correct):
    """What a finished run leaves behind, as far as the contract reads it."""
    root.mkdir()
    folder = RunFolder(root)
    sync = ["sync.probe_max_nats=0.5"] if dtype == "bfloat16" else []
    config = compose_config(["experiment=quickstart", f"rollout.dtype={dtype}", f"name={root.name}", *sync])
    folder.config.write_text(resolved_yaml(config))
    folder.metrics.write_text("".join(json.dumps({"seconds/rollout": step_s}) + "\n" for _ in range(3)))
    names = tuple(map(str, range(len(correct))))
    accuracy = sum(correct) / len(correct)
    rates = (accuracy, 0.1, 1.0, 1.0, 0.0, accuracy, 5.0)
    result = EvalResult("test", len(correct), "greedy", 8, "boxed", "1", 4, *rates, names, tuple(correct))
    (root / "evaluations.json").write_text(json.dumps({"after": {"greedy": result.to_json(), "t1": None}}))
    rows = [{"prompt_token_ids": ids[:10], "token_ids": ids[10:]} for ids in hf_trainer.sequences(320, count=12)]
    folder.rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs and the model that the first one ended with."""
    root = tmp_path_factory.mktemp("runs")
    target = made_run(root / "fp32", "float32", 2.0, [1, 0, 1, 1])
    accelerated = made_run(root / "bf16", "bfloat16", 1.5, [1, 0, 1, 1])
    model = hf_trainer.build(hf_trainer.moe_config(), seed=4)
    hf_trainer.save(model, target.checkpoint)
    return target, accelerated, model


def test_fp32_against_bf16_passes_with_a_kl_that_is_not_zero(runs, capsys):
    target, accelerated, _ = runs
    code = main(["contract", str(target.root), str(accelerated.root), "--responses", "12"])
    said = capsys.readouterr().out
    found = json.loads((accelerated.root / "contract.json").read_text())
    figures = found["gates"]["A_forward_kl"]["figures"]
    assert (code, found["verdict"]) == (0, "pass"), said
    assert 0.0 < figures["low_nats"] <= figures["mean_forward_kl_nats"] <= figures["high_nats"] < 0.05
    assert figures["shared_mass_mean"] == pytest.approx(1.0, abs=1e-4)
    assert figures["tokens"] == sum(30 + row for row in range(12))
    assert found["gates"]["B_step_seconds"]["figures"]["ratio"] == 0.75
    assert found["gates"]["C_held_out"]["figures"]["difference"] == 0.0
    assert "A_forward_kl: pass" in said


def test_distributions_are_those_of_transformers(runs, tmp_path):
    target, _, model = runs
    ids = hf_trainer.sequences(320, count=1)[0]
    config = compose_config(["experiment=quickstart"])
    (found,) = distributions(config, target.checkpoint, [(ids[:35], ids[35:])], tmp_path / "log")
    assert found.ids.shape == (len(ids) - 35, 320)
    with torch.no_grad():
        table = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)[34:-1]
    torch.testing.assert_close(found.logprobs, table.gather(1, found.ids), rtol=0, atol=1e-4)
