"""vLLM servers that a run does not own, started as the README tells, and the small model they serve."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from cli_runs import wait_for

from mcore_rl.config.schema import BuildConfig, RolloutConfig
from mcore_rl.ranks import free_port
from mcore_rl.rollout.vllm_server import server_command, server_environment
from mcore_rl.tiny_model import build_tiny

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


def build_served(folder: Path) -> Path:
    """The model's folder."""
    return build_tiny(folder / "model", BUILD, seed=3)


class Server:
    """One server; `wait` before use, `kill` in any case."""

    def __init__(self, model: Path, folder: Path, name: str = "server") -> None:
        """Start it; its log is folder/name.log."""
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

    def wait(self) -> None:
        """Until it serves."""
        done = b"Application startup complete"
        wait_for(lambda: done in self.log.read_bytes() or self.process.poll() is not None, 300.0, "the server")
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """SIGKILL to it and everything it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def generations(self) -> int:
        """Requests for tokens that it has answered."""
        return self.log.read_text(errors="replace").count('"POST /inference/v1/generate HTTP/1.1" 200')
