"""From a YAML or JSON file, or the same as an object, to a checked `TrainConfig`. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from schemas.base import mistakes_of
from schemas.train_config import TrainConfig
from xtok import storage
from xtok.errors import ConfigError, StorageError

__all__ = ["BUNDLED_TRAIN_CONFIG", "absolute_train_config", "load_bundled_train_config", "load_train_config"]

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED_TRAIN_CONFIG = REPOSITORY / "infra" / "configs" / "train.yaml"


def load_train_config(given: str | Mapping[str, Any]) -> TrainConfig:
    """Raises ConfigError with the path as given and in full, or with every wrong field and what was given there."""
    origin = "the given object"
    document: Any = given
    if isinstance(given, str):
        full = storage.absolute(given)
        origin = f"'{given}'" if full == given else f"'{given}' (that is {full})"
        try:
            document = storage.read_yaml(given)
        except StorageError as error:
            raise ConfigError(f"training configuration {origin} cannot be read: {error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"training configuration {origin} is no YAML: {error}") from error
    try:
        return TrainConfig.model_validate(document)
    except ValidationError as error:
        lines = [_explain(problem) for problem in mistakes_of(error)]
        raise ConfigError(f"{origin} has {len(lines)} mistake{'s' * (len(lines) > 1)}:\n" + "\n".join(lines)) from error


def load_bundled_train_config() -> TrainConfig:
    """The example on bundled data. Its inputs lie in the repository; its dataset and output begin in the current directory as any."""
    if not BUNDLED_TRAIN_CONFIG.is_file():
        raise ConfigError(
            f"no configuration was given, and the example {BUNDLED_TRAIN_CONFIG} is not there (it comes with the repository, not with "
            "the installed package): give a path or an object as `config`"
        )
    document = load_train_config(str(BUNDLED_TRAIN_CONFIG)).model_dump(mode="json")
    for side in (document["student"], *document["teachers"]):
        for name in ("model", "tokenizer"):
            if side[name] is not None and side[name].startswith("infra/"):
                side[name] = str(REPOSITORY / side[name])
    return TrainConfig.model_validate(document)


def absolute_train_config(config: TrainConfig) -> TrainConfig:
    """The same with local paths in full, for a process that starts in another directory. Hub ids stay: nothing of theirs is here."""
    document = config.model_dump(mode="json")
    for name in ("dataset", "output", "cache_folder"):
        document[name] = None if document[name] is None else storage.absolute(document[name])
    for side in (document["student"], *document["teachers"]):
        for name in ("model", "tokenizer"):
            side[name] = _found(side[name])
    document["draft"]["load"] = _found(document["draft"]["load"])
    if document["projections"] is not None:
        document["projections"] = [None if path is None else storage.absolute(path) for path in document["projections"]]
    if document["evaluation"] is not None:
        document["evaluation"]["dataset"] = storage.absolute(document["evaluation"]["dataset"])
    return TrainConfig.model_validate(document)


def _found(path: str | None) -> str | None:
    return storage.absolute(path) if path is not None and storage.exists(path) else path


def _explain(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        return f"  {place}: there is no such field"
    if problem["type"] == "missing":
        return f"  {place}: required, but missing"
    given = f" (given: {problem['input']!r})" if problem["loc"] and not isinstance(problem["input"], dict) else ""
    return f"  {place}: {problem['msg'].removeprefix('Value error, ')}{given}"
