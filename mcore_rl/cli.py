"""The command line: `mcore-rl train|sft|eval|report`.

Help, unknown keys and wrong types are answered before torch is imported; what a command needs is loaded by name once
it is known which one runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mcore_rl.config.compose import compose_config, resolved_yaml
from mcore_rl.config.keys import close_matches
from mcore_rl.config.validate_fields import validate_fields
from mcore_rl.help import COMMANDS, help_text, keys_text
from mcore_rl.run_folder import RunFolder

_WRONG_INPUT = 2
_FLAGS = {"-h": "--help", "--help": "--help", "--cfg": "--cfg", "--keys": "--keys"}


@dataclass(frozen=True)
class Request:
    """A parsed command line: command ("" when none was given), its words, its flags."""

    command: str
    words: tuple[str, ...]
    flags: frozenset[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Wrong input is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        request = parse(words)
        if "--help" in request.flags or not request.command:
            return _say(help_text(request.command))
        if "--keys" in request.flags:
            return _say(keys_text())
        if request.command == "report":
            return _report(request.words)
        return _stage(request, [Path(sys.argv[0]).name, *words])
    except ValueError as error:
        sys.stderr.write(f"mcore-rl: {' '.join(str(error).split())}\n")
        return _WRONG_INPUT


def parse(words: Sequence[str]) -> Request:
    """Split a command line. ValueError naming an unknown command or flag."""
    for word in words:
        if word.startswith("-") and word not in _FLAGS:
            raise ValueError(f"{word}: no such flag{close_matches(word, _FLAGS)}; settings are key=value, as in train.steps=3")
    flags = frozenset(_FLAGS[word] for word in words if word in _FLAGS)
    plain = [word for word in words if word not in _FLAGS]
    if plain and plain[0] not in COMMANDS:
        raise ValueError(f"{plain[0]}: no such command{close_matches(plain[0], COMMANDS)}; see mcore-rl --help")
    return Request(plain[0] if plain else "", tuple(plain[1:]), flags)


def _stage(request: Request, command: list[str]) -> int:
    config = compose_config(request.words)
    if "--cfg" in request.flags:
        return _say(resolved_yaml(config))
    validate_fields(config)
    if "RANK" in os.environ:
        return import_module("mcore_rl.rank").run_under_torchrun(request.command, config, command)
    return import_module("mcore_rl.launch").launch(request.command, config, command)


def _report(words: Sequence[str]) -> int:
    folders = [Path(word.removeprefix("run=")) for word in words]
    if len(folders) != 1:
        raise ValueError("report: give one run folder, as in mcore-rl report runs/quickstart")
    return _say(f"{import_module('mcore_rl.report').write_report(RunFolder(folders[0]))}\n")


def _say(text: str) -> int:
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0
