"""What `mcore-rl contract` does with its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mcore_rl.contract_engines import run_contract


def contract(arguments: argparse.Namespace) -> int:
    """Gates and figures, one a line; exit status 1 unless all pass."""
    out = arguments.out or arguments.accelerated / "contract.json"
    result = run_contract(arguments.target, arguments.accelerated, out, responses=arguments.responses)
    for name, gate in result["gates"].items():
        print(f"{name}: {gate['verdict']}  " + "  ".join(f"{key}={value:.4g}" for key, value in gate["figures"].items()))
    print(f"{result['verdict']}: {out}")
    return int(result["verdict"] != "pass")


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {"contract": contract}
