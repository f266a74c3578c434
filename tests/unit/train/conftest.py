"""One tiny world for all tests of training, and the process group of one that they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from schemas.train_config import ParallelSettings, TrainConfig
from tests.unit.train.support import shared_world
from xtok.train.runtime import Runtime, start_runtime, stop_runtime


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared_world(tmp_path_factory.mktemp)


@pytest.fixture(scope="package")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(ParallelSettings(device="cpu"))
    stop_runtime()


@pytest.fixture
def run(runtime: Runtime) -> Any:
    """Run a configuration given as plain data to its end, in this process."""
    from xtok.train.loop import run_training

    return lambda document: run_training(TrainConfig.model_validate(document), runtime)
