"""The run: resume, steps, evaluations, checkpoints, export. One function; every rank runs it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.errors import TrainingError
from xtok.train.batches import StepBatches
from xtok.train.build import Training, build_training
from xtok.train.checkpoint import CHECKPOINT_FOLDER, Checkpoints, Progress
from xtok.train.export import EXPORT_FOLDER, export_models
from xtok.train.identity import run_document
from xtok.train.metrics_log import MetricsLog
from xtok.train.optimizer import build_optimizer
from xtok.train.output_lock import only_writer
from xtok.train.parallel import trainable_parameters
from xtok.train.runtime import Runtime
from xtok.train.step import evaluate, train_step

__all__ = ["run_training"]


def run_training(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Train to `config.steps`, from the newest checkpoint of `config.output` where there is one. A run that is done exports again.

    Returns {"step", "resumed_from", "exported", "evaluation"} (the last evaluation of this call, or None). Raises the typed errors of
    its parts, and TrainingError when another run is writing there.
    """
    with only_writer(config.output) if runtime.is_main else nullcontext():
        return _run(config, runtime)


def _run(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    training = build_training(config, runtime)
    parameters = trainable_parameters(training.student, training.draft)
    optimizer = build_optimizer(parameters, config.optimizer, draft_learning_rate=config.draft.learning_rate)
    checkpoints = Checkpoints(
        storage.join(config.output, CHECKPOINT_FOLDER),
        config.checkpoint,
        parameters,
        optimizer,
        is_main=runtime.is_main,
        writer_group=runtime.checkpoint_group,
        control_group=runtime.control_group,
    )
    progress = Progress(run=run_document(config))
    newest = checkpoints.latest()
    if newest is not None:
        progress = checkpoints.load(newest, of=progress)
    resumed_from = progress.step
    log = MetricsLog(config.output, num_steps=config.steps, first_step=progress.step, is_main=runtime.is_main)
    try:
        evaluation = _steps(config, runtime, training, optimizer, checkpoints, progress, log)
    except TrainingError:
        checkpoints.finish()  # every rank raises it together, so a checkpoint still being written can be waited for
        raise
    finally:
        log.close()
    exported = export_models(
        config, training.student, training.draft, folder=storage.join(config.output, EXPORT_FOLDER), is_main=runtime.is_main
    )
    return {"step": progress.step, "resumed_from": resumed_from, "exported": exported, "evaluation": evaluation}


def _steps(
    config: TrainConfig,
    runtime: Runtime,
    training: Training,
    optimizer: torch.optim.Optimizer,
    checkpoints: Checkpoints,
    progress: Progress,
    log: MetricsLog,
) -> dict[str, Any] | None:
    """All remaining steps; returns the last evaluation."""
    evaluation = None
    if progress.step == 0:
        evaluation = _evaluate(config, runtime, training, progress, log)
    evaluate_every = None if config.evaluation is None else config.evaluation.every_steps
    saving_seconds = 0.0
    if progress.step < config.steps:
        batches = _batches(
            config,
            runtime,
            training,
            config.dataset,
            seed=config.seed,
            shuffle_row_groups=config.shuffle_row_groups,
            state=progress.loader,
        )
        for batch in batches:
            values = train_step(training, optimizer, config, runtime, batch, progress.step)
            progress.step += 1
            progress.num_tokens += batch.num_tokens
            progress.loader = batch.state
            began = time.perf_counter()
            checkpoints.publish_if_ready()
            values["seconds_saving"] = saving_seconds + time.perf_counter() - began
            if progress.step % config.log_every_steps == 0 or progress.step == config.steps:
                log.write(progress.step, values)
            is_last = progress.step == config.steps
            if is_last or _is_due(progress.step, evaluate_every):
                evaluation = _evaluate(config, runtime, training, progress, log)
            is_best = config.checkpoint.keep_best and progress.best_step == progress.step
            began = time.perf_counter()
            if is_last or is_best or _is_due(progress.step, config.checkpoint.every_steps):
                checkpoints.save(progress)
            saving_seconds = time.perf_counter() - began
            if is_last:
                break
    checkpoints.finish()
    return evaluation


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _batches(config: TrainConfig, runtime: Runtime, training: Training, dataset: str, **order: Any) -> StepBatches:
    """This rank's part of the global batches of `dataset`, with the columns of those teachers that the loss reads."""
    return StepBatches(
        dataset,
        batch_tokens=config.batch_tokens,
        accumulation=config.accumulation,
        dp_rank=runtime.dp_rank,
        dp_size=runtime.dp_size,
        teachers=range(len(training.objective.teachers)),
        cache_folder=config.cache_folder,
        cache_bytes=config.cache_bytes,
        **order,
    )


def _evaluate(
    config: TrainConfig, runtime: Runtime, training: Training, progress: Progress, log: MetricsLog
) -> dict[str, Any] | None:
    """Evaluate on the held-out dataset, if there is one, and remember the best step."""
    settings = config.evaluation
    if settings is None:
        return None
    order: dict[str, Any] = {"seed": 0, "shuffle": False, "one_epoch": True, "max_rows": settings.max_rows}
    batches = _batches(config, runtime, training, settings.dataset, **order)
    values = evaluate(training, config, runtime, batches, progress.step)
    if progress.step and (progress.best_loss is None or values["loss"] < progress.best_loss):
        progress.best_loss, progress.best_step = values["loss"], progress.step
    log.write(progress.step, values, kind="evaluation")
    return values
