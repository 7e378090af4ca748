"""The engine of the 30B experiment: vLLM itself takes the arguments and makes a full engine configuration of them."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.rollout.vllm_facts import engine_facts

REPOSITORY = Path(__file__).parents[2]
# In a process of its own: vLLM's platform and logging settings are per process.
PROGRAM = """
import json, sys
from mcore_rl.config.compose import compose_config
from mcore_rl.rollout.engine_args import engine_arguments
from vllm.engine.arg_utils import EngineArgs
config = compose_config(["experiment=qwen3_30b_a3b_gspo", *sys.argv[2:]])
engine = EngineArgs(**engine_arguments(config.rollout, sys.argv[1], device="cuda")).create_engine_config()
model, parallel = engine.model_config, engine.parallel_config
print("RESULT", json.dumps({
    "architecture": model.architecture,
    "dtype": str(model.dtype),
    "max_model_len": model.max_model_len,
    "generation_config": model.generation_config,
    "logprobs_mode": model.logprobs_mode,
    "tensor_parallel": parallel.tensor_parallel_size,
    "expert_parallel": parallel.enable_expert_parallel,
    "gpu_memory": engine.cache_config.gpu_memory_utilization,
    "prefix_caching": engine.cache_config.enable_prefix_caching,
    "max_num_seqs": engine.scheduler_config.max_num_seqs,
    "transfer": engine.weight_transfer_config.backend,
}))
"""


def engine_config(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(REPOSITORY / "configs/model/hf/qwen3_30b_a3b"), *overrides]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)


def test_vllm_takes_the_arguments_of_the_30b_experiment() -> None:
    done = engine_config()
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert json.loads(line.removeprefix("RESULT")) == {
        "architecture": "Qwen3MoeForCausalLM",
        "dtype": "torch.bfloat16",
        "max_model_len": 6144,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "tensor_parallel": 8,
        "expert_parallel": True,
        "gpu_memory": 0.5,
        "prefix_caching": False,
        "max_num_seqs": 512,
        "transfer": "mcore_shm",
    }


@pytest.mark.parametrize(
    ("override", "named"),
    [("rollout.max_model_len=1000000", "max_model_len"), ("rollout.tensor_parallel=5", "tensor parallel size")],
)
def test_the_validation_is_vllms_own(override: str, named: str) -> None:
    """More positions than the model has, and heads that do not divide: vLLM refuses, by name."""
    done = engine_config(override)
    assert done.returncode != 0
    assert named in done.stderr


def test_a_draft_model_and_the_kind_of_log_probs_are_facts_of_an_engine():
    """What somebody starts a server with: a sync sends neither a draft's weights nor could it tell processed log-probs."""
    text = SimpleNamespace(num_hidden_layers=1, vocab_size=2)
    model = SimpleNamespace(
        architecture="A", hf_text_config=text, dtype=torch.float32, max_model_len=3, logprobs_mode="processed_logprobs", model="m"
    )
    for drafts, said in ((None, "none"), (SimpleNamespace(method="mtp"), "mtp")):
        facts = engine_facts(torch.nn.Module(), SimpleNamespace(model_config=model, speculative_config=drafts))
        assert (facts["draft"], facts["logprobs"]) == (said, "processed_logprobs")
