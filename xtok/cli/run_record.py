"""What a run leaves in runs/<run>/ for people: the configuration it was given, with full paths, and how long it took.

Nothing else of the dataset knows where the tokenizers lay, so `xtok inspect` reads the newest record to find them again.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from schemas.config import ModelSide, PreprocessConfig
from xtok import storage
from xtok.errors import StorageError

__all__ = ["new_run_folder", "recorded_sides", "write_run_record"]


def new_run_folder(output: str) -> str:
    """URL of a new folder runs/<time>-<process> of the dataset; sorts by time. Nothing is created yet."""
    now = datetime.datetime.now(datetime.UTC)
    return storage.join(output, "runs", f"{now:%Y%m%dT%H%M%S}Z-{os.getpid()}")


def write_run_record(folder: str, config: PreprocessConfig, figures: Mapping[str, Any], report: str) -> None:
    """Write run.json (configuration with full paths, machine, figures) and report.md into a run's folder."""
    record = {"config": _with_full_paths(config), "host": platform.node(), **figures}
    storage.write_atomic(storage.join(folder, "run.json"), orjson.dumps(record, option=orjson.OPT_INDENT_2))
    storage.write_atomic(storage.join(folder, "report.md"), report.encode())


def recorded_sides(output: str) -> list[ModelSide] | None:
    """Student and teachers as the newest readable record of the dataset names them, or None."""
    for url in sorted(storage.glob(storage.join(output, "runs", "*", "run.json")), reverse=True):
        try:
            config = PreprocessConfig.model_validate(orjson.loads(storage.read_bytes(url))["config"])
        except (StorageError, ValidationError, orjson.JSONDecodeError, KeyError, TypeError):
            continue  # another version's, or half of one: an older record may do
        return [config.student, *config.teachers]
    return None


def _with_full_paths(config: PreprocessConfig) -> dict[str, Any]:
    content = config.model_dump(mode="json")
    content["sources"] = [storage.absolute(source) for source in config.sources]
    content["output"] = storage.absolute(config.output)
    for side in (content["student"], *content["teachers"]):
        if storage.exists(side["tokenizer"]):
            side["tokenizer"] = storage.absolute(side["tokenizer"])
        if side["chat_template"] is not None:
            side["chat_template"] = storage.absolute(side["chat_template"])
    return content
