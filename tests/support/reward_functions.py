"""Reward functions for tests: they run in reward processes, which find this folder on PYTHONPATH."""

import os
import time
from pathlib import Path

import numpy as np


def echo(sample):
    """What the sample says to do: a number comes back, or something goes wrong."""
    what = sample["text"]
    if what == "hang":
        return 9 ** (9**9)  # years of C code, no bytecode boundary
    if what == "sleep":
        time.sleep(3600)
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise KeyError("no such unit test")
    return float(what)


def odd(sample):
    """Results that are no reward, by name."""
    return {
        "none": None,
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "1.0",
        "list": [1.0],
        "true": True,
        "object": Path(),
        "float32": np.float32(0.25),
        "int64": np.int64(2),
        "unknown": {"score": 1.0},
        "two": {"reward": 1.0, "goal": 1.0},
        "reward": {"reward": 0.5, "correct": True, "components": {"style": 0.5}},
        "goal": {"goal": 0.5, "components": {"grounding": 1.0, "cost": -0.5}},
        "half": {"goal": 0.5, "components": {"cost": None}},
        "beyond": {"goal": 1.5},
        "inverted": {"goal": 1.0, "components": {"cost": -2.0}},
    }[sample["text"]]


def parity(sample):
    """A verdict of its own that an untrained model meets half of the time; it hangs on every ninth text."""
    number = sum(map(ord, sample["text"]))
    if number % 9 == 4:
        time.sleep(3600)
    even = number % 2 == 0
    return {"reward": float(even), "correct": even}


def chatty(sample):
    """Prints where replies go."""
    print("hello")
    os.write(1, b"more\n")
    return len(sample["text"])


def forks(sample):
    """Leaves a child behind that would hold the reply pipe open, then hangs."""
    if sample["text"] == "fork" and os.fork() == 0:
        time.sleep(3600)
    if sample["text"] == "fork":
        os._exit(5)
    return 1.0


not_a_function = 3
