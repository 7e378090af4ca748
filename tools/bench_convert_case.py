"""One measurement of `make bench`'s conversion part, in a process of its own: python tools/bench_convert_case.py PART ...

Prints one JSON line: seconds, and the peak of the process' anonymous memory. Imports are not timed, on either side.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from models.build import BuildOptions, build_model
from models.convert_export import ExportOptions, megatron_to_hf
from models.convert_import import hf_to_megatron
from models.convert_megatron import ImportOptions
from models.convert_staging import sync_path
from models.registry import read_spec
from models.weights import ModelWeights, export_checkpoint, load_hf_weights
from parallel.groups import initialize_groups
from parallel.layout import ParallelLayout
from parallel.runtime import start_runtime

BLOCK_BYTES = 8 * 1024**2
LAYERS, EXPERTS, HIDDEN, VOCAB, FFN, HEADS, KV_HEADS, HEAD_DIM = 24, 32, 1024, 32000, 384, 16, 4, 64


class AnonymousPeak:
    """The largest RssAnon of this process while inside, in bytes: mapped files are the page cache's, not ours."""

    def __enter__(self) -> AnonymousPeak:
        self.peak_bytes, self._stop = anonymous_bytes(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()


def anonymous_bytes() -> int:
    """RssAnon now."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def make_checkpoint(folder: Path) -> None:
    """The random 1.035 B-parameter Qwen3-MoE, a file per layer."""
    options: dict[str, Any] = {"head_dim": HEAD_DIM}  # read, but not declared, by the class
    config = Qwen3MoeConfig(
        **options,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        moe_intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    files = [{"model.embed_tokens.weight": random(generator, VOCAB, HIDDEN)}]
    where: dict[str, str] = {}
    for number in range(LAYERS + 2):
        tensors = files[0] if number == 0 else last(generator) if number > LAYERS else layer(generator, number - 1)
        file = f"model-{number + 1:05d}-of-{LAYERS + 2:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """A bf16 matrix."""
    return torch.empty(*shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def ones(size: int) -> torch.Tensor:
    """A bf16 norm."""
    return torch.ones(size, dtype=torch.bfloat16)


def last(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What follows the layers."""
    return {"model.norm.weight": ones(HIDDEN), "lm_head.weight": random(generator, VOCAB, HIDDEN)}


def layer(generator: torch.Generator, number: int) -> dict[str, torch.Tensor]:
    """One decoder layer."""
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"q_proj": (wide, HIDDEN), "k_proj": (narrow, HIDDEN), "v_proj": (narrow, HIDDEN), "o_proj": (HIDDEN, wide)}
    tensors = {f"self_attn.{name}.weight": random(generator, *shape) for name, shape in shapes.items()}
    tensors |= {f"self_attn.{name}.weight": ones(HEAD_DIM) for name in ("q_norm", "k_norm")}
    tensors |= {f"{name}.weight": ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors["mlp.gate.weight"] = random(generator, EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for name, shape in {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}.items():
            tensors[f"mlp.experts.{expert}.{name}.weight"] = random(generator, *shape)
    return {f"model.layers.{number}.{name}": tensor for name, tensor in tensors.items()}


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of the work, and the peak while it ran."""
    with AnonymousPeak() as memory:
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "anonymous_peak_bytes": memory.peak_bytes}


def copy_bytes(source: Path, target: Path) -> None:
    """A plain read and write of every byte of the weights."""
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as read, (target / path.name).open("wb") as written:
            while block := read.read(BLOCK_BYTES):
                written.write(block)


def megatron(source: Path, target: Path | None) -> dict[str, float]:
    """Our Megatron model: load the checkpoint, or (with a target) load and time the export with save."""
    start_runtime("cpu")
    groups, spec = initialize_groups(ParallelLayout(), seed=0), read_spec(source)
    chunks = build_model(spec, groups, BuildOptions(dtype=torch.bfloat16))
    loaded = timed(lambda: load_hf_weights(chunks, spec, groups, source))
    if target is None:
        return loaded
    return timed(lambda: export_checkpoint(ModelWeights(chunks, spec, groups), spec, source=source, target=target))


def transformers(source: Path, target: Path | None) -> dict[str, float]:
    """transformers: from_pretrained, or (with a target) save_pretrained."""
    held: list[Any] = []
    loaded = timed(lambda: held.append(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)))
    if target is None:
        return loaded
    model = held[0]
    return timed(lambda: model.save_pretrained(target))


def sync_folder(folder: Path) -> dict[str, float]:
    """What waiting for the disk would add."""
    return timed(lambda: [sync_path(path) for path in sorted(folder.rglob("*")) if path.is_file()])


def measure(part: str, source: Path, target: Path) -> dict[str, float]:
    """Run one part."""
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "make": lambda: timed(lambda: make_checkpoint(source)),
        "copy": lambda: timed(lambda: copy_bytes(source, target)),
        "from_pretrained": lambda: transformers(source, None),
        "save_pretrained": lambda: transformers(source, target),
        "load": lambda: megatron(source, None),
        "export": lambda: megatron(source, target),
        "convert": lambda: timed(lambda: hf_to_megatron(source, target, ImportOptions(fsync=False))),
        "convert_back": lambda: timed(lambda: megatron_to_hf(source, target, ExportOptions(fsync=False))),
        "fsync": lambda: sync_folder(target),
    }
    return parts[part]()


def main() -> None:
    """Command line."""
    part, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print("BENCH " + json.dumps(measure(part, source, target)))


if __name__ == "__main__":
    main()
