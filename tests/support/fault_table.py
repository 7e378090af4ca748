"""The table of `make chaos`: one line per fault that a test injected and saw caught."""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "MCORE_RL_FAULT_TABLE"


def record(fault: str, caught: str, seconds: float) -> None:
    """Add a line to the file that the environment names; without one, nothing."""
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": fault, "caught": caught, "seconds": round(seconds, 3)}) + "\n")
