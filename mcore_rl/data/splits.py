"""Stable split of questions by hash: the same question is in the same split in every run, seed and process."""

from __future__ import annotations

import hashlib

BUCKETS = 10
TEST_BUCKET, VAL_BUCKET = 0, 1
SPLITS = ("train", "val", "test")


def split_of(question: str) -> str:
    """train, val or test: md5 of the question modulo 10; 0 is test, 1 is val, the rest is train."""
    bucket = int(hashlib.md5(question.encode(), usedforsecurity=False).hexdigest(), 16) % BUCKETS
    return {TEST_BUCKET: "test", VAL_BUCKET: "val"}.get(bucket, "train")


def require_split(split: str) -> None:
    """ValueError unless `split` is one that is held out."""
    if split not in SPLITS[1:]:
        raise ValueError(f"evaluation split '{split}' is unknown; one of {list(SPLITS[1:])}")
