"""Which modules need Megatron-Core, and that all others import without it, without vLLM and without wandb."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("parallel", "models", "mcore_rl")

# Everything else is meant to be free of Megatron: a new file that reaches it, directly or through others, must be
# named here, and a file that no longer does must leave.
NEEDS_MEGATRON = {
    "parallel.cpu_megatron",
    "parallel.groups",
    "parallel.optimizer",
    "parallel.runtime",
    "parallel.schedule",
    "models.build",
    "models.checkpoint_load",
    "models.convert_forward",
    "models.delta_net_state",
    "models.gated_delta_net",
    "models.layer_spec",
    "models.meta",
    "models.parameters",
    "models.readout",
    "models.router",
    "models.split_marks",
    "models.weights",
    "mcore_rl.policy",
    "mcore_rl.policy_reference",
    "mcore_rl.policy_weights",
    "mcore_rl.assemble",
    "mcore_rl.distill_job",
    "mcore_rl.facts",
    "mcore_rl.finish",
    "mcore_rl.jobs",
    "mcore_rl.rank",
}
# Files that import vLLM or wandb at the top: named vllm_*, or the one wandb sink and what wires it.
NEEDS_WANDB = {"mcore_rl.telemetry.wandb_sink"}

# None in sys.modules: importing it fails, and whoever only asks whether it is installed hears no.
IMPORT_ALL = """
import importlib, sys

sys.modules.update(dict.fromkeys(("megatron", "transformer_engine", "apex", "vllm", "wandb")))
failed = []
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as failure:
        failed.append(f"{module}: {failure}")
sys.exit("\\n".join(failed) or 0)
"""


@pytest.fixture(scope="module")
def graph():
    """Who imports whom, foreign packages as leaves, annotations-only imports left out."""
    return grimp.build_graph(*PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)


def modules():
    """Dotted names of all our modules, from the tree."""
    paths = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}


def reaches(graph, package):
    """Our modules that import the package through any chain."""
    return graph.find_downstream_modules(package) if package in graph.modules else set()


def test_megatron_is_reached_exactly_where_listed(graph):
    reached = reaches(graph, "megatron")
    assert reached - NEEDS_MEGATRON == set(), "these reach Megatron and are not listed"
    assert (NEEDS_MEGATRON & modules()) - reached == set(), "these are listed and no longer reach Megatron"


def test_vllm_is_reached_only_by_files_named_for_it(graph):
    assert {name for name in reaches(graph, "vllm") if not name.rsplit(".", 1)[-1].startswith("vllm_")} == set()


def test_what_runs_inside_an_engine_never_reaches_megatron(graph):
    """The CPU patches of Megatron change torch for the whole process."""
    assert reaches(graph, "vllm") & reaches(graph, "megatron") == set()


def test_the_megatron_free_modules_import_with_megatron_blocked(graph):
    free = modules() - NEEDS_MEGATRON - NEEDS_WANDB - reaches(graph, "vllm") - {"mcore_rl.__main__"}
    assert len(free) > 20
    command = [sys.executable, "-c", IMPORT_ALL, *sorted(free)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_block_is_a_block():
    command = [sys.executable, "-c", IMPORT_ALL, "megatron.core"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "megatron.core" in done.stderr


@pytest.mark.parametrize("name", ["models", "parallel"])
def test_a_foreign_package_of_our_name_is_refused(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import mcore_rl"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(tmp_path / name) in done.stderr
