"""Command line to RunConfig: what composes, and how wrong input is answered."""

import pytest

from mcore_rl.config.compose import CONFIG_ROOT, compose_config, config_groups, load_config, resolved_yaml
from mcore_rl.config.keys import all_keys, describe, type_at
from mcore_rl.config.schema import Placement, RatioLevel, RouterMode, RunConfig
from mcore_rl.run_folder import fresh_folder

GROUPS = config_groups()
# Every option once: one of each group at a time, experiments (which choose groups themselves) alone.
ROUNDS = [
    *([f"experiment={name}"] for name in GROUPS["experiment"]),
    *(
        [f"{group}={options[number]}" for group, options in GROUPS.items() if group != "experiment" and number < len(options)]
        for number in range(max(len(options) for group, options in GROUPS.items() if group != "experiment"))
    ),
]


@pytest.mark.parametrize("choices", ROUNDS, ids=" ".join)
def test_every_option_of_every_group_composes_and_reads_back(choices, tmp_path):
    config = compose_config(choices)
    assert isinstance(config, RunConfig)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_every_yaml_says_what_it_is_for():
    for path in CONFIG_ROOT.rglob("*.yaml"):
        lines = path.read_text().splitlines()
        assert any(line.startswith("# ") and "@package" not in line for line in lines[:2]), path


def test_quickstart_is_the_recipe():
    config = compose_config(["experiment=quickstart"])
    assert config.algorithm.ratio_level is RatioLevel.sequence
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (3e-4, 4e-4)
    assert (config.layout.world, config.layout.ep) == (2, 2)
    assert (config.train.steps, config.train.prompts_per_step, config.train.samples_per_prompt) == (20, 32, 8)
    assert config.train.updates_per_batch == 2
    assert config.eval.prompts >= 500
    assert (config.sft.steps, config.sft.batch_size, config.sft.optimizer.lr) == (280, 64, 3e-3)


def test_overrides_of_every_kind():
    config = compose_config(
        [
            "experiment=quickstart",
            "train.steps=3",
            "layout.tp=2",
            "layout.sp=true",
            "router=jitter",
            "rollout.placement=url",
            "rollout.url=[http://127.0.0.1:8000,http://b:1]",
            "model.chat_template_kwargs.enable_thinking=false",
            "model.build.hf_config.num_experts=4",
            "optimizer.lr=5e-5",
            "task.system_prompt='two words'",
        ]
    )
    assert (config.train.steps, config.layout.tp, config.router.mode) == (3, 2, RouterMode.jitter)
    assert (config.rollout.placement, config.rollout.url) == (Placement.url, ["http://127.0.0.1:8000", "http://b:1"])
    assert config.model.chat_template_kwargs == {"enable_thinking": False}
    assert config.model.build is not None
    assert config.model.build.hf_config["num_experts"] == 4
    assert config.model.build.hf_config["hidden_size"] == 128
    assert config.task.system_prompt == "two words"


WRONG = {
    "train.stps=3": ["train.stps", "no key 'stps' in train", "'steps'"],
    "steps=3": ["'steps'", "'train.steps'"],
    "trian.steps=3": ["'trian'", "'train'"],
    "routr=plain": ["'routr'", "'router'"],
    "train.steps=three": ["train.steps=three", "a whole number"],
    "train.steps=2.5": ["train.steps=2.5", "a whole number"],
    "train.steps=null": ["train.steps=null", "a whole number"],
    "optimizer.lr=fast": ["optimizer.lr=fast", "a number"],
    "train.shuffle_rewards=maybe": ["train.shuffle_rewards=maybe", "true or false"],
    "router.mode=fluid": ["router.mode=fluid", "plain, freeze, jitter"],
    "rollout.url=http://a:1": ["rollout.url=http://a:1", "a list like [a,b]"],
    "train=3": ["train=3", "prompts_per_step"],
    "router=fluid": ["router=fluid", "configs/router", "freeze, jitter, plain"],
    "experiment=quikstart": ["experiment=quikstart", "'quickstart'"],
    "router.mode.x=1": ["router.mode has no keys below it"],
    "model.build.layers=2": ["model.build", "'layers'"],
    "train.steps": ["train.steps", "expected key=value"],
    "train.steps=1,2": ["train.steps=1,2", "one value per key"],
    "~router": ["~router"],
    "+algorithm=grpo,rloo": ["algorithm"],
}


@pytest.mark.parametrize("override", WRONG)
def test_wrong_input_is_one_line_that_names_it(override):
    with pytest.raises(ValueError) as caught:
        compose_config([override])
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for part in WRONG[override]:
        assert part in text


def test_a_wrong_key_in_a_file_names_the_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "config.yaml").write_text("defaults:\n  - run_config\n  - _self_\n  - experiment: null\n")
    (tmp_path / "experiment" / "a.yaml").write_text("# @package _global_\ntrain:\n  stepz: 3\n")
    (tmp_path / "experiment" / "b.yaml").write_text("# @package _global_\ntrain:\n  steps: many\n")
    with pytest.raises(
        ValueError, match=r"configs/experiment/a\.yaml: train\.stepz: no key 'stepz' in train; did you mean 'steps'"
    ):
        compose_config(["experiment=a"], config_root=tmp_path)
    with pytest.raises(ValueError, match=r"configs/experiment/b\.yaml: train\.steps: expected a whole number"):
        compose_config(["experiment=b"], config_root=tmp_path)


def test_a_resolved_file_is_checked_when_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train:\n  steps: many\n")
    with pytest.raises(ValueError, match=r"config\.yaml: train\.steps: expected a whole number"):
        load_config(path)
    with pytest.raises(ValueError, match="no configuration at"):
        load_config(tmp_path / "nothing.yaml")


def test_composing_leaves_the_folder_and_the_process_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_config(["experiment=quickstart"])
    assert not list(tmp_path.iterdir())


def test_every_key_of_the_schema_has_words():
    assert len(all_keys()) > 90
    assert all(describe(type_at(key)) != "a value" for key in all_keys())


def test_an_out_dir_that_cannot_be_written_is_one_line():
    config = compose_config(["experiment=quickstart", "out_dir=/proc/nowhere"])
    with pytest.raises(ValueError, match=r"^out_dir=/proc/nowhere: /proc/\S+ cannot be written: No such file or directory$"):
        fresh_folder(config)
