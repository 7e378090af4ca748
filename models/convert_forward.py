"""Megatron's forward of a distributed checkpoint, one decoder layer in memory at a time: `python -m models.convert_forward`.

Every layer is built as the pipeline stage of its own that it would be with as many stages as layers, filled from the
checkpoint (fp32), run, and dropped. Runs in a process of its own: Megatron's CPU patches are for a process' lifetime.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.build import BuildOptions, build_model, forward_packed
from models.checkpoint_layout import sections_of
from models.checkpoint_reader import MegatronReader
from models.convert_forward_hf import layer_name
from models.meta import pretend_rank
from models.parameters import canonical_parameters, unwrapped
from models.registry import read_spec, weight_map
from models.router import router_pass
from models.spec import ModelSpec
from models.weight_map import Rule
from parallel.layout import ParallelLayout


def _fill(parameter: nn.Parameter, rule: Rule, reader: MegatronReader, spec: ModelSpec) -> None:
    """The whole parameter as the checkpoint stores it; rows of the vocabulary's padding are zero."""
    parameter.data.zero_()
    start = 0
    for section in sections_of(rule, spec, stacked=reader.stacked):
        piece = reader.read(section)[: parameter.shape[0] - start]
        parameter.data[start : start + piece.shape[0]].copy_(piece)
        start += piece.shape[0]


class _Stages:
    def __init__(self, reader: MegatronReader, spec: ModelSpec) -> None:
        self._reader = reader
        self.spec = replace(spec, dtype=torch.float32, other_dtypes=())
        rules = weight_map(self.spec)
        self._rules = {rule.megatron: rule for rule in rules}
        first = {rule.tensors: rule for rule in rules if rule.exported}
        self._rules |= {rule.megatron: first[rule.tensors] for rule in rules if not rule.exported}

    def run(self, layout: ParallelLayout, rank: int, hidden: Tensor | None, row: tuple[Tensor, Tensor, int]) -> Tensor:
        """Output of stage `rank`: hidden states [T, 1, H], or logits [T, padded vocabulary] of the last one."""
        with pretend_rank(layout, rank) as groups:
            (chunk,) = build_model(self.spec, groups, BuildOptions(dtype=torch.float32, impl="local"))
            for name, parameter in canonical_parameters([chunk], self.spec, layout, rank).items():
                _fill(parameter, self._rules[name], self._reader, self.spec)
            model: Any = unwrapped(chunk)
            if hidden is not None:
                model.set_input_tensor(hidden)
            with router_pass([chunk], "eval", torch.ones_like(row[0], dtype=torch.bool)):
                return forward_packed(chunk, *row)


@torch.no_grad()
def run(folder: Path, companions: Path, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Outputs of every layer but the last [B x T, H] and the logits [B x T, V] of B rows of equal length, fp32."""
    spec = read_spec(companions)
    stages = _Stages(MegatronReader(folder), spec)
    tokens = torch.tensor([token for row in rows for token in row])
    borders = torch.arange(len(rows) + 1, dtype=torch.int32) * len(rows[0])
    layout = ParallelLayout(world=spec.num_layers, pp=spec.num_layers)
    seen: dict[str, Tensor] = {}
    hidden: Tensor | None = None
    for number in range(spec.num_layers):
        hidden = stages.run(layout, number, hidden, (tokens, borders, len(rows[0])))
        seen[layer_name(number)] = hidden.reshape(len(tokens), -1)
    logits = seen.pop(layer_name(spec.num_layers - 1))
    return seen | {"logits": logits[:, : spec.vocab_size]}


def main(argv: Sequence[str]) -> int:
    """argv: checkpoint, folder with its config.json, file with the token ids, file to write."""
    torch.set_num_threads(1)
    folder, companions, rows, out = (Path(word) for word in argv)
    seen = run(folder, companions, json.loads(rows.read_text(encoding="utf-8")))
    save_file({name: t.contiguous() for name, t in seen.items()}, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
