"""The pool of ranks, as in tests/dist."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """See tests/support/rank_pool.py for how to use it."""
    pool = RankPool()
    yield pool
    pool.dispose()
