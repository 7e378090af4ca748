"""Every CPU patch is needed and works; a process that never chose the CPU runtime is left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel import cpu_megatron

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
NAMES = [patch.name for patch in cpu_megatron.PATCHES]


def run_python(*arguments):
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{SUPPORT}", OMP_NUM_THREADS="1")
    # The check of the compile patch must see torch.compile as it is.
    environment.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def checks():
    return run_python(str(SUPPORT / "patch_checks.py"))


def test_every_patch_has_a_check_and_a_reason(checks):
    assert list(checks["results"]) == NAMES
    assert all(patch.why for patch in cpu_megatron.PATCHES)


@pytest.mark.parametrize("name", NAMES)
def test_patch_works_and_is_needed(checks, name):
    result = checks["results"][name]
    assert result["with"] is None
    if name in checks["spared"]:
        assert result["without"] is None
    else:
        assert result["without"] is not None


UNTOUCHED = """
import json
import torch
import torch.distributed as dist
from parallel.cpu_cuda_twins import FACTORIES

def functions():
    named = {f"torch.{name}": vars(torch)[name] for name in FACTORIES}
    for name in ("Stream", "Event", "current_device", "current_stream", "synchronize", "manual_seed", "manual_seed_all",
                 "get_rng_state", "set_rng_state", "_lazy_call"):
        named[f"torch.cuda.{name}"] = vars(torch.cuda)[name]
    for name in ("cuda", "to", "type"):
        named[f"Tensor.{name}"] = getattr(torch.Tensor, name)
    named["Module.cuda"] = torch.nn.Module.cuda
    for name in ("all_to_all_single", "all_gather"):
        named[f"dist.{name}"] = vars(dist)[name]
    return named

before = functions()
import parallel.collectives, parallel.gather, parallel.groups, parallel.optimizer, parallel.runtime, parallel.schedule
from parallel import cpu_megatron
after = functions()
changed = [name for name in before if before[name] is not after[name]]
if INSTALL:
    cpu_megatron.install()
    again = functions()
    changed = [name for name in before if before[name] is not again[name]]
    cpu_megatron.install()
    third = functions()
    changed += [f"twice: {name}" for name in third if third[name] is not again[name]]
print(json.dumps({"installed": cpu_megatron.installed(), "changed": changed, "watched": list(before)}))
"""


def test_importing_everything_leaves_torch_as_it_is():
    assert run_python("-c", "INSTALL = False\n" + UNTOUCHED)["changed"] == []


def test_installing_changes_all_of_it_once():
    result = run_python("-c", "INSTALL = True\n" + UNTOUCHED)
    assert result["installed"]
    assert result["changed"] == result["watched"]


def test_this_test_process_is_unpatched(ranks):
    assert not cpu_megatron.installed()
