"""What makes a training run the same run: the part of its configuration that decides what is computed, and the dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.train.config_file import absolute_train_config

__all__ = ["config_digest", "differences", "run_document"]

# What may differ between a run and its continuation: where things lie and how they are divided, never what is computed.
_LEFT_OUT = (
    *("dataset", "output", "cache_folder", "cache_bytes", "log_every_steps", "export_student", "evaluation", "checkpoint"),
    *("parallel", "accumulation", "activation_checkpointing"),
)
_LEFT_OUT_OF_TEACHER = ("offload", "shard")
_ABSENT = object()


def run_document(config: TrainConfig) -> dict[str, Any]:
    """What must be the same when a run goes on: the dataset's manifest (its sha256), and the configuration without layout, memory
    settings, output, logging, evaluation and checkpoints. Relative paths count as what they mean here."""
    document = absolute_train_config(config).model_dump(
        mode="json",
        exclude=set(_LEFT_OUT),
        exclude_defaults=True,  # so that a field of a later version changes nothing
    )
    for teacher in document.get("teachers", ()):
        for name in _LEFT_OUT_OF_TEACHER:
            teacher.pop(name, None)
    document["manifest_sha256"] = storage.sha256(storage.join(config.dataset, "manifest.json"))
    return document


def config_digest(config: TrainConfig) -> str:
    """sha256 of `run_document`."""
    return hashlib.sha256(json.dumps(run_document(config), sort_keys=True).encode()).hexdigest()


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields in which two run documents differ, with both values, for a person."""
    before, after = dict(_leaves(then)), dict(_leaves(now))
    names = [name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)]
    return ", ".join(f"{name} was {_shown(before, name)} and is {_shown(after, name)}" for name in sorted(names))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _shown(leaves: dict[str, Any], name: str) -> str:
    if name not in leaves:
        return "left at its default"
    value = leaves[name]
    return value[:12] + "…" if name == "manifest_sha256" else json.dumps(value)
