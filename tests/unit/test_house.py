"""The house rules that no linter knows: sizes, names, fences. A message names the file and the line."""

import ast
import statistics
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("parallel", "models", "mcore_rl")
SOURCES = (*PACKAGES, "tools")
EVERYWHERE = (*SOURCES, "tests")
MAX_FILE_LINES = 300
MAX_MEDIAN_LINES = 150
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 6
VAGUE_NAMES = {"utils", "util", "common", "helpers", "misc"}
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg", ".sh", ".svg", ".jsonl", ".json"}

# Who may import a foreign package directly. Nobody may import the entries with an empty tuple.
FENCES = {
    "megatron": (
        "parallel/*.py",
        "models/*.py",
        "mcore_rl/policy*.py",
        "mcore_rl/checkpoint*.py",
        "mcore_rl/assemble.py",
        "tests/dist/*",
        "tests/support/*",
    ),
    "vllm": ("mcore_rl/rollout/vllm_*.py", "mcore_rl/sync/vllm_*.py", "tests/engine/*"),
    "wandb": ("mcore_rl/telemetry/wandb_sink.py", "tests/*"),
    "megatron.training": (),
    "megatron.rl": (),
    "tools": (),
    "pickle": ("parallel/collectives.py",),  # a pickler that refuses all but builtins
    "cloudpickle": (),
    "dill": (),
}


def files(*roots: str) -> list[Path]:
    """Every Python file under the given folders."""
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree(path: Path) -> ast.Module:
    """Parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Everything in a file, walked once for all tests."""
    return tuple(ast.walk(tree(path)))


def where(path: Path, node: ast.AST | None = None) -> str:
    """path:line, relative to the repository."""
    line = getattr(node, "lineno", None)
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file, nested ones too."""
    return (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(node: ast.AST) -> list[str]:
    """Dotted names that an import statement brings in; `from a import b` counts as both a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


def inside(name: str, package: str) -> bool:
    """True for the package itself and what lies under it."""
    return name == package or name.startswith(package + ".")


def code_lines(path: Path) -> int:
    """Number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_longer_than_the_limit():
    long = [f"{where(path)} {count} lines" for path in files(*EVERYWHERE) if (count := code_lines(path)) > MAX_FILE_LINES]
    assert not long, f"files over {MAX_FILE_LINES} lines: {long}"


def test_the_median_file_is_short():
    counts = [code_lines(path) for path in files(*SOURCES) if path.name != "__init__.py"]
    assert statistics.median(counts) <= MAX_MEDIAN_LINES


def test_no_function_is_longer_than_the_limit():
    long = [
        f"{where(path, node)} {node.name} {node.end_lineno - node.lineno + 1} lines"
        for path in files(*EVERYWHERE)
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 >= MAX_FUNCTION_LINES
    ]
    assert not long, f"functions of {MAX_FUNCTION_LINES} lines and more: {long}"


def argument_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Arguments that a caller passes by position or name."""
    spec = node.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def test_no_function_takes_more_than_six_arguments():
    wide = [
        f"{where(path, node)} {node.name} takes {len(argument_names(node))}"
        for path in files(*SOURCES)
        for node in functions(path)
        if len(argument_names(node)) > MAX_ARGUMENTS
    ]
    assert not wide, wide


def test_no_module_has_a_vague_name():
    vague = [where(path) for path in files(*EVERYWHERE) if path.stem in VAGUE_NAMES]
    assert not vague, vague


def test_init_files_hold_a_docstring_and_nothing_else():
    """mcore_rl/__init__.py alone holds more: the guard against foreign packages of our names."""
    full = []
    for path in files(*PACKAGES):
        body = tree(path).body
        docstring_only = len(body) == 1 and ast.get_docstring(tree(path))
        if path.name == "__init__.py" and path.parent != ROOT / "mcore_rl" and not docstring_only:
            full.append(where(path))
    assert not full, full


def test_tests_are_not_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_global_statement():
    found = [where(path, node) for path in files(*EVERYWHERE) for node in nodes(path) if isinstance(node, ast.Global)]
    assert not found, found


def caught(handler: ast.ExceptHandler) -> set[str]:
    """Names of the exceptions that a handler catches; a bare `except:` catches BaseException."""
    if handler.type is None:
        return {"BaseException"}
    parts = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def test_a_broad_except_raises_again():
    """Nothing is swallowed: a handler for everything must end in a bare `raise`."""
    broad = [
        where(path, node)
        for path in files(*SOURCES)
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler)
        and caught(node) & {"Exception", "BaseException"}
        and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)
    ]
    assert not broad, broad


def test_own_code_is_imported_at_the_top_of_a_file():
    local = [
        f"{where(path, node)} imports {name}"
        for path in files(*SOURCES)
        for function in functions(path)
        for node in ast.walk(function)
        for name in imported(node)
        if name.split(".")[0] in SOURCES or name.startswith(".")
    ]
    assert not local, local


@pytest.mark.parametrize("package", FENCES)
def test_foreign_packages_stay_behind_their_fence(package):
    outside = [
        f"{where(path, node)} imports {name}"
        for path in files(*EVERYWHERE)
        for node in nodes(path)
        for name in imported(node)
        if inside(name, package) and not any(fnmatch(path.relative_to(ROOT).as_posix(), allowed) for allowed in FENCES[package])
    ]
    assert not outside, outside


def test_the_fence_sees_lazy_and_dotted_imports():
    lazy = ast.parse("def f():\n    import megatron.core\n    from megatron import rl\n")
    names = [name for node in ast.walk(lazy) for name in imported(node)]
    assert any(inside(name, "megatron") for name in names)
    assert any(inside(name, "megatron.rl") for name in names)
    assert not inside("megatron_extra", "megatron")


def test_packages_of_the_project_are_imported_by_their_full_name():
    relative = [
        where(path, node) for path in files(*SOURCES) for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def test_text_is_ascii():
    folders = [*EVERYWHERE, "configs", "requirements", "docs"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT_SUFFIXES]
    paths += [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ".yaml"}]
    foreign = [where(path) for path in paths if not path.read_bytes().isascii()]
    assert not foreign, foreign
