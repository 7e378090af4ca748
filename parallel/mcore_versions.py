"""Everything that differs between the supported Megatron-Core versions: 0.16.1 up to, but not including, 0.20.

A version outside that range is refused by name: internals that the CPU patches and the schedule rely on change there.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from types import ModuleType

OLDEST = (0, 16, 1)
BEYOND = (0, 20, 0)


def parse_version(text: str) -> tuple[int, int, int]:
    """Major, minor and patch of a version string such as "0.19.2" or "0.16.1rc1"; ValueError when it is not one."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise ValueError(f"megatron-core: {text!r} is not a version")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def check_supported(text: str) -> tuple[int, int, int]:
    """The parsed version; RuntimeError naming it when it lies outside the supported range."""
    parsed = parse_version(text)
    if not OLDEST <= parsed < BEYOND:
        raise RuntimeError(f"megatron-core {text} is not supported: install megatron-core>=0.16.1,<0.20")
    return parsed


def megatron_version() -> tuple[int, int, int]:
    """Version of the installed Megatron-Core; RuntimeError naming it when it is not supported."""
    return check_supported(version("megatron-core"))


def router_gemm_undefined(moe_utils: ModuleType) -> bool:
    """True for 0.16, whose router tests `te_general_gemm` without defining it when TransformerEngine is missing."""
    return "te_general_gemm" not in vars(moe_utils)
