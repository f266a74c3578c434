"""Odd values are refused by the configuration itself, with the field and what was given; what a continued run may change."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest

from schemas.train_config import TrainConfig
from tests.unit.train.support import make_config
from xtok.errors import ConfigError
from xtok.loader import AlignedShardLoader
from xtok.train.batches import StepBatches
from xtok.train.config_file import absolute_train_config, load_train_config
from xtok.train.identity import config_digest

BASE: dict[str, Any] = {"student": {"model": "m"}, "teachers": [{"model": "t"}], "dataset": "d", "output": "o"}
NODES = {"num_nodes": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objectives": {"distill": math.inf}}, ["objectives.distill", "inf"]),
        ({"objectives": {"ce": math.nan}}, ["objectives.ce", "nan"]),
        ({"objectives": {"draft": -1.0}}, ["objectives.draft", "-1.0"]),
        ({"objectives": {"distill": 0, "ce": 0, "draft": None}}, ["leave nothing to train"]),
        ({"teachers": []}, ["needs teachers", "make it null"]),
        ({"optimizer": {"learning_rate": 0}}, ["optimizer.learning_rate"]),
        ({"optimizer": {"learning_rate": math.inf}}, ["optimizer.learning_rate", "inf"]),
        ({"optimizer": {"learning_rate": 1e38}}, ["optimizer.learning_rate", "1e+38"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["optimizer.betas.1", "1.0"]),
        ({"optimizer": {"weight_decay": math.inf}}, ["optimizer.weight_decay"]),
        ({"optimizer": {"clip_norm": math.nan}}, ["optimizer.clip_norm"]),
        ({"draft": {"learning_rate": math.inf}}, ["draft.learning_rate"]),
        ({"draft": {"settings": {"block_size": 4}}}, ["give draft.block_size instead"]),
        ({"draft": {"settings": {"init_std": math.nan}}}, ["draft.settings", "nan"]),
        ({"distillation": {"teacher_weights": [1.0, math.inf]}}, ["distillation", "inf"]),
        ({"distillation": {"kd_weight": 1.0}}, ["kd_weight", "objectives.distill"]),
        ({"steps": -1}, ["steps", "-1"]),
        ({"steps": math.inf}, ["steps", "inf"]),
        ({"batch_tokens": 0}, ["batch_tokens"]),
        ({"batch_tokens": 10, "accumulation": 11}, ["accumulation 11", "10 batch_tokens"]),
        ({"cache_bytes": -1}, ["cache_bytes"]),
        ({"cache_folder": ""}, ["cache_folder"]),
        ({"checkpoint": {"keep_last": 0}}, ["checkpoint.keep_last"]),
        ({"parallel": {**NODES, "rendezvous": ":29500"}}, ["':29500'", "host:port"]),
        ({"parallel": {**NODES, "rendezvous": "node0:99999"}}, ["'node0:99999'", "host:port"]),
        ({"parallel": {**NODES, "rendezvous": "node0:0"}}, ["'node0:0'", "host:port"]),
        ({"output": "s3://bucket/run"}, ["s3://bucket/run", "local or mounted"]),
    ],
    ids=repr,
)
def test_odd_values(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_train_config({**BASE, **change})
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_may_change_when_a_run_goes_on(world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where things lie and how they are divided over memory and ranks; the same paths written another way; later fields."""
    document = make_config(world, tmp_path)

    def digest(**changes: Any) -> str:
        return config_digest(TrainConfig.model_validate({**document, **changes}))

    here = digest()
    teachers = [{**document["teachers"][0], "offload": True}, {**document["teachers"][1], "shard": True}]
    for same in (
        {"output": "elsewhere", "accumulation": 2, "activation_checkpointing": True},
        {"teachers": teachers},
        {"cache_folder": "c", "cache_bytes": 0},
        {"parallel": {"processes": 4, "tensor_parallel": 2}},
        {"seed": 0},  # the default, spelled out
    ):
        assert digest(**same) == here, same
    monkeypatch.chdir(Path(world["student"]).parent)
    assert digest(student={"model": "student"}) == here
    for other in ({"seed": 1}, {"steps": 11}, {"batch_tokens": 700}, {"dataset": world["held_out"]}, {"teachers": teachers[:1]}):
        assert digest(**other) != here, other


def test_the_cache_is_the_loaders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.model_validate(BASE)
    for owner in (AlignedShardLoader, StepBatches):
        defaults = inspect.signature(owner).parameters
        assert (config.cache_folder, config.cache_bytes) == (defaults["cache_folder"].default, defaults["cache_bytes"].default)
    assert absolute_train_config(config).cache_folder is None
    relative = TrainConfig.model_validate({**BASE, "cache_folder": "c"})
    assert absolute_train_config(relative).cache_folder == str(tmp_path / "c")
