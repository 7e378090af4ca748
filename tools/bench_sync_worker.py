"""What `bench_sync.py` asks of the engine beyond a sync: load a filled segment, or files, with no check of ours in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mcore_rl.rollout import vllm_transfer
from mcore_rl.rollout.vllm_worker import WorkerExtension
from mcore_rl.sync.digest import dtype_from_name, wire_digest
from mcore_rl.sync.shm import Segment


class BenchExtension(WorkerExtension):
    """Given to vLLM by its name."""

    _filled: Segment | None = None

    def mcore_bench_attach(self, path: str, slot_bytes: int) -> bool:
        """Map the segment that holds the whole model."""
        self._filled = Segment.attach(Path(path), slot_bytes)
        return True

    def mcore_bench_load(self, rows: list[list[Any]]) -> bool:
        """The floor: vLLM's own lifecycle over tensors that are already there. rows: name, dtype, shape, offset."""
        filled = self._filled
        if filled is None:
            raise RuntimeError("no segment to load from")
        self._load((row[0], filled.view(0, row[3], dtype_from_name(row[1]), tuple(row[2]))) for row in rows)
        return True

    def mcore_bench_reload(self, files: list[str]) -> bool:
        """A correct reload of safetensors files."""
        self._load(pair for file in files for pair in _tensors(file))
        return True

    def mcore_bench_digests(self, wanted: bool) -> bool:
        """Whether what arrives is hashed."""
        vllm_transfer.wire_digest = wire_digest if wanted else no_digest
        return True

    @torch.no_grad()
    def _load(self, tensors: Any) -> None:
        engine = self._mcore_engine()
        engine.start_weight_update()
        model: Any = engine.model
        model.load_weights(tensors)
        vllm_transfer.finalize_layerwise_reload(engine.model, engine.model_config)


def no_digest(_: torch.Tensor) -> str:
    """Of a sync that is not proved: both sides say the same."""
    return ""


def _tensors(file: str) -> Any:
    with safe_open(file, "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - a safetensors file is no mapping
            yield name, stored.get_tensor(name)
