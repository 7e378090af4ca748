"""Published models on their layouts, built on the meta device: the weight map places every parameter exactly once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PARAMETERS = 30_532_122_624
# In a process of its own: pretending to be a rank patches the process, and real ranks have a process group already.
PROGRAM = """
import json, sys
from pathlib import Path
from models.meta import check_coverage, check_stages
from models.registry import read_spec
from parallel.layout import ParallelLayout
check = {"ranks": check_coverage, "stages": check_stages}[sys.argv[3]]
found = check(read_spec(Path(sys.argv[1])), ParallelLayout(**json.loads(sys.argv[2])))
print("RESULT", json.dumps([found.elements, found.per_rank]))
"""


def coverage(folder, *, every="ranks", **layout):
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(layout), every]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


def test_qwen3_30b_a3b_on_eight_gpus():
    """The layout of configs/layout/tp4_ep8: attention over 4 ranks twice, 16 of 128 experts on each of 8."""
    folder = REPOSITORY / "configs/model/hf/qwen3_30b_a3b"
    elements, per_rank = coverage(folder, world=8, tp=4, sp=True, ep=8, etp=1)
    assert elements == PARAMETERS
    layers, hidden, head_dim, experts, ffn = 48, 2048, 128, 128, 768
    attention = (32 + 2 * 4 + 32) * head_dim * hidden // 4
    norms = 2 * hidden + 2 * head_dim
    router, expert = experts * hidden, 3 * hidden * ffn
    embeddings = 2 * (152_064 // 4) * hidden
    assert 152_064 == -(-151_936 // 512) * 512
    assert per_rank == [layers * (attention + norms + router + experts // 8 * expert) + embeddings + hidden] * 8


@pytest.mark.parametrize(
    ("name", "parameters", "layout"),
    [
        ("qwen3_next_80b_a3b", 79_674_391_296, {"world": 64, "tp": 2, "sp": True, "pp": 2, "ep": 32}),
        ("qwen3_5_35b_a3b", 34_660_610_688, {"world": 32, "tp": 2, "sp": True, "pp": 2, "ep": 16}),
    ],
)
def test_hybrids(name, parameters, layout):
    """Stages of 24 and of 20 layers: three GatedDeltaNet layers, then gated attention; 16 of the experts on each rank."""
    elements, per_stage = coverage(REPOSITORY / "configs/model/hf" / name, every="stages", **layout)
    assert elements == parameters
    assert len(per_stage) == 2
