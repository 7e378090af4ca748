"""Ten steps of the quickstart's run with the small dense and the small hybrid model, on every layout of two ranks."""

from __future__ import annotations

import pytest
from model_runs import WHOLE, check_steps, trained

RUNS = [("tiny_dense", "tp2"), ("tiny_dense", "pp2"), ("tiny_hybrid", "tp2"), ("tiny_hybrid", "pp2"), ("tiny_hybrid", "ep2")]


@pytest.mark.parametrize(("model", "layout"), RUNS)
def test_ten_steps(tmp_path, model, layout):
    check_steps(trained(tmp_path, model, layout, 10, base=WHOLE), 10)
