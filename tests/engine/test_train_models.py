"""The quickstart's run with the small dense and the small hybrid model, two steps each. tests/soak has ten, on every layout."""

from __future__ import annotations

import pytest
from model_runs import check_steps, trained


@pytest.mark.parametrize(("model", "layout"), [("tiny_dense", "pp2"), ("tiny_hybrid", "tp2")])
def test_two_steps(tmp_path, model, layout):
    check_steps(trained(tmp_path, model, layout, 2), 2)
