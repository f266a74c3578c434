"""What a run of `train` leaves on the server for people: a progress bar, log lines, the table of metrics, the report."""

from __future__ import annotations

import time
from typing import Any, cast
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, create_table_artifact, update_progress_artifact

from xtok import storage

__all__ = ["TrainingProgress", "publish_training"]

BAR_SECONDS, LOG_SECONDS = 1.0, 10.0


class TrainingProgress:
    """A progress artifact in optimizer steps, and a log line every ten seconds and for every evaluation."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._bar_at = self._log_at = 0.0
        self._logger = get_run_logger()
        created = create_progress_artifact(progress=0.0, key="train-progress", description=f"{num_steps} steps")
        self._artifact = cast(UUID, created)  # a coroutine only where an event loop runs, which is never so in our flows

    def show(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        now, step, is_last = time.monotonic(), line["step"], line["step"] >= self._num_steps
        if is_last or now - self._bar_at >= BAR_SECONDS:
            self._bar_at = now
            update_progress_artifact(artifact_id=self._artifact, progress=100.0 * step / self._num_steps)
        if is_last or line["kind"] == "evaluation" or now - self._log_at >= LOG_SECONDS:
            self._log_at = now
            names = ("loss", "kd_loss", "ce_loss", "draft_loss", "tau", "tokens_per_s")
            values = ", ".join(f"{name} {line[name]:.4g}" for name in names if line.get(name) is not None)
            self._logger.info("%s, step %d of %d: %s", line["kind"], step, self._num_steps, values)


def publish_training(output: str, table: list[dict[str, Any]], markdown: str, plot: str | None) -> None:
    """Store the table and the report as artifacts of the current run. The server shows no local file: it gets the plot's path."""
    if plot is not None:
        path = storage.join(output, plot)
        markdown = markdown.replace(f"![losses and acceptance]({plot})", f"[losses and acceptance](file://{path}): `{path}`")
    create_table_artifact(table=table, key="train-metrics", description="Evaluations, and up to twenty steps")
    create_markdown_artifact(
        markdown=markdown, key="train-report", description="Losses, acceptance and exported paths of this run"
    )
