"""`mcore-rl convert|verify|inspect|reshard`: their options and their help, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

TOOLS = {
    "convert": "Hugging Face folder -> Megatron distributed checkpoint, or back",
    "verify": "is a Megatron checkpoint the same model as a Hugging Face folder: bits, digests, forward",
    "inspect": "names, shapes, dtypes and files of a checkpoint of either kind",
    "contract": "do two engine settings pass the rollout-correctness gates: KL, step time, held-out accuracy",
    "average": "the mean of several Hugging Face folders of one model",
    "reshard": "the same checkpoint cut anew: for a tensor-parallel layout, or in files of another size",
}
_CONVERT = """\
What SOURCE is decides the direction. TARGET appears when it is complete; an interrupted conversion goes on where it
stopped when the same command is given again. Memory: about one tensor. A Megatron checkpoint loads at any layout
(dist_checkpointing.load). Tensors that are not a decoder's (vision tower, MTP) travel along unchanged.

  mcore-rl convert /models/Qwen3-30B-A3B /models/qwen3-megatron
  mcore-rl convert /models/qwen3-megatron /models/back
  mcore-rl convert runs/mine/megatron /models/mine --reference /models/Qwen3-30B-A3B
"""
_VERIFY = """\
Compares every tensor bit by bit, the digests of the stored pieces, and the log-probs of both models on random tokens
(transformers against Megatron, fp32 on the CPU, one layer in memory at a time). Exit status 1 when they differ.

  mcore-rl verify /models/qwen3-megatron /models/Qwen3-30B-A3B
"""
_INSPECT = """\
  mcore-rl inspect /models/qwen3-megatron
  mcore-rl inspect /models/Qwen3-30B-A3B --json --digests
"""
_RESHARD = """\
  mcore-rl reshard /models/qwen3-megatron /models/qwen3-megatron-tp8 --tp 8
  mcore-rl reshard /models/Qwen3-30B-A3B /models/smaller-files --shard-gb 2
"""


_CONTRACT = """\
TARGET and ACCELERATED are folders of two finished runs that differ in the rollout and sync sections alone. Both engines hold
TARGET's checkpoint and score its last responses, one engine after the other. A: mean forward KL < 0.05 nats per token, with
its bootstrap interval. B: a step is faster. C: held-out accuracy is not worse beyond its paired interval. Exit status 1
unless all pass.

  mcore-rl contract runs/fp32 runs/bf16 --responses 200
"""
_AVERAGE = """\
Adds up in fp32 and stores as the first SOURCE does, with its configuration, tokenizer and files. All must be the same model;
equal checkpoints give exactly themselves.

  mcore-rl average runs/a/checkpoint runs/b/checkpoint runs/c/checkpoint --target /models/mean
  mcore-rl average runs/a/checkpoint runs/b/checkpoint --weights 3 1 --target /models/mean
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def _parser(command: str, text: str) -> argparse.ArgumentParser:
    return _Parser(
        prog=f"mcore-rl {command}",
        description=TOOLS[command] + ".",
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_cut(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, default=1, help="cut Megatron's tensors for that many tensor-parallel ranks")
    parser.add_argument("--etp", type=int, default=1, help="the same for the experts' tensors")


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=_path, metavar="SOURCE")
    parser.add_argument("target", type=_path, metavar="TARGET", help="must not exist")
    parser.add_argument("--no-fsync", action="store_true", help="do not wait until everything is on the disk")


def _convert() -> argparse.ArgumentParser:
    parser = _parser("convert", _CONVERT)
    _add_target(parser)
    parser.add_argument("--reference", type=_path, help="Hugging Face folder with configuration, tokenizer and file layout")
    parser.add_argument("--text-only", action="store_true", help="the decoder of a vision model alone (Megatron -> Hugging Face)")
    parser.add_argument("--mtp", choices=("keep", "drop"), default="keep", help="tensors of multi-token prediction")
    _add_cut(parser)
    return parser


def _verify() -> argparse.ArgumentParser:
    parser = _parser("verify", _VERIFY)
    parser.add_argument("megatron", type=_path, metavar="MEGATRON")
    parser.add_argument("hf", type=_path, metavar="HF")
    parser.add_argument("--no-forward", action="store_true", help="bits and digests only (needs neither Megatron nor time)")
    return parser


def _inspect() -> argparse.ArgumentParser:
    parser = _parser("inspect", _INSPECT)
    parser.add_argument("folder", type=_path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--digests", action="store_true", help="xxh3-64 of every tensor's bytes (reads everything)")
    return parser


def _contract() -> argparse.ArgumentParser:
    parser = _parser("contract", _CONTRACT)
    parser.add_argument("target", type=_path, metavar="TARGET")
    parser.add_argument("accelerated", type=_path, metavar="ACCELERATED")
    parser.add_argument("--responses", type=int, default=100, help="how many of TARGET's last responses are scored")
    parser.add_argument("--out", type=_path, help="verdict file; default: contract.json in ACCELERATED")
    return parser


def _average() -> argparse.ArgumentParser:
    parser = _parser("average", _AVERAGE)
    parser.add_argument("sources", type=_path, nargs="+", metavar="SOURCE")
    parser.add_argument("--target", type=_path, required=True, help="must not exist")
    parser.add_argument("--weights", type=float, nargs="+", help="one positive number for each SOURCE; all alike without")
    parser.add_argument("--no-fsync", action="store_true", help="do not wait until everything is on the disk")
    return parser


def _reshard() -> argparse.ArgumentParser:
    parser = _parser("reshard", _RESHARD)
    _add_target(parser)
    _add_cut(parser)
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest file of a Hugging Face folder, in GB")
    return parser


_PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "convert": _convert,
    "verify": _verify,
    "inspect": _inspect,
    "contract": _contract,
    "average": _average,
    "reshard": _reshard,
}


def run_tool(command: str, words: Sequence[str]) -> int:
    """Run one of TOOLS; the exit code. ValueError in one line for wrong options and damaged checkpoints."""
    arguments = _PARSERS[command]().parse_args(words)
    return import_module("mcore_rl.cli_checkpoints").ACTIONS[command](arguments)
