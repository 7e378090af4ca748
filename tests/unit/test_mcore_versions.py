"""Which Megatron-Core versions are taken; the others are refused by name."""

import pytest

from parallel import mcore_versions


@pytest.mark.parametrize("text", ["0.16.1", "0.17.0", "0.19.2", "0.19.99"])
def test_supported(text):
    assert mcore_versions.check_supported(text) == mcore_versions.parse_version(text)


@pytest.mark.parametrize("text", ["0.15.3", "0.16.0", "0.20.0", "0.20.0rc0", "1.0"])
def test_refused_by_name(text):
    with pytest.raises(RuntimeError, match=f"megatron-core {text} is not supported"):
        mcore_versions.check_supported(text)


def test_not_a_version():
    with pytest.raises(ValueError, match="'main' is not a version"):
        mcore_versions.parse_version("main")


@pytest.mark.parametrize(("text", "parts"), [("0.19.2", (0, 19, 2)), ("0.17", (0, 17, 0)), ("0.16.1rc1", (0, 16, 1))])
def test_parts(text, parts):
    assert mcore_versions.parse_version(text) == parts
