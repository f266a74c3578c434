"""From what a user hands over (a YAML file, an inline object, or nothing) to a checked `PreprocessConfig`.

Used by the console command and by the flow. Relative paths begin in the current directory; a mistake is told before any work
begins, field by field, with what was given, and an error about a path prints it as given and in full.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from schemas.base import mistakes_of
from schemas.config import ModelSide, PreprocessConfig
from xtok import storage
from xtok.errors import ConfigError, StorageError
from xtok.shards.sources import why_no_file

__all__ = ["BUNDLED_CONFIG", "load_config", "load_config_object"]

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED_CONFIG = REPOSITORY / "infra" / "configs" / "preprocess.yaml"


def load_config(given: str | Mapping[str, Any] | None = None, *, overrides: Mapping[str, Any] | None = None) -> PreprocessConfig:
    """The configuration `given` as a path or URL of a YAML (or JSON) file, as an object, or None for the bundled example.

    overrides: fields that replace those given. Raises ConfigError for a file that is not there or no mapping, an unknown or wrong
    field, a source that matches nothing, a template or a tokenizer's folder that is not there.
    """
    if given is None:
        content, origin = _bundled(), str(BUNDLED_CONFIG)
    elif isinstance(given, Mapping):
        content, origin = dict(given), "the given object"
    else:
        content, origin = load_config_object(given), given
    config = _validated({**content, **(overrides or {})}, origin=origin)
    _check_paths(config)
    return config


def load_config_object(path: str) -> dict[str, Any]:
    """The mapping that a YAML or JSON file holds, unchecked. Raises ConfigError with both forms of the path."""
    try:
        content = storage.read_yaml(path)
    except StorageError as error:
        raise ConfigError(f"configuration {_both(path)} cannot be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {_both(path)} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"configuration {_both(path)} holds a {type(content).__name__}, not a mapping of field names to values")
    return content


def _bundled() -> dict[str, Any]:
    """The example on bundled data. Its inputs lie in the repository; its output begins in the current directory as any."""
    if not BUNDLED_CONFIG.is_file():
        raise ConfigError(
            f"no configuration was given, and the example {BUNDLED_CONFIG} is not there (it comes with the repository, not with "
            "the installed package): give a path or an object as `config`"
        )
    content = load_config_object(str(BUNDLED_CONFIG))
    content["sources"] = [str(REPOSITORY / source) for source in content["sources"]]
    for side in (content["student"], *content["teachers"]):
        side["tokenizer"] = str(REPOSITORY / side["tokenizer"])
    return content


def _validated(content: Mapping[str, Any], *, origin: str) -> PreprocessConfig:
    try:
        return PreprocessConfig.model_validate(content)
    except ValidationError as error:
        lines = [f"  {_explain(problem)}" for problem in mistakes_of(error)]
        raise ConfigError(f"{origin} has {len(lines)} mistake{'s' * (len(lines) > 1)}:\n" + "\n".join(lines)) from error


def _explain(problem: Any) -> str:
    location = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "missing":
        return f"{location}: required, but missing"
    if problem["type"] == "extra_forbidden":
        model = ModelSide if len(problem["loc"]) > 1 else PreprocessConfig
        near = difflib.get_close_matches(str(problem["loc"][-1]), model.model_fields, n=1)
        return f"{location}: there is no such field" + (f"; did you mean {near[0]}?" if near else "")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{location}: {message}" + ("" if problem["loc"] == () else f" (given: {problem['input']!r})")


def _check_paths(config: PreprocessConfig) -> None:
    for source in config.sources:
        if not storage.glob(source):
            raise ConfigError(f"sources: {_both(source)} {why_no_file(source)}")
    for name, side in [("student", config.student), *((f"teachers.{i}", side) for i, side in enumerate(config.teachers))]:
        if side.chat_template is not None and not storage.exists(side.chat_template):
            raise ConfigError(f"{name}.chat_template: {_both(side.chat_template)} is not there")
        if _means_a_folder(side.tokenizer) and not storage.exists(side.tokenizer):
            raise ConfigError(f"{name}.tokenizer: {_both(side.tokenizer)} is not there")


def _means_a_folder(tokenizer: str) -> bool:
    """Whether a tokenizer's name can hardly be a hub id: two slashes, a leading dot, or a first component that is here."""
    if storage.local_path(tokenizer) is None:
        return False
    first, *others = tokenizer.split("/")
    return tokenizer[0] in "./~" or len(others) > 1 or (len(others) == 1 and storage.exists(first))


def _both(path: str) -> str:
    """A path as it was given and, where that says more, in full."""
    full = storage.absolute(path)
    return f"'{path}'" if full == path else f"'{path}' (that is {full}; relative paths begin in {os.getcwd()})"
