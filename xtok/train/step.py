"""One optimizer step, and one evaluation: micro-batches in, one update and summed metrics out."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

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
LOSS_NAME = re.compile(r"kd_loss|ce_loss|draft_(ce|l1|confidence_bce|loss)$")
MAX_LOG_PERPLEXITY = 700.0  # beyond it a float overflows


def train_step(
    training: Training, optimizer: torch.optim.Optimizer, config: TrainConfig, runtime: Runtime, batch: StepBatch, step: int
) -> dict[str, Any]:
    """Update the parameters once; returns the step's metrics, summed over ranks and micro-batches.

    Raises TrainingError, on every rank, when the loss or the gradient norm is not finite; nothing is updated then.
    """
    began = time.perf_counter()
    # Dropout of a resumed step is that of the first time; tensor-parallel neighbours draw the same.
    torch.manual_seed(((config.seed * 1_000_003 + step) * 4096 + runtime.dp_rank) % 2**63)
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
    total = total.to(runtime.device)
    summed = _reduced({**metrics, "loss": MetricSum(total, torch.zeros_like(total))}, training, runtime)
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
        **_named(summed, training),
        "grad_norm": norm,
        "lr": optimizer.param_groups[0]["lr"],
        "tokens": batch.num_tokens,
        "tokens_per_s": batch.num_tokens / (ended - began + batch.wait_seconds),
        "seconds": ended - began,
        "seconds_waiting": batch.wait_seconds,
        "seconds_counting": seconds_models - began,
    }


@torch.no_grad()
def evaluate(
    training: Training, config: TrainConfig, runtime: Runtime, batches: Iterable[StepBatch], step: int
) -> dict[str, Any]:
    """Metrics over a held-out dataset, as ratios of sums over all its rows: those of training, the "perplexity" exp(ce_loss), and
    "loss", the sum of kd_loss, ce_loss and draft_loss by the weights of the objectives.

    Raises TrainingError, on every rank, when a loss is not finite: the last step has ruined the models.
    """
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
    summed = _reduced(metrics, training, runtime)
    _check_finite_evaluation(summed, config, step)
    values = _named(summed, training)
    objectives = config.objectives
    parts = [
        (objectives.distill, values.get("kd_loss")),
        (objectives.ce, values.get("ce_loss")),
        (objectives.draft, values.get("draft_loss")),
    ]
    values["loss"] = sum(weight * value for weight, value in parts if weight and value is not None)
    if values.get("ce_loss") is not None:
        values["perplexity"] = math.exp(min(values["ce_loss"], MAX_LOG_PERPLEXITY))
    return values


def _counts(training: Training, micro: list[BatchedDataDict], epoch: int, runtime: Runtime) -> Counts:
    counted = [training.objective.count(part, epoch) for part in micro]
    return counted[0].summed(counted[1:], runtime.dp_group)


def _reduced(metrics: dict[str, MetricSum], training: Training, runtime: Runtime) -> dict[str, MetricSum]:
    """Sums over data-parallel ranks. Ranks that selected other teachers have other metrics: each adds zeros for the names it lacks."""
    loss_fn = training.objective.loss_fn
    if loss_fn is not None and loss_fn.config.teacher_combination == "select_teacher" and runtime.dp_size > 1:
        names: list[list[str]] = [[] for _ in range(runtime.dp_size)]
        dist.all_gather_object(names, sorted(metrics), group=runtime.dp_group)
        nothing = torch.zeros((), dtype=torch.float64, device=runtime.device)
        metrics = {name: MetricSum(nothing, nothing) for found in names for name in found} | metrics
    return reduce_metrics(metrics, runtime.dp_group)


def _named(summed: dict[str, MetricSum], training: Training) -> dict[str, Any]:
    """As plain numbers, with `kd_loss`, `draft_loss` and `tau` added: names that every run has."""
    values = summarize(summed)
    kd = {name: pair for name, pair in sorted(summed.items()) if name.startswith("kd_loss_")}
    if kd:
        values["kd_loss"] = _kd_loss(kd, values, training)
    if "draft_ce" in values:
        values.setdefault("draft_loss", values["draft_ce"])
    if "draft_tau_greedy" in values:
        values["tau"] = values["draft_tau_greedy"]
    return values


def _kd_loss(kd: dict[str, MetricSum], values: dict[str, Any], training: Training) -> float | None:
    """Of all teachers: their sum by (mean) weight, or over the micro-batches of whichever teacher was selected."""
    assert training.objective.loss_fn is not None
    combination = training.objective.loss_fn.config.teacher_combination
    if combination == "select_teacher":
        pooled = [(float(pair.numerator), float(pair.denominator)) for pair in kd.values()]
        counted = sum(count for _, count in pooled)
        return sum(total for total, _ in pooled) / counted if counted else None
    found = 0.0
    for name in kd:
        weight = values[name.replace("kd_loss", "teacher_weight")] if combination == "sum" else 1.0
        found += weight * values[name] if weight and values[name] is not None else 0.0
    return found


def _gradient_norm(training: Training, config: TrainConfig) -> float:
    """Global norm before clipping; clips when the configuration says so."""
    parameters = [p for module in training.modules for p in module.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    limit = config.optimizer.clip_norm
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _check_finite_evaluation(summed: dict[str, MetricSum], config: TrainConfig, step: int) -> None:
    """A part that nothing counted for is 0 / 0 and left out; a sum that is not finite is another matter."""
    losses = {name: pair.numerator for name, pair in summed.items() if LOSS_NAME.match(name)}
    ruined = sorted(name for name, total in losses.items() if not bool(torch.isfinite(total).all()))
    if ruined:
        assert config.evaluation is not None
        raise TrainingError(
            f"step {step}: {', '.join(ruined)} on the held-out rows of {config.evaluation.dataset} is no finite number: the last steps "
            "have ruined the models, and are not saved. The last checkpoint is kept: lower the learning rate"
        )


def _check_finite(loss: float, norm: float, batch: StepBatch, step: int) -> None:
    if not (abs(loss) < float("inf") and norm < float("inf")):
        rows = ", ".join(map(str, batch.idx[:SHOWN_ROWS])) + (" …" if len(batch.idx) > SHOWN_ROWS else "")
        raise TrainingError(
            f"step {step}: loss {loss}, gradient norm {norm}; nothing was updated. Rows of this batch (idx): {rows}. "
            "The last checkpoint is kept: lower the learning rate, or look at these rows with `xtok inspect`"
        )
