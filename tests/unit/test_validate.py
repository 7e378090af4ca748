"""Everything that is refused before a rank or an engine starts: one line with key, value and what would be right."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.algorithms.validate import validate_algorithm
from mcore_rl.config.compose import compose_config
from mcore_rl.config.validate import validate
from mcore_rl.config.validate_fields import validate_fields
from mcore_rl.config.validate_model import validate_layout
from models.registry import spec_from_config

QUICK = ["experiment=quickstart", "eval.prompts=20", "sft.check_prompts=20"]


def refused(overrides: list[str], stage: str = "train") -> str:
    with pytest.raises(ValueError) as caught:
        validate(compose_config(overrides), stage)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "extra", [[], ["layout=tp2"], ["layout=pp2"], ["router=freeze"], ["router=jitter"], ["algorithm=dr_grpo"]]
)
def test_the_quickstart_and_its_variants_pass(extra):
    validate(compose_config([*QUICK, *extra]), local_ranks=2)


def test_stages_differ_in_what_they_need():
    validate(compose_config([*QUICK, "algorithm.aggregation=null"]), "eval")
    assert "sft.steps=0" in refused([*QUICK, "sft.steps=0"], "sft")


FIELDS = {
    "eval.prompts=100000000": ["eval.prompts=100000000", "at most 100,000"],
    "resume=runs/x": ["resume=runs/x", "not available"],
    "rollout.engine=trainer rollout.engines=2": ["rollout.engines=2", "rollout.engine=trainer is one sampler"],
    "rollout.engine=trainer rollout.sleep_level=1": ["rollout.sleep_level=1", "rollout.engine=trainer has no memory"],
    "rollout.engine=trainer router=replay": ["router.replay_from=rollout", "use router.replay_from=old"],
    "router.replay_from=old": ["router.replay_from=old", "router.mode=replay only; mode is plain"],
    "router=replay rollout.enforce_eager=false": ["rollout.enforce_eager=false", "needs enforce_eager=true"],
    "rollout.max_engine_restarts=-1": ["rollout.max_engine_restarts=-1", "at least 0"],
    "rollout.engines=0": ["rollout.engines=0", "at least 1"],
    "rollout=url rollout.url=[http://a:1] rollout.engines=2": ["rollout.engines=2", "rollout.placement=owned only"],
    "rollout=url rollout.url=[http://a:1,http://a:1]": ["rollout.url", "twice"],
    "rollout.url_file=servers.txt": ["rollout.url_file=servers.txt", "rollout.placement=url only"],
    "rollout=url rollout.url=[http://a:1,http://A:1/]": ["rollout.url=http://A:1/", "twice, first as http://a:1"],
    "rollout=url rollout.url=[http://127.0.0.1:1,http://localhost:1]": ["rollout.url=http://localhost:1", "twice"],
    "rollout=url rollout.url=[http://127.0.0.1:99999]": ["rollout.url=http://127.0.0.1:99999", "Port out of range"],
    "rollout=url rollout.url=[http://127.0.0.1:80x]": ["rollout.url=http://127.0.0.1:80x", "http://127.0.0.1:8000 is needed"],
    "rollout=url rollout.url_file=/nope": ["rollout.url_file=/nope: no such file"],
    "rollout=url rollout.url=[http://10.0.0.7:1]": ["rollout.url=http://10.0.0.7:1", "not loopback"],
    "rollout.sleep_level=2": ["rollout.sleep_level=2", "engines on a CPU cannot sleep"],
    "rollout.placement=url": ["rollout.placement=url", "rollout.url=[http://host:port]"],
    "rollout.url=[http://a:1]": ["rollout.url", "rollout.placement=url only"],
    "rollout=url rollout.url=[localhost]": ["rollout.url=localhost", "http://127.0.0.1:8000"],
    "rollout.temperature=0": ["rollout.temperature=0.0", "train.samples_per_prompt=8"],
    "rollout.temperature=0.7": ["rollout.temperature=0.7", "use 1.0"],
    "rollout.top_p=0.9": ["rollout.top_p=0.9", "use 1.0"],
    "rollout.max_model_len=32": ["rollout.max_model_len=32", "rollout.max_tokens=32"],
    "rollout.max_model_len=40": ["rollout.max_model_len=40", "longest prompt has 19 tokens", "at least 51"],
    "rollout.max_model_len=1024": ["rollout.max_model_len=1024", "512 positions"],
    "layout.tokens_per_micro_batch=64": ["layout.tokens_per_micro_batch=64", "rollout.max_model_len=128"],
    "sft.steps=20": ["sft.optimizer.warmup_steps=20", "fewer than the 20 steps of sft.steps"],
    "optimizer.schedule=cosine optimizer.warmup_steps=40": ["optimizer.warmup_steps=40", "train.steps x train.updates_per_batch"],
    "seed=4294967296": ["seed=4294967296", "4294967295"],
    "sync.max_resyncs=-1": ["sync.max_resyncs=-1", "0"],
    "sync.probe_mean_nats=0": ["sync.probe_mean_nats=0"],
    "rollout.dtype=bfloat16": ["sync.probe_max_nats=0.001", "sync=bf16"],
    "train.updates_per_batch=3": ["train.updates_per_batch=3", "train.prompts_per_step=32"],
    "train.steps=0": ["train.steps=0", "at least 1"],
    "train.samples_per_prompt=1": ["train.samples_per_prompt=1", "baseline"],
    "algorithm.aggregation=null": ["algorithm.aggregation"],
    "algorithm.clip_high=0.2": ["clip_high=0.2", "3e-4"],
    "algorithm.ratio_level=token": ["algorithm.clip_low=0.0003", "0.2"],
    "algorithm.kl.coef=0.1": ["algorithm.kl.placement=reward", "sequence_token"],
    "algorithm.kl.reference=/nope": ["algorithm.kl.reference=/nope", "kl.coef > 0"],
    "algorithm=grpo algorithm.kl.coef=0.1 algorithm.kl.reference=/nope": ["algorithm.kl.reference=/nope", "no such folder"],
    "router=jitter router.jitter_eps=0": ["router.jitter_eps=0.0", "0 < eps < 1"],
    "router.jitter_eps=0.1": ["router.jitter_eps=0.1", "router.mode=jitter only"],
    "optimizer.beta2=1": ["optimizer.beta2=1.0", "[0, 1)"],
    "sft.optimizer.lr=-1": ["sft.optimizer.lr=-1.0"],
    "sft.min_accuracy=0.7": ["sft.min_accuracy=0.7", "sft.max_accuracy=0.6"],
    "sft.first_check_step=400": ["sft.first_check_step=400", "sft.steps=280"],
    "telemetry.wandb=on": ["telemetry.wandb=on", "offline, online, disabled"],
    "name=a/b": ["name='a/b'"],
    "device=cuda": ["device=cuda", "device=cpu"],
    "device=cpu model.impl=te": ["model.impl=te", "GPU"],
    "layout.ep=3 layout.world=3": ["layout.ep=3", "8 experts"],
    "layout.ep=3": ["layout.world=2", "ep x etp x pp"],
    "layout.ep=1 layout.first_stage_layers=1": ["layout.first_stage_layers=1", "layout.pp > 1"],
    "layout.ep=1 layout.pp=2 layout.first_stage_layers=4": ["layout.first_stage_layers=4 of 4 layers leaves 0"],
    "layout.ep=1 layout.cp=2 layout.tokens_per_micro_batch=131 rollout.max_model_len=130": [
        "layout.tokens_per_micro_batch=131",
        "multiples of 4 tokens",
        "128 at most",
        "takes 132",
    ],
    "layout.tp=2 layout.ep=1": ["layout.tp=2", "layout.sp=True"],
    "layout.world=3 layout.ep=1 layout.tp=3 layout.sp=true": ["layout.tp=3", "attention heads"],
    "task.answer_pattern=foo": ["task.answer_pattern", "'foo'", "boxed"],
    "task.min_terms=2 task.max_terms=2 eval.prompts=500": ["no prompts left", "500 were asked"],
    "model.build=null": ["model.path=null"],
    "model.build.architecture=GPT2LMHeadModel": ["model.build", "GPT2LMHeadModel", "Qwen3MoeForCausalLM"],
    "model.build.hf_config.vocab_size=100": ["vocab_size=100", "302 tokens"],
    "model.build.tokenizer=klingon": ["model.build.tokenizer", "klingon"],
}


@pytest.mark.parametrize("overrides", FIELDS)
def test_refused_by_name(overrides):
    text = refused([*QUICK, *overrides.split()])
    for part in FIELDS[overrides]:
        assert part in text


@pytest.mark.parametrize("key", ["eval.prompts", "sft.check_prompts", "distill.gate_prompts"])
def test_more_held_out_prompts_than_are_drawn_are_refused(key):
    text = refused([*QUICK, f"{key}=100001"])
    assert text == f"{key}=100001: at most 100,000: every one is drawn before the run starts"


def test_one_host_starts_so_many_ranks():
    config = compose_config([*QUICK, "layout.world=1000", "layout.ep=1"])
    with pytest.raises(ValueError, match=r"^layout\.world=1000: at most 256: .* torchrun$"):
        validate(config, local_ranks=1000)
    validate(config)


def test_a_file_of_servers_is_read_before_anything_starts(tmp_path):
    file = tmp_path / "servers.txt"
    overrides = [*QUICK, "rollout=url", f"rollout.url_file={file}"]
    file.write_text("http://127.0.0.1:8000\nhello\n")
    assert refused(overrides) == f"rollout.url_file={file}:2: hello: an address like http://127.0.0.1:8000 is needed"
    file.write_text("http://127.0.0.1:8000\n")
    validate_fields(compose_config(overrides))


# config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen2.5-0.5B-Instruct, the sizes only.
PUBLISHED = {
    "qwen3_30b_a3b_gspo": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "qwen25_05b_gsm8k": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_large_experiments_fit_their_models(name):
    config = compose_config([f"experiment={name}"])
    spec = spec_from_config(PUBLISHED[name])
    validate_fields(config)
    validate_algorithm(config.algorithm, samples_per_prompt=config.train.samples_per_prompt)
    validate_layout(config, spec)
    if spec.moe is not None:
        with pytest.raises(ValueError, match="does not divide 4 key-value heads"):
            validate_layout(compose_config([f"experiment={name}", "layout.tp=8"]), spec)


def folder_with(tmp_path, config: dict | None, *, weights: bool = True):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_missing_model_path_is_named(tmp_path):
    text = refused([*QUICK, "model=hf", f"model.path={tmp_path}/nothing"])
    assert f"model.path={tmp_path}/nothing: no such folder" in text


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    overrides = [*QUICK, "model=hf", f"model.path={tmp_path}"]
    assert "has no config.json" in refused(overrides)
    folder_with(tmp_path, {"architectures": ["MambaForCausalLM"]}, weights=False)
    assert "has no .safetensors" in refused(overrides)
    folder_with(tmp_path, None)
    text = refused(overrides)
    assert "config.json" in text
    assert "MambaForCausalLM" in text


def test_a_dense_model_has_no_router(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    folder_with(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 512, **sizes})
    dense = [*QUICK, "model=hf", f"model.path={tmp_path}", "layout=single"]
    assert "no experts" in refused(dense)
    assert "router.mode=freeze" in refused([*dense, "sft.aux_loss_coef=0", "router=freeze"])
    assert "layout.ep=2 needs a model with experts" in refused([*dense, "layout=ep2"])
    assert "no tokenizer.json" in refused([*dense, "sft.aux_loss_coef=0"])


GOOD = json.dumps({"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"})
FILES = {
    "missing": (None, ["train.jsonl: no such file"]),
    "empty": ("", ["train.jsonl: empty, no prompts left"]),
    "not JSON": (f"{GOOD}\n{{broken\n", ["train.jsonl:2: not a JSON object"]),
    "no answer": (f'{GOOD}\n{{"question": "x"}}\n', ["train.jsonl:2: key 'answer' is missing"]),
    "no number": (f'{GOOD}\n{{"question": "x", "answer": "dunno"}}\n', ["train.jsonl:2: key 'answer'"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_task_file_is_named_with_its_line(tmp_path, name):
    content, parts = FILES[name]
    path = tmp_path / "train.jsonl"
    if content is not None:
        path.write_text(content)
    text = refused([*QUICK, "task=file", f"task.train_file={path}"])
    for part in parts:
        assert part in text


def test_a_file_whose_prompts_are_all_too_long_has_none_left(tmp_path):
    rows = [json.dumps({"question": f"{'word ' * 200}{i}?", "answer": "#### 2"}) for i in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    assert "no prompts left" in refused([*QUICK, "task=file", f"task.train_file={tmp_path}/train.jsonl"])


def test_the_word_problems_are_a_valid_task():
    overrides = ["task=word_problems", "eval.prompts=16", "rollout.max_model_len=512", "rollout.max_tokens=64"]
    validate(compose_config(overrides))
