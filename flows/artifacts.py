"""What a run of `preprocess` leaves on the server for people: a progress bar, the table of parts, the report."""

from __future__ import annotations

import time
from typing import cast
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, create_table_artifact, update_progress_artifact

from xtok.cli.report import parts_table, report_markdown
from xtok.cli.report_sections import RunReport

__all__ = ["ProgressBar", "publish_report"]


class ProgressBar:
    """A progress artifact of the current run, in parts done; written at most twice a second."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._shown_at = 0.0
        created = create_progress_artifact(progress=0.0, key="preprocess-progress", description=f"{total} parts")
        self._artifact = cast(UUID, created)  # a coroutine only where an event loop runs, which is never so in our flows

    def update(self, done: int) -> None:
        """Show that `done` parts of the total are finished."""
        now = time.monotonic()
        if done >= self.total or now - self._shown_at >= 0.5:
            self._shown_at = now
            update_progress_artifact(artifact_id=self._artifact, progress=100.0 * done / max(self.total, 1))


def publish_report(report: RunReport) -> None:
    """Store the table of parts and the report, as in report.md, as artifacts of the current run."""
    create_table_artifact(table=parts_table(report.manifest), key="preprocess-parts", description="One line for each part")
    create_markdown_artifact(
        markdown=report_markdown(report), key="preprocess-report", description="Coverage, rejects and figures of this run"
    )
