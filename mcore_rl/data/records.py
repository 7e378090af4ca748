"""From a JSON object to a dataclass of plain values: every field there, none besides, each of its type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

Record = TypeVar("Record")
NAMES = {str: "a text", int: "a whole number", float: "a finite number"}


def read_record(kind: type[Record], found: Any, where: str) -> Record:
    """`found` as a `kind`, whose fields are str, int or float. ValueError naming `where` and the key that is wrong."""
    if not is_dataclass(kind) or not isinstance(found, Mapping):
        raise ValueError(f"{where}: {type(found).__name__} where an object is needed")
    types = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    unknown = [str(key) for key in found if key not in names]
    missing = [name for name in names if name not in found]
    if unknown or missing:
        raise ValueError(f"{where}: missing keys {missing}, unknown keys {unknown}; the keys are {names}")
    for name in names:
        _check(types[name], found[name], f"{where}: key '{name}'")
    return kind(**found)


def _check(kind: type, value: object, where: str) -> None:
    """ValueError naming `where` unless `value` is of `kind`; a whole number is a float too, a bool is no number."""
    fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where} is {value!r}; {NAMES[kind]} is needed")
