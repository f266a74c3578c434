"""Training runs inside real gloo ranks, for the tests of layouts, resuming and faults."""

from __future__ import annotations

from typing import Any

import torch

from schemas.train_config import TrainConfig
from tests.dist.harness import RankContext
from xtok.train.loop import run_training
from xtok.train.runtime import start_runtime

__all__ = ["run_in_rank"]


def run_in_rank(_: RankContext | None, document: dict[str, Any]) -> dict[str, Any]:
    """One rank of a whole run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = TrainConfig.model_validate(document)
    return run_training(config, start_runtime(config.parallel))
