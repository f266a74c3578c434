"""The run: resume, steps, evaluations, checkpoints, export. One function; every rank runs it."""

from __future__ import annotations

from typing import Any

import torch

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.errors import TrainingError
from xtok.train.batches import StepBatches
from xtok.train.build import Training, build_training, config_digest
from xtok.train.checkpoint import Checkpoints, Progress
from xtok.train.export import export_models
from xtok.train.metrics_log import MetricsLog
from xtok.train.optimizer import build_optimizer
from xtok.train.runtime import Runtime
from xtok.train.step import evaluate, train_step

__all__ = ["run_training"]


def run_training(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Train to `config.steps`, from the newest checkpoint of `config.output` where there is one.

    Returns {"step", "resumed_from", "exported", "evaluation"}. Raises the typed errors of its parts.
    """
    training = build_training(config, runtime)
    optimizer = build_optimizer(training.parameters, config.optimizer, draft_learning_rate=config.draft.learning_rate)
    storage.make_folder(config.output)
    checkpoints = Checkpoints(
        storage.join(config.output, "checkpoints"),
        config.checkpoint,
        training.parameters,
        optimizer,
        is_main=runtime.is_main,
        group=runtime.checkpoint_group,
    )
    digest = config_digest(config)
    progress = Progress(config_digest=digest)
    newest = checkpoints.latest()
    if newest is not None:
        progress = checkpoints.load(newest, config_digest=digest)
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
        training,
        storage.join(config.output, "export"),
        is_main=runtime.is_main,
        student=config.export_student and config.trains_student,
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
    if progress.step < config.steps:
        batches = StepBatches(
            config.dataset,
            batch_tokens=config.batch_tokens,
            accumulation=config.accumulation,
            dp_rank=runtime.dp_rank,
            dp_size=runtime.dp_size,
            teachers=_teachers(training),
            seed=config.seed,
            shuffle_row_groups=config.shuffle_row_groups,
            state=progress.loader,
        )
        for batch in batches:
            values = train_step(training, optimizer, config, runtime, batch, progress.step)
            progress.step += 1
            progress.num_tokens += batch.num_tokens
            progress.loader = batch.state
            if progress.step % config.log_every_steps == 0 or progress.step == config.steps:
                log.write(progress.step, values)
            checkpoints.publish_if_ready()
            is_last = progress.step == config.steps
            every = None if config.evaluation is None else config.evaluation.every_steps
            if is_last or (every is not None and progress.step % every == 0):
                evaluation = _evaluate(config, runtime, training, progress, log) or evaluation
            if is_last or (config.checkpoint.every_steps is not None and progress.step % config.checkpoint.every_steps == 0):
                checkpoints.save(progress)
            if is_last:
                break
    checkpoints.finish()
    return evaluation


def _teachers(training: Training) -> list[int]:
    """Teacher indices whose columns the loss reads."""
    return list(range(len(training.objective.teachers)))


def _evaluate(
    config: TrainConfig, runtime: Runtime, training: Training, progress: Progress, log: MetricsLog
) -> dict[str, Any] | None:
    """Evaluate on the held-out dataset, if there is one, and remember the best step."""
    settings = config.evaluation
    if settings is None:
        return None
    batches = StepBatches(
        settings.dataset,
        batch_tokens=config.batch_tokens,
        accumulation=config.accumulation,
        dp_rank=runtime.dp_rank,
        dp_size=runtime.dp_size,
        teachers=_teachers(training),
        seed=0,
        shuffle=False,
        one_epoch=True,
        max_rows=settings.max_rows,
    )
    values = evaluate(training, config, runtime, batches)
    if progress.step and (progress.best_loss is None or values["loss"] < progress.best_loss):
        progress.best_loss, progress.best_step = values["loss"], progress.step
    log.write(progress.step, values, kind="evaluation")
    return values
