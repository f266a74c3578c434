"""One optimizer step, and one evaluation: micro-batches in, one update and summed metrics out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from schemas.train_config import TrainConfig
from xtok.batch import BatchedDataDict
from xtok.draft.metrics import MetricSum, add_metrics, reduce_metrics
from xtok.errors import TrainingError
from xtok.train.batches import StepBatch
from xtok.train.build import Training
from xtok.train.metrics_log import summarize
from xtok.train.objective import Counts
from xtok.train.optimizer import learning_rate_factor, set_learning_rates
from xtok.train.parallel import reshard, set_gradient_sync
from xtok.train.runtime import Runtime

__all__ = ["evaluate", "train_step"]

SHOWN_ROWS = 8


def train_step(
    training: Training, optimizer: torch.optim.Optimizer, config: TrainConfig, runtime: Runtime, batch: StepBatch, step: int
) -> dict[str, Any]:
    """Update the parameters once; returns the step's metrics, summed over ranks and micro-batches.

    Raises TrainingError, on every rank, when the loss or the gradient norm is not finite; nothing is updated then.
    """
    began = time.perf_counter()
    torch.manual_seed(
        (config.seed * 1_000_003 + step) * 4096 + runtime.dp_rank
    )  # dropout of a resumed step is that of the first time
    micro = [part.to(runtime.device) for part in batch.micro_batches]
    counts = _counts(training, micro, batch.epoch, runtime)
    total = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, MetricSum] = {}
    seconds_models = time.perf_counter()
    for place, part in enumerate(micro):
        set_gradient_sync(training.modules, place == len(micro) - 1)
        loss, found = training.objective(part, counts, batch.epoch)
        torch.autograd.backward(loss * runtime.dp_size)  # sharding averages over dp, the counts already divide by everything
        total += loss.detach().double().cpu()
        metrics = add_metrics(metrics, found)
    summed = reduce_metrics(
        {**metrics, "loss": MetricSum(total.to(runtime.device), torch.zeros_like(total).to(runtime.device))}, runtime.dp_group
    )
    value = float(summed.pop("loss").numerator)
    norm = _gradient_norm(training, config)
    _check_finite(value, norm, batch, step)
    factor = learning_rate_factor(config.optimizer, step, config.steps)
    set_learning_rates(optimizer, factor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ended = time.perf_counter()
    return {
        "loss": value,
        **_named(summarize(summed), config),
        "grad_norm": norm,
        "lr": optimizer.param_groups[0]["lr"],
        "tokens": batch.num_tokens,
        "tokens_per_s": batch.num_tokens / (ended - began + batch.wait_seconds),
        "seconds": ended - began,
        "seconds_waiting": batch.wait_seconds,
        "seconds_counting": seconds_models - began,
    }


@torch.no_grad()
def evaluate(training: Training, config: TrainConfig, runtime: Runtime, batches: Iterable[StepBatch]) -> dict[str, Any]:
    """Metrics over a held-out dataset: "loss" as in training, ratios of sums over all its rows, and "perplexity"."""
    modes = [module.training for module in training.modules]
    for module in training.modules:
        module.eval()
    metrics: dict[str, MetricSum] = {}
    for batch in batches:
        for part in batch.micro_batches:
            part = part.to(runtime.device)
            counts = training.objective.count(part, epoch=0).summed([], runtime.dp_group)
            _, found = training.objective(part, counts, epoch=0)
            metrics = add_metrics(metrics, found)
    reshard(training.modules)
    for module, mode in zip(training.modules, modes, strict=True):
        module.train(mode)
    values = _named(summarize(reduce_metrics(metrics, runtime.dp_group)), config)
    objectives = config.objectives
    parts = [
        (objectives.distill, values.get("kd_loss")),
        (objectives.ce, values.get("ce_loss")),
        (objectives.draft, values.get("draft_loss")),
    ]
    values["loss"] = sum(weight * value for weight, value in parts if weight and value is not None)
    if values.get("ce_loss") is not None:
        values["perplexity"] = float(torch.tensor(values["ce_loss"]).exp())
    return values


def _counts(training: Training, micro: list[BatchedDataDict], epoch: int, runtime: Runtime) -> Counts:
    counted = [training.objective.count(part, epoch) for part in micro]
    return counted[0].summed(counted[1:], runtime.dp_group)


def _named(values: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Add `kd_loss` (weighted sum over teachers), `draft_loss` and `tau` under the names that every run has."""
    kd = [value for name, value in sorted(values.items()) if name.startswith("kd_loss_") and value is not None]
    weights = config.distillation.get("teacher_weights") or [1.0] * len(kd)
    if kd:
        values["kd_loss"] = sum(w * v for w, v in zip(weights, kd, strict=False))
    if config.trains_draft:
        values.setdefault("draft_loss", values.get("draft_ce"))
        values["tau"] = values.get("draft_tau_greedy")
    return values


def _gradient_norm(training: Training, config: TrainConfig) -> float:
    """Global norm before clipping; clips when the configuration says so."""
    parameters = [p for p in training.parameters.values() if p.grad is not None]
    if not parameters:
        return 0.0
    limit = config.optimizer.clip_norm
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _check_finite(loss: float, norm: float, batch: StepBatch, step: int) -> None:
    if not (abs(loss) < float("inf") and norm < float("inf")):
        rows = ", ".join(map(str, batch.idx[:SHOWN_ROWS])) + (" …" if len(batch.idx) > SHOWN_ROWS else "")
        raise TrainingError(
            f"step {step}: loss {loss}, gradient norm {norm}; nothing was updated. Rows of this batch (idx): {rows}. "
            "The last checkpoint is kept: lower the learning rate or look at these rows with `xtok inspect`"
        )
