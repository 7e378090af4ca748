"""Ranks of the pool end with their parent, and Python lets such processes start none of their own."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def may_start_processes() -> Iterator[None]:
    """Inside, this rank may start processes all the same: Megatron's saver does, and waits for them."""
    config = vars(multiprocessing.current_process())["_config"]
    before = config.get("daemon")
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = before
