"""Precisions that a model or an engine computes in."""

from __future__ import annotations

from enum import Enum


class DType(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
