"""`mcore-rl train` whose samples come from the trainer itself."""

from cli_runs import start_run


def test_the_trainer_samples_itself(tmp_path):
    run = start_run(tmp_path, "own", "train.steps=2", "rollout.engine=trainer", "rollout.max_tokens=6", "eval.prompts=4")
    code, _, err = run.finish(200.0)
    assert code == 0, err[-2000:]
    rows, summary = run.rows(), run.summary()
    assert summary["exit_reason"] == "completed"
    assert summary["export_check"]["matched"] == summary["export_check"]["prompts"] > 0
    assert [row["version"] for row in rows] == [2, 4]
    for row in rows:
        assert (row["delta_max_abs_nats"], row["delta_seq_max_abs_nats"], row["mismatch_outside_clip_frac"]) == (0.0, 0.0, 0.0)
        assert row["mismatch_ess_frac"] == row["mismatch_ess_seq_frac"] == 1.0
        assert row["sync/tensors"] == 0
    assert not (run.folder / "logs" / "engine0.log").exists()
