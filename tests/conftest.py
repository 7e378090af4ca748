"""Property tests draw the same cases on every machine, and a busy machine is not a failure. Who shares a worker."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")

ALONE = {"dist", "engine"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On several workers a file of ranks or engines stays on one, and all tests of the shared engines on the same one."""
    for item in items:
        shared = "starting" in getattr(item, "fixturenames", ())
        if Path(item.path).parent.name in ALONE:
            item.add_marker(pytest.mark.xdist_group("engines" if shared else item.path.stem))
