"""The pool of ranks; who shares a worker; what is long. Property tests draw the same cases everywhere, without deadlines."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from rank_pool import RankPool

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")

ALONE = {"dist", "engine"}
# More models or layouts of what a test beside them shows, or whole runs of minutes: `make soak` runs these.
LONG = re.compile(
    "|".join(
        (
            r"test_checkpoint_convert\.py::test_what_megatron_saves\S*\[qwen3_next",
            r"test_contract_engines\.py",
            r"test_data_gate_runs\.py",
            r"test_distill_runs\.py",
            r"test_engine_arguments\.py::test_the_validation\S*max_model_len",
            r"test_gpu_check\.py::test_every_part",
            r"test_meta_build\.py::test_hybrids",
            r"test_model_gradients\.py::(test_layouts_agree|test_a_clipped)",
            r"test_model_weights\.py::test_import_on_one_layout\S*float32",
            r"test_parity\.py::test_cell\[(llama_tied_6|qwen2)",
            r"test_policy_layouts\.py::test_clipping\S*world=2",
            r"test_engine_restarts\.py",
            r"test_sync_faults\.py",
            r"test_sync_hybrid\.py",
            r"test_sync_layouts\.py",
            r"test_train_models\.py",
            r"test_train_url\.py::test_an_update_that_was_not_done",
        )
    )
)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """See tests/support/rank_pool.py for how to use it."""
    pool = RankPool()
    yield pool
    pool.dispose()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On several workers a file of ranks or engines stays on one, and all tests of the shared engines on the same one."""
    for item in items:
        shared = "starting" in getattr(item, "fixturenames", ())
        if Path(item.path).parent.name in ALONE:
            item.add_marker(pytest.mark.xdist_group("engines" if shared else item.path.stem))
        if item.path.stem == "test_house":  # it reads all sources, once
            item.add_marker(pytest.mark.xdist_group("house"))
        if LONG.search(item.nodeid):
            item.add_marker(pytest.mark.long)
