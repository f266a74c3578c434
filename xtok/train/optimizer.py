"""AdamW over student and draft, one learning rate each, and the schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from schemas.train_config import OptimizerSettings

__all__ = ["build_optimizer", "learning_rate_factor", "set_learning_rates"]

NO_DECAY_DIMS = 1  # norms and biases


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, *, draft_learning_rate: float
) -> torch.optim.AdamW:
    """parameters: `student.…` and `draft.…` names. Weight decay applies to matrices only."""
    groups = []
    for prefix, rate in (("student.", settings.learning_rate), ("draft.", draft_learning_rate)):
        for decays in (True, False):
            chosen = [p for name, p in parameters.items() if name.startswith(prefix) and (p.ndim > NO_DECAY_DIMS) == decays]
            if chosen:
                decay = settings.weight_decay if decays else 0.0
                groups.append({"params": chosen, "lr": rate, "peak_learning_rate": rate, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)


def learning_rate_factor(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Factor of the peak rate for optimizer step `step` (0-based) of `num_steps`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    done = min(1.0, done)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.min_learning_rate_ratio + (1 - settings.min_learning_rate_ratio) * shape


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's rate = its peak times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_learning_rate"] * factor
