"""transformers' forward of a checkpoint, one decoder layer in memory at a time: `python -m models.convert_forward_hf`.

The model lives on the meta device. Each part is filled from the folder just before it runs (fp32) and emptied after.
Runs in a process of its own, which has none of the patches that Megatron needs on a CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.convert_carried import TIED_HEAD
from models.hf_io import CheckpointReader, expert_parts
from models.registry import read_spec
from models.spec import ModelSpec

_OWN_PREFIX = "model."


class _Parts:
    """Fills and empties the parts of a model on the meta device."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._reader, self._spec = CheckpointReader(folder), spec
        self.seen: dict[str, Tensor] = {}

    def _stored(self, name: str) -> str:
        if name == TIED_HEAD and self._spec.tied_embeddings:
            name = _OWN_PREFIX + "embed_tokens.weight"
        return self._spec.text_prefix + name.removeprefix(_OWN_PREFIX) if name.startswith(_OWN_PREFIX) else name

    def _fill(self, parameter: Tensor, name: str) -> None:
        stored, known = self._stored(name), self._reader.names()
        if stored in known:
            parameter.copy_(self._reader.read(stored))
            return
        for alias, part in expert_parts(stored, parameter.shape[0]):
            part.of(parameter).copy_(self._reader.read(alias))

    @torch.no_grad()
    def load(self, module: nn.Module, prefix: str) -> None:
        """Give the module real memory and the checkpoint's values."""
        module.to_empty(device="cpu")
        for name, parameter in module.named_parameters():
            self._fill(parameter, f"{prefix}.{name}")

    def attach(self, module: nn.Module, prefix: str, *, record: str | None = None) -> None:
        """Load before the module runs, empty it after; `record` keeps its output under that name."""

        def before(*_: Any) -> None:
            self.load(module, prefix)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            module.to("meta")
            if record is not None:
                self.seen[record] = (output[0] if isinstance(output, tuple) else output).detach().float().flatten(0, 1)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def _meta_model(folder: Path) -> Any:
    """transformers' decoder on the meta device, its rotary frequencies (which no file holds) real."""
    absent: dict[str, Any] = {"fla": None}  # its kernels need a GPU; without it transformers takes its torch code
    sys.modules.update({name: module for name, module in absent.items() if name not in sys.modules})
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(folder).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    return model.eval()


def layer_name(number: int) -> str:
    """Name of a layer's output in the files that both sides write."""
    return f"layer {number}"


@torch.no_grad()
def run(folder: Path, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Outputs of every decoder layer [B x T, H] and the logits [B x T, V] of B rows of equal length, fp32."""
    spec = read_spec(folder)
    model, parts = _meta_model(folder), _Parts(folder, spec)
    parts.attach(model.model.embed_tokens, "model.embed_tokens")
    for number, layer in enumerate(model.model.layers):
        parts.attach(layer, f"model.layers.{number}", record=layer_name(number))
    parts.attach(model.model.norm, "model.norm")
    parts.attach(model.lm_head, "lm_head", record="logits")
    model(input_ids=torch.tensor(rows), use_cache=False)
    return parts.seen


def main(argv: Sequence[str]) -> int:
    """argv: folder, file with the token ids, file to write."""
    torch.set_num_threads(1)
    folder, rows, out = (Path(word) for word in argv)
    save_file({name: t.contiguous() for name, t in run(folder, json.loads(rows.read_text(encoding="utf-8"))).items()}, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
