"""What the schema knows about a dotted key: does it exist, what may stand there, which key was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mcore_rl.config.schema import RunConfig

_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def close_matches(word: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` where something is near, else the options themselves where they are few."""
    known = sorted(set(options))
    near = get_close_matches(word, known, n=2, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(name) for name in near) + "?"
    return f"; there is {', '.join(known)}" if 0 < len(known) <= 16 else ""


def without_none(hint: object) -> object:
    """`X | None` -> `X`; anything else unchanged."""
    if get_origin(hint) in (Union, UnionType):
        kept = [arg for arg in get_args(hint) if arg is not NoneType]
        return kept[0] if len(kept) == 1 else hint
    return hint


def type_at(key: str, *, extra: Iterable[str] = ()) -> object:
    """Type hint at the dotted `key` of RunConfig; keys inside free dictionaries are `Any`.

    extra: more names that may be meant at the top level (the config groups).
    Raises ValueError naming the part that does not exist and the nearest that do.
    """
    hint: object = RunConfig
    parts = key.split(".")
    for depth, part in enumerate(parts):
        node = without_none(hint)
        if get_origin(node) is dict:
            return Any
        fields = get_type_hints(node) if isinstance(node, type) and is_dataclass(node) else {}
        if part not in fields:
            raise ValueError(_unknown(key, parts[:depth], part, [*fields, *([] if depth else extra)]))
        hint = fields[part]
    return hint


def in_free_dict(key: str) -> bool:
    """True where `key` lies inside a dictionary without a schema (model.build.hf_config, model.chat_template_kwargs)."""
    parts = key.split(".")
    return any(get_origin(without_none(type_at(".".join(parts[:end])))) is dict for end in range(1, len(parts)))


def describe(hint: object) -> str:
    """What may be written for a type, in words."""
    node = without_none(hint)
    words = _describe(node)
    return words if node is hint else f"{words}, or null"


def _describe(node: object) -> str:
    if isinstance(node, type) and issubclass(node, Enum):
        return "one of " + ", ".join(member.name for member in node)
    if isinstance(node, type) and is_dataclass(node):
        return "a group of keys: " + ", ".join(get_type_hints(node))
    if get_origin(node) is list:
        return "a list like [a,b] of " + _describe(get_args(node)[0])
    if get_origin(node) is dict:
        return "key: value pairs"
    return _WORDS.get(node.__name__, "a value") if isinstance(node, type) else "a value"


def all_keys(node: object = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted leaf key of the schema."""
    found: list[str] = []
    for name, hint in get_type_hints(node).items():
        inner = without_none(hint)
        if isinstance(inner, type) and is_dataclass(inner):
            found += all_keys(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def _unknown(key: str, above: list[str], part: str, fields: list[str]) -> str:
    if above and not fields:
        return f"{key}: {'.'.join(above)} has no keys below it"
    where = f"no key {part!r} in {'.'.join(above)}" if above else f"no such key {part!r}"
    hint = close_matches(part, fields)
    if "did you mean" not in hint:
        elsewhere = [name for name in all_keys() if name.rsplit(".", 1)[-1] == part]
        hint = f"; did you mean {' or '.join(repr(name) for name in elsewhere)}?" if elsewhere else hint
    return f"{key}: {where}{hint}"
