"""The manifest: what it holds, and the difference of two."""

import hashlib
import json
import subprocess

from mcore_rl.config.compose import compose_config
from mcore_rl.manifest import (
    RunFacts,
    build_manifest,
    code_state,
    diff_manifests,
    file_sha256,
    text_sha256,
    versions,
    write_manifest,
)
from mcore_rl.run_folder import RunFolder

FACTS = RunFacts("t", "c", "m", {"optimizer": "torch", "norm": "torch", "attention": "torch"}, "1/boxed", {"gate": {"step": 240}})


def manifest(*overrides: str, facts: RunFacts = FACTS) -> dict:
    return build_manifest(compose_config(["experiment=quickstart", *overrides]), facts, launch={"command": "mcore-rl train"})


def test_it_names_the_conditions(tmp_path):
    made = manifest("seed=7", "algorithm=dr_grpo")
    assert made["seed"] == 7
    assert made["algorithm"] == {"ratio_level": "token", "clip": [0.2, 0.2]}
    assert made["loss_aggregation"] == "seq_mean_token_sum_norm"
    assert made["advantage_normalisation"] == {"baseline": "group_mean", "ddof": 1}
    assert made["implementations"] == {"optimizer": "torch", "norm": "torch", "attention": "torch"}
    assert made["evaluation"]["prompts"] == 500
    assert made["config"]["layout"]["ep"] == 2
    assert made["gate"] == {"step": 240}
    for key in (
        "tokenizer_sha256",
        "chat_template_sha256",
        "reward_version",
        "layout",
        "versions",
        "code",
        "launch",
        "config_sha256",
    ):
        assert key in made
    write_manifest(RunFolder(tmp_path), made)
    assert json.loads((tmp_path / "manifest.json").read_text()) == json.loads(json.dumps(made))


def test_equal_runs_do_not_differ_and_changes_are_named():
    first = manifest()
    assert diff_manifests(first, manifest("name=other", "out_dir=elsewhere")) == {}
    changed = manifest("optimizer.lr=3e-5", facts=RunFacts("t", "c", "other", {**FACTS.implementations, "norm": "te"}, "1/boxed"))
    assert diff_manifests(first, changed) == {
        "model.digest": ("m", "other"),
        "implementations.norm": ("torch", "te"),
        "config.optimizer.lr": (5e-5, 3e-5),
        "gate.step": (240, None),
    }
    assert "config_sha256" in diff_manifests(first, changed, ignore=())


def test_the_configuration_hash_follows_the_configuration():
    assert manifest()["config_sha256"] == manifest()["config_sha256"]
    assert manifest()["config_sha256"] != manifest("seed=1")["config_sha256"]


def git(folder, *words):
    identity = ["-c", "user.email=a@b", "-c", "user.name=a"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_code_state_of_a_clean_a_changed_and_no_repository(tmp_path):
    assert code_state(tmp_path) == {"git_sha": None, "dirty": None, "diff_sha256": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "x")
    clean = code_state(tmp_path)
    assert clean == {"git_sha": git(tmp_path, "rev-parse", "HEAD"), "dirty": False, "diff_sha256": None}
    (tmp_path / "a").write_text("2")
    changed = code_state(tmp_path)
    assert changed["dirty"] is True
    (tmp_path / "a").write_text("3")
    assert code_state(tmp_path)["diff_sha256"] != changed["diff_sha256"]
    (tmp_path / "inner").mkdir()
    assert code_state(tmp_path / "inner")["git_sha"] is None, "a parent's repository is not this code's"


def test_digests_and_versions(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"abc")
    assert file_sha256(tmp_path / "tokenizer.json") == hashlib.sha256(b"abc").hexdigest() == text_sha256("abc")
    found = versions()
    assert found["torch"]
    assert found["python"]
    assert found["apex"] is None
