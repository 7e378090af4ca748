"""The command line: `mcore-rl train|sft|distill|eval|probe|report` and the checkpoint tools (`mcore_rl.cli_tools`).

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

from mcore_rl.cli_tools import TOOLS, run_tool
from mcore_rl.config.compose import compose_config, resolved_yaml
from mcore_rl.config.keys import close_matches
from mcore_rl.config.schema import RunConfig
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
    command = [Path(sys.argv[0]).name, *words]
    try:
        if words[:1] and words[0] in TOOLS:
            return run_tool(words[0], words[1:])
        request = parse(words)
        config = _answer(request)
        if config is None:
            return 0
        if "RANK" not in os.environ:
            return import_module("mcore_rl.launch").launch(request.command, config, command)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"mcore-rl: {' '.join(str(error).split())}\n")
        return _WRONG_INPUT
    return import_module("mcore_rl.rank").run_under_torchrun(request.command, config, command)


def parse(words: Sequence[str]) -> Request:
    """Split a command line. ValueError naming an unknown command or flag."""
    for word in words:
        if word.startswith("-") and word not in _FLAGS:
            raise ValueError(f"{word}: no such flag{close_matches(word, _FLAGS)}; settings are key=value, as in train.steps=3")
    flags = frozenset(_FLAGS[word] for word in words if word in _FLAGS)
    plain = [word for word in words if word not in _FLAGS]
    if plain and plain[0] not in COMMANDS:
        raise ValueError(f"{plain[0]}: no such command{close_matches(plain[0], COMMANDS | TOOLS)}; see mcore-rl --help")
    return Request(plain[0] if plain else "", tuple(plain[1:]), flags)


def _answer(request: Request) -> RunConfig | None:
    """The configuration of a stage that is to run; None when the command was answered right here."""
    if "--help" in request.flags or not request.command:
        return _say(help_text(request.command))
    if "--keys" in request.flags:
        return _say(keys_text())
    if request.command == "report":
        return _say(f"{import_module('mcore_rl.report').write_report(_one_folder(request.words))}\n")
    config = compose_config(request.words)
    if "--cfg" in request.flags:
        return _say(resolved_yaml(config))
    validate_fields(config)
    return config


def _one_folder(words: Sequence[str]) -> RunFolder:
    if len(words) != 1:
        raise ValueError("report: give one run folder, as in mcore-rl report runs/quickstart")
    return RunFolder(Path(words[0].removeprefix("run=")))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
