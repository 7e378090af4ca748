"""Command-line overrides -> one RunConfig, through Hydra's compose API: no chdir, no output folder, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.config.keys import all_keys, close_matches, describe, in_free_dict, type_at
from mcore_rl.config.schema import RunConfig

CONFIG_ROOT = Path(__file__).resolve().parents[2] / "configs"


def compose_config(overrides: Sequence[str] = (), *, config_root: Path = CONFIG_ROOT) -> RunConfig:
    """The run that `overrides` ask for, over `config.yaml` and its groups. `${repo:}` is the folder that holds configs/.

    Raises ValueError, one line, naming the key, the value and what would be right.
    """
    if not (config_root / "config.yaml").is_file():
        raise ValueError(f"no config.yaml in {config_root}: the configs/ folder belongs beside the mcore_rl package")
    checked = [_checked(text, config_root) for text in overrides]
    _register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_root), version_base="1.3"):
            composed = compose(config_name="config", overrides=checked)
            return _as_run_config(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error, overrides)) from error


@cache
def _register() -> None:
    """The schema and our resolver, once per process: Hydra keeps both."""
    ConfigStore.instance().store(name="run_config", node=RunConfig)
    OmegaConf.register_new_resolver("repo", lambda: str(CONFIG_ROOT.parent), replace=True)


def resolved_yaml(config: RunConfig) -> str:
    """YAML that `load_config` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def load_config(path: Path) -> RunConfig:
    """A configuration written by `resolved_yaml`. Raises ValueError naming the file and the key."""
    if not path.is_file():
        raise ValueError(f"no configuration at {path}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(path))
        return _as_run_config(cast(DictConfig, merged))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {_one_line(error, ())}") from error


def config_groups(config_root: Path = CONFIG_ROOT) -> dict[str, list[str]]:
    """Group name -> its options, as files under `configs/`."""
    folders = sorted(entry for entry in config_root.iterdir() if any(entry.glob("*.yaml")))
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def _as_run_config(composed: DictConfig) -> RunConfig:
    config = OmegaConf.to_object(composed)
    if not isinstance(config, RunConfig):
        raise ValueError(f"config.yaml must start from run_config; it gave a {type(config).__name__}")
    return config


def _checked(text: str, config_root: Path) -> str:
    """The override as Hydra shall see it, refused here where our own message is better than Hydra's."""
    override = _parsed(text)
    key = override.key_or_group
    groups = config_groups(config_root)
    if override.is_delete() or override.is_sweep_override() or override.package is not None:
        raise ValueError(f"{text}: one value per key here, as in train.steps=3; nothing is removed, swept or re-packaged")
    if key in groups:
        return _checked_option(text, key, override.value(), groups[key])
    type_at(key, extra=groups)
    return f"++{text.lstrip('+')}" if in_free_dict(key) else text.lstrip("+")


def _parsed(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise ValueError(f"{text}: expected key=value, as in train.steps=3{close_matches(text, all_keys())}")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key = text.split("=", 1)[0]
        raise ValueError(f"{text}: cannot be read ({_flat(str(error))}); quote text, as in '{key}=\"a b\"'") from error


def _checked_option(text: str, group: str, value: object, options: list[str]) -> str:
    if value is None and group == "experiment":
        return text
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{text}: no {group} called {value!r} in configs/{group}{close_matches(str(value), options)}")
    return text


def _one_line(error: BaseException, overrides: Sequence[str]) -> str:
    """One line for a Hydra or OmegaConf error: the innermost one knows the reason and mostly the key."""
    inner = _innermost(error)
    merging = str(error).removeprefix("Error merging override ")
    given = next((text for text in overrides if merging.lstrip("+").startswith(text.lstrip("+"))), None)
    key = given.lstrip("+").split("=", 1)[0] if given else _full_key(error, inner)
    if inner is None or not key:
        return _flat(str(error))
    given = given or next((text for text in overrides if text.lstrip("+").startswith(f"{key}=")), None)
    try:
        reason = str(inner).splitlines()[0]
        detail = "" if "$VALUE" in reason else f" ({reason})"
        return f"{given or _file_of(error) + key}: expected {describe(type_at(key))}{detail}"
    except ValueError as unknown:
        return f"{_file_of(error)}{unknown}"


def _full_key(error: BaseException, inner: OmegaConfBaseException | None) -> str | None:
    """The dotted key an error is about: an attribute of most of OmegaConf's errors, a line in the text of the others."""
    if inner is not None and inner.full_key:
        return inner.full_key
    lines = [line.strip() for text in (str(error), str(inner)) for line in text.splitlines()]
    return next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), None)


def _innermost(error: BaseException) -> OmegaConfBaseException | None:
    cause: BaseException | None = error
    inner: OmegaConfBaseException | None = None
    while cause is not None:
        inner = cause if isinstance(cause, OmegaConfBaseException) else inner
        cause = cause.__cause__ or cause.__context__
    return inner


def _file_of(error: BaseException) -> str:
    """`In 'experiment/x': ...` -> `configs/experiment/x.yaml: `."""
    text = str(error)
    return f"configs/{text.split(chr(39))[1]}.yaml: " if text.startswith("In '") else ""


def _flat(text: str) -> str:
    """Message without its line breaks."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
