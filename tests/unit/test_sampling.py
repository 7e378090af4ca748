"""Seeds, requests, and what an engine process is started with."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest

from mcore_rl.config.schema import DType, RolloutConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.sampling import check_sampling, generation_requests, sample_seed
from mcore_rl.rollout.vllm_engine import UNPROVED, VllmEngine
from mcore_rl.rollout.vllm_server import server_command, server_environment
from mcore_rl.types import Prompt, SamplingParams, StaleRollout, WeightMismatch

SAMPLING = SamplingParams(temperature=1.0, max_tokens=8, stop_token_ids=(2, 5), samples_per_prompt=3, seed=11)
PROMPTS = [Prompt("a", (1, 2, 3), "", ""), Prompt("b", (4,), "", "")]


def test_every_sample_has_a_seed_of_its_own():
    """Across seeds, prompts and samples; 63 bits; ids that only together read alike stay apart."""
    seeds = {sample_seed(*key) for key in product(range(5), ["p1", "p11", "step0/p1"], range(40))}
    assert len(seeds) == 5 * 3 * 40
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, "1", 1) != sample_seed(11, "", 1) != sample_seed(1, "11", 0)


def test_seeds_are_the_same_in_another_process():
    code = "from mcore_rl.rollout.sampling import sample_seed; print(sample_seed(3, 'step4/p7', 2))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert int(found.stdout) == sample_seed(3, "step4/p7", 2)


def test_requests_are_exactly_what_was_asked():
    requests = generation_requests(PROMPTS, SAMPLING, 64)
    assert [request["token_ids"] for request in requests] == [[1, 2, 3]] * 3 + [[4]] * 3
    assert [request["sampling"]["seed"] for request in requests] == [sample_seed(11, name, i) for name in "ab" for i in range(3)]
    first = dict(requests[0]["sampling"])
    del first["seed"]
    assert first == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 8,
        "stop_token_ids": [2, 5],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("max_tokens", 0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_sampling_that_means_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=f"sampling: {field}="):
        check_sampling(replace(SAMPLING, **{field: value}))


def test_a_group_of_greedy_answers_is_refused():
    with pytest.raises(ValueError, match="samples_per_prompt=3 at temperature=0"):
        check_sampling(replace(SAMPLING, temperature=0.0))
    with pytest.raises(ValueError, match="samples_per_prompt=0"):
        check_sampling(replace(SAMPLING, samples_per_prompt=0))


@pytest.mark.parametrize("ids", [(), tuple(range(60))])
def test_a_prompt_must_leave_room(ids):
    with pytest.raises(ValueError, match=r"prompt x: \d+ prompt tokens \+ max_tokens=8"):
        generation_requests([Prompt("x", ids, "", "")], SAMPLING, 64)


class Link:
    """Answers what it is told to."""

    name = "link"

    def __init__(self, **output):
        self.output = {"token_ids": [7], "logprobs": [-1.0], "finish_reason": "stop", "versions": ["4"]} | output
        self.label = ""

    def generate(self, requests):
        return [self.output for _ in requests]

    def set_version(self, version):
        self.label = version

    def get_version(self):
        return self.label

    def native(self, step, payload):
        """Accepts all."""

    def rpc(self, method, args):
        return [{"names": ["a"], "error": "", "active": True, "pid": 1}]

    def reset_prefix_cache(self):
        return False


def committed(version=4, **output):
    engine = VllmEngine(Link(**output), max_model_len=64)
    engine.commit(version)
    return engine


def test_a_completion_carries_its_prompt_and_version():
    [first, *_] = committed().generate(PROMPTS, SAMPLING)
    assert (first.prompt_id, first.sample_index, first.prompt_token_ids, first.token_ids) == ("a", 0, (1, 2, 3), (7,))
    assert (first.logprobs, first.finish_reason, first.version) == ((-1.0,), "stop", 4)
    assert committed(logprobs=[1e-6]).generate(PROMPTS, SAMPLING)[0].logprobs == (1e-6,)  # rounding of a certain token
    assert committed(token_ids=[0] * 8, logprobs=[0] * 8).generate(PROMPTS, SAMPLING)[0].token_ids == (0,) * 8
    assert committed(-3, versions=["-3"]).generate(PROMPTS, SAMPLING)[0].version == -3


@pytest.mark.parametrize("versions", [[], ["3"], ["4", "5"], [UNPROVED]])
def test_other_weights_than_the_proved_are_stale(versions):
    with pytest.raises(StaleRollout, match="a/0 was sampled with weights"):
        committed(versions=versions).generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"token_ids": [7, 8]}, "2 tokens with 1 log-probs"),
        ({"token_ids": [], "logprobs": []}, "0 tokens"),
        ({"finish_reason": "abort"}, "ended with 'abort'"),
        ({"finish_reason": None}, "ended with None"),
        ({"logprobs": [None]}, r"completion a/0: logprobs\[0\]=None is no log-prob"),
        ({"logprobs": [float("nan")]}, r"completion a/0: logprobs\[0\]=nan"),
        ({"logprobs": [-float("inf")]}, r"completion a/0: logprobs\[0\]=-inf"),
        ({"logprobs": [True]}, r"completion a/0: logprobs\[0\]=True"),
        ({"token_ids": [7, 8], "logprobs": [-1.0, 0.01]}, r"completion a/0: logprobs\[1\]=0\.01"),
        ({"token_ids": [-1]}, r"completion a/0: token_ids\[0\]=-1 is no token id"),
        ({"token_ids": ["7"]}, r"completion a/0: token_ids\[0\]='7'"),
        ({"token_ids": [7.0]}, r"completion a/0: token_ids\[0\]=7\.0"),
        ({"token_ids": [True]}, r"completion a/0: token_ids\[0\]=True"),
        ({"token_ids": [7] * 9, "logprobs": [-1.0] * 9}, "completion a/0: token_ids has 9 tokens, max_tokens=8 were asked"),
    ],
)
def test_a_malformed_answer_is_refused(output, message):
    with pytest.raises(EngineRefused, match=message):
        committed(**output).generate(PROMPTS, SAMPLING)


def test_an_open_update_takes_the_version_away():
    engine = committed()
    engine.begin()
    assert (engine.version, engine.link.label) == (None, UNPROVED)
    with pytest.raises(StaleRollout, match="no proved weights"):
        engine.generate(PROMPTS, SAMPLING)


def test_a_cache_that_was_not_emptied_is_an_error():
    with pytest.raises(WeightMismatch, match="prefix cache was not emptied"):
        committed().reset_prefix_cache()


def test_a_version_that_does_not_stick_is_an_error():
    engine = VllmEngine(Link(), max_model_len=64)
    engine.link.set_version = lambda version: None
    with pytest.raises(WeightMismatch, match="version was set to 5, the engine says ''"):
        engine.commit(5)


class Sleeper(Link):
    """Falls asleep and wakes up when told."""

    def sleep(self, level):
        """Nothing to give back."""

    def wake(self):
        """At once."""


def test_no_part_of_a_sync_makes_an_engine_usable_that_dropped_its_weights():
    """sleep level 2, wake, half a sync, an abandoned one: refused; after a complete one it samples."""
    engine = VllmEngine(Sleeper(), max_model_len=64, sleep_level=2)
    engine.commit(4)
    engine.rest()
    with pytest.raises(StaleRollout, match="link sleeps"):
        engine.generate(PROMPTS, SAMPLING)
    engine.wake()
    for step in (lambda: None, engine.begin, lambda: engine.load(0, []), engine.abort):
        step()
        assert engine.version is None
        with pytest.raises(StaleRollout, match="dropped its weights when it slept: a complete weight sync must come first"):
            engine.generate(PROMPTS, SAMPLING)
    engine.begin()
    engine.commit(4)
    assert engine.generate(PROMPTS, SAMPLING)[0].version == 4


def test_no_trace_of_a_trainer_rank_reaches_an_engine():
    base = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    env = engine_environment(
        RolloutConfig(threads=3, kv_cache_gib=2), device="cpu", base=base | {"PATH": "/bin", "OMP_NUM_THREADS": "9"}
    )
    assert not set(base) & set(env)
    assert (env["PATH"], env["OMP_NUM_THREADS"], env["VLLM_CPU_KVCACHE_SPACE"]) == ("/bin", "3", "2")
    assert (env["TORCHDYNAMO_DISABLE"], env["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("1", "0")
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(RolloutConfig(), device="cuda", base={})


def test_engine_arguments_say_everything_that_changes_a_sample():
    arguments = engine_arguments(RolloutConfig(dtype=DType.bfloat16, tensor_parallel=2), "m", device="cuda")
    assert (arguments["dtype"], arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"]) == ("bfloat16", 2, 0.6)
    assert (arguments["generation_config"], arguments["logprobs_mode"]) == ("vllm", "raw_logprobs")
    assert "gpu_memory_utilization" not in engine_arguments(RolloutConfig(), "m", device="cpu")


def test_a_server_gets_the_same_arguments():
    command = server_command(RolloutConfig(max_model_len=99), "m", port=1234, extra=["--block-size", "32"])
    options = dict(pairwise(command))
    assert (options["--host"], options["--port"], options["--max-model-len"]) == ("127.0.0.1", "1234", "99")
    assert (options["--logprobs-mode"], options["--generation-config"]) == ("raw_logprobs", "vllm")
    assert options["--weight-transfer-config"] == '{"backend": "mcore_shm"}'
    assert "--tokens-only" in command
    assert command[-2:] == ["--block-size", "32"]
    assert server_environment(RolloutConfig())["VLLM_SERVER_DEV_MODE"] == "1"
