"""The command line as a user meets it: help, printed configuration, one line for wrong input, before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main, parse
from mcore_rl.config.compose import compose_config, load_config
from mcore_rl.help import COMMANDS
from mcore_rl.run_folder import RunFolder, fresh_folder, run_folder

ROOT = Path(__file__).parents[2]


def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    full = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-m", "mcore_rl", *words], cwd=cwd, env=full, capture_output=True, text=True, timeout=300, check=False
    )


def test_help_names_commands_groups_and_examples(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (*COMMANDS, "experiment", "quickstart", "qwen3_30b_a3b_gspo", "torchrun", "--cfg"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 130
    assert main(["sft", "--help"]) == 0
    assert COMMANDS["sft"] in capsys.readouterr().out
    assert main([]) == 0


def test_keys_lists_every_setting(capsys):
    assert main(["train", "--keys"]) == 0
    text = capsys.readouterr().out
    assert "train.steps" in text
    assert "one of plain, freeze, jitter" in text


def test_cfg_prints_what_can_be_read_back(capsys, tmp_path):
    words = ["experiment=quickstart", "train.steps=3"]
    assert main(["train", *words, "--cfg"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "config.yaml") == compose_config(words)


WRONG = {
    ("trian",): "trian: no such command; did you mean 'train'?",
    ("train", "--confg"): "--confg: no such flag; did you mean '--cfg'?",
    ("train", "train.stps=1"): "train.stps: no key 'stps' in train; did you mean 'steps'?",
    ("train", "train.steps=x"): "train.steps=x: expected a whole number",
    ("train", "train.steps=0"): "train.steps=0: must be at least 1",
    ("report",): "report: give one run folder",
    ("report", "run=nowhere"): "no run folder at nowhere",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert WRONG[words] in err
    assert not list(tmp_path.iterdir())


def test_help_and_wrong_keys_are_answered_without_torch(tmp_path):
    code = (
        "import sys; from mcore_rl.cli import main; "
        "codes = [main(['--help']), main(['train', 'a=1']), main(['train', '--cfg'])]; "
        "sys.exit(codes != [0, 2, 0] or any(name in sys.modules for name in ('torch', 'transformers', 'megatron', 'vllm')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_bad_layout_ends_before_anything_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=quickstart", "layout.world=3", "layout.ep=3", "eval.prompts=10"]) == 2
    assert capsys.readouterr().err == "mcore-rl: layout.ep=3 does not divide 8 experts\n"
    assert not list(tmp_path.iterdir())


def test_under_torchrun_only_rank_0_speaks(tmp_path):
    done = [run("train", "train.stps=1", cwd=tmp_path, RANK=rank, WORLD_SIZE="2") for rank in ("0", "1")]
    assert [result.returncode for result in done] == [2, 2]
    assert [len(result.stderr.splitlines()) for result in done] == [1, 0]


def test_an_earlier_run_of_the_same_name_is_kept(tmp_path):
    config = compose_config(["name=x", f"out_dir={tmp_path}"])
    folder, moved = fresh_folder(config)
    assert folder == RunFolder(tmp_path / "x") == run_folder(config)
    assert moved is None
    for number in (1, 2):
        (folder.root / "mark").write_text(str(number))
        folder, moved = fresh_folder(config)
        assert moved == tmp_path / f"x.{number}"
        assert (moved / "mark").read_text() == str(number)
        assert not folder.metrics.exists()


def test_words_are_split_into_command_overrides_and_flags():
    request = parse(["train", "a=1", "--cfg", "b=2"])
    assert (request.command, request.words, request.flags) == ("train", ("a=1", "b=2"), frozenset({"--cfg"}))
