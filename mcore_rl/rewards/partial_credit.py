"""Graded measures in [0, 1] whose whole range needs a better answer: overlap of word bags, overlap of boxes."""

from __future__ import annotations

import math
import re
from collections import Counter

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SEPARATORS = re.compile(r"[\s,;|]+")


def token_f1(candidate: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words of two answers, each counted as often as it occurs.

    Words are what stands between spaces, commas, semicolons and bars; case does not count. 0 when either has none.
    Source: SQuAD, arXiv 1606.05250, without its removal of articles.
    """
    left, right = (Counter(word for word in SEPARATORS.split(text.casefold()) if word) for text in (candidate, reference))
    shared = (left & right).total()
    return 2.0 * shared / (left.total() + right.total()) if shared else 0.0


def box_iou(candidate: str, reference: str) -> float:
    """Intersection over union of two boxes `x1, y1, x2, y2`; 0 when either is no box. Areas are never negative."""
    left, right = parse_box(candidate), parse_box(reference)
    if left is None or right is None:
        return 0.0
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    shared = max(0.0, width) * max(0.0, height)
    union = _area(left) + _area(right) - shared
    return shared / union if union > 0.0 else 0.0


def parse_box(text: str) -> tuple[float, float, float, float] | None:
    """The four numbers of a box with x1 <= x2 and y1 <= y2; None for anything else, also for text around it."""
    inner = text.strip().removeprefix("[").removesuffix("]").removeprefix("(").removesuffix(")")
    parts = [part.strip() for part in inner.split(",")]
    if len(parts) != 4 or not all(NUMBER.fullmatch(part) for part in parts):
        return None
    x1, y1, x2, y2 = (float(part) for part in parts)
    if not all(math.isfinite(value) for value in (x1, y1, x2, y2)) or x1 > x2 or y1 > y2:
        return None
    return x1, y1, x2, y2


def _area(box: tuple[float, float, float, float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
