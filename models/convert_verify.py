"""Is a Megatron checkpoint the same model as a Hugging Face folder? Bit by bit, by digest, and by what they compute.

The forwards run in two child processes, layer by layer, so that a large checkpoint needs the memory of one layer.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint_items import digest_of
from models.checkpoint_reader import MegatronReader, place_name, stored_digests
from models.convert_export import CheckpointSource, ExportOptions
from models.convert_megatron import COMPANIONS, layout_fault
from models.convert_staging import Report, Step, silent
from models.hf_io import CheckpointReader
from models.hf_write import TOKENIZER_FILES
from models.spec import ModelSpec

ROWS, TOKENS, SEED = 2, 24, 0
TOLERANCE = 1e-4
_LIMIT_S = 7200.0


@dataclass(frozen=True)
class Comparison:
    """tensors: how many are compared; different: names of those, and of the tokenizer's files, that are not the same bits."""

    tensors: int
    different: tuple[str, ...]


@dataclass(frozen=True)
class Parity:
    """Largest |log-prob difference| over all tokens and the whole vocabulary, in nats, and where the two begin to part.

    layers: name -> largest |difference| of its output relative to its largest |value|; the last layer shows in the logits.
    """

    max_logprob_difference_nats: float
    greedy_equal: bool
    layers: dict[str, float]

    @property
    def ok(self) -> bool:
        """Within 1e-4 nats, and the same most likely token everywhere."""
        return self.max_logprob_difference_nats <= TOLERANCE and self.greedy_equal

    def first_different_layer(self) -> str | None:
        """The first layer that is further off than the tolerance."""
        return next((name for name, difference in self.layers.items() if not difference <= TOLERANCE), None)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Dtype, shape and every bit."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().reshape(-1).view(torch.uint8).equal(other.contiguous().reshape(-1).view(torch.uint8))


def compare_tensors(megatron: Path, hf: Path, report: Report = silent) -> Comparison:
    """Every tensor of the Hugging Face folder against the checkpoint, carried ones too, and the tokenizer's files.

    ValueError when one side lacks a tensor.

    A checkpoint without a hugging_face/ folder of its own, as Megatron saves them, takes its layout from `hf`.
    """
    options = ExportOptions(reference=None if (megatron / COMPANIONS).is_dir() else hf)
    source = CheckpointSource(megatron, options, check_digests=False)
    reader = CheckpointReader(hf)
    planned = {slot.name for plan in source.plans for slot in plan.slots}
    for name in sorted(reader.stored_names() ^ planned):
        where = hf if name in planned else megatron
        raise ValueError(f"{where} lacks the tensor {name}, which the other side has")
    different: list[str] = []
    total, done = sum(plan.nbytes for plan in source.plans), 0
    for plan in source.plans:
        for slot in plan.slots:
            pieces = list(source.pieces(slot))
            made = pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces]).reshape(slot.shape)
            if not same_bits(made, reader.read_stored(slot.name)):
                different.append(slot.name)
        done += plan.nbytes
        report(Step(plan.file, done, total, resumed=False))
    return Comparison(len(planned), (*different, *_different_tokenizers(megatron / COMPANIONS, hf)))


def _different_tokenizers(own: Path, hf: Path) -> list[str]:
    """Files that turn text into tokens and are not the same on both sides; none where the checkpoint has no such folder."""
    names = TOKENIZER_FILES if own.is_dir() else ()
    return [name for name in names if _bytes_of(own / name) != _bytes_of(hf / name)]


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def wrong_digests(folder: Path) -> Iterator[str]:
    """Keys of stored pieces whose bytes are not those that were written, and what is wrong with the layout of the files.

    Nothing for a checkpoint without digests.
    """
    known = stored_digests(folder)
    if known is None:
        return
    fault = layout_fault(folder / COMPANIONS)
    if fault is not None:
        yield fault
    reader = MegatronReader(folder)
    for key in sorted(known.keys() | reader.weights()):
        tensor = reader.stored(key)
        for chunk in tensor.chunks:
            written = known.get(key, {}).get(place_name(chunk.offset))
            if written != digest_of(reader.chunk(tensor, chunk)):
                yield f"{reader.folder / chunk.file}: {key} at {list(chunk.offset)}"


def _rows(spec: ModelSpec) -> list[list[int]]:
    """Token ids to run: random, the same for everybody."""
    generator = torch.Generator().manual_seed(SEED)
    length = min(TOKENS, spec.max_positions)
    return torch.randint(0, spec.vocab_size, (ROWS, length), generator=generator).tolist()


def _child(module: str, arguments: list[Path]) -> None:
    command = [sys.executable, "-m", module, *(str(argument) for argument in arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.strip().splitlines() if line.strip()]
        raise ValueError(f"{module}: {lines[-1] if lines else f'ended with exit status {ended.returncode}'}")


def compare_forwards(megatron: Path, hf: Path, spec: ModelSpec) -> Parity:
    """Run both, fp32 on the CPU. ValueError with the last line of a side that could not run."""
    with tempfile.TemporaryDirectory(prefix="mcore_rl-verify-") as name:
        scratch = Path(name)
        rows, ours, theirs = scratch / "rows.json", scratch / "megatron.safetensors", scratch / "hf.safetensors"
        rows.write_text(json.dumps(_rows(spec)), encoding="utf-8")
        own = megatron / COMPANIONS
        _child("models.convert_forward_hf", [hf, rows, theirs])
        _child("models.convert_forward", [megatron, own if own.is_dir() else hf, rows, ours])
        return parity_of(load_file(ours), load_file(theirs))


def parity_of(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Parity:
    """Compare the outputs of both sides, by name."""
    for name in sorted(ours.keys() & theirs.keys(), key=_number):
        if ours[name].shape != theirs[name].shape:
            sizes = f"{list(ours[name].shape)} and {list(theirs[name].shape)}"
            raise ValueError(f"the checkpoints are of models of different sizes: {name} has {sizes}")
    layers = {name: _relative(ours[name], theirs[name]) for name in sorted(ours, key=_number) if name in theirs}
    logits = layers.pop("logits")
    one, other = ours["logits"].log_softmax(-1), theirs["logits"].log_softmax(-1)
    difference = float((one - other).abs().max())
    equal = bool((one.argmax(-1) == other.argmax(-1)).all())
    return Parity(difference if math.isfinite(difference) else math.inf, equal, layers | {"logits": logits})


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def _number(name: str) -> tuple[int, int]:
    return (1, 0) if name == "logits" else (0, int(name.rpartition(" ")[2]))
