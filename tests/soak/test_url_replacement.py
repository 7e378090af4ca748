"""Two servers by a file of addresses; one is killed in mid-run and another takes its place by a change of the file."""

import os
import signal
import subprocess

import pytest
from chaos_runs import HELD, compare
from cli_runs import start_run, wait_for, wait_for_rows

from mcore_rl.config.schema import BuildConfig, RolloutConfig
from mcore_rl.ranks import free_port
from mcore_rl.rollout.vllm_server import server_command, server_environment
from mcore_rl.tiny_model import build_tiny

STEPS = 16
RUN = (f"train.steps={STEPS}", "rollout.max_tokens=60", "rollout.max_model_len=128", "model.build=null")
BUILD = BuildConfig(
    hf_config={
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
)


class Server:
    """As the README tells to start one."""

    def __init__(self, model, folder, name):
        config, port = RolloutConfig(max_model_len=128), free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                server_command(config, str(model), port=port),
                env=server_environment(config),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(self):
        """Until it serves."""
        done = b"Application startup complete"
        wait_for(lambda: done in self.log.read_bytes() or self.process.poll() is not None, 300.0, "the server")
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]

    def kill(self):
        """SIGKILL to it and everything it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def generations(self):
        """Requests for tokens that it has answered."""
        return self.log.read_text(errors="replace").count('"POST /inference/v1/generate HTTP/1.1" 200')


@pytest.fixture
def servers(tmp_path):
    """Three of them, serving the same model."""
    model = build_tiny(tmp_path / "model", BUILD, seed=3)
    started = [Server(model, tmp_path, name) for name in "abc"]
    for server in started:
        server.wait()
    yield model, *started
    for server in started:
        server.kill()


@pytest.mark.timeout(1500)
def test_a_killed_server_is_replaced_by_a_change_of_the_file(tmp_path, servers):
    model, first, second, third = servers
    addresses = tmp_path / "servers.txt"
    addresses.write_text(f"{first.url}\n{second.url}\n")
    calm = start_run(tmp_path, "calm", *HELD, *RUN, f"model.path={model}")
    code, _, err = calm.finish(300.0)
    assert code == 0, err[-2000:]

    placement = ("rollout.placement=url", f"rollout.url_file={addresses}", "rollout.request_timeout_s=30")
    run = start_run(tmp_path, "struck", *HELD, *RUN, f"model.path={model}", *placement)
    wait_for_rows(run, 2)
    second.kill()
    alone = len(run.rows()) + 2
    wait_for_rows(run, alone)
    addresses.write_text(f"# b died\n{first.url}\n{third.url}\n")
    code, out, err = run.finish(300.0)
    assert code == 0, err[-2000:]

    alive = [row["engine/alive"] for row in run.rows()]
    assert alive[0] == alive[-1] == 2 and 1 in alive, alive
    assert run.rows()[-1]["engine/restarts"] == 1
    assert "write the address of another into" in out and f"engine {third.url} joined" in out
    assert min(server.generations for server in (first, second, third)) > 0
    found = compare(run, calm)
    assert (found.total, found.missing, found.doubled) == (STEPS * 4 * 2, [], [])
    assert found.equal >= 0.99 * found.total, found.different
    assert run.leftovers() == []
    assert first.process.poll() is None and third.process.poll() is None
