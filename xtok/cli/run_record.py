"""What a run leaves in <dataset>/runs/ for people, and what of it is read again.

The dataset itself holds no path of this machine; the record of the run (runs/config.json, by `xtok.shards.publish`) does, so
`xtok inspect` finds the tokenizers there.
"""

from __future__ import annotations

import datetime
import os
import time

from pydantic import ValidationError

from schemas.config import PreprocessConfig
from schemas.manifest import Manifest
from xtok import storage
from xtok.cli.report import report_markdown
from xtok.cli.report_html import report_html
from xtok.cli.report_sections import RunReport
from xtok.shards.figures import dataset_figures
from xtok.shards.pool import Runner

__all__ = ["StepClock", "make_report", "recorded_config", "write_report"]


class StepClock:
    """Wall clock of the steps of a run, one after the other. seconds: by step, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def done(self, step: str) -> None:
        """All time since the last step ended was this one's."""
        now = time.monotonic()
        self.seconds[step] = now - self._since
        self._since = now


def make_report(manifest: Manifest, config: PreprocessConfig, seconds: dict[str, float], runner: Runner) -> RunReport:
    """What the run has to show; `runner` reads the parts for it. config: absolute. The dataset need not be published yet."""
    return RunReport(manifest, dataset_figures(manifest, config.output, config.student, runner), config.output, dict(seconds))


def write_report(report: RunReport) -> str:
    """Write report.md and report.html into runs/<time>-<process>/ of the dataset; returns that folder. They sort by time."""
    now = datetime.datetime.now(datetime.UTC)
    folder = storage.join(report.output, "runs", f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}")
    staging = storage.join(report.output, "runs", "staging")
    storage.write_atomic(storage.join(folder, "report.md"), report_markdown(report).encode(), staging)
    storage.write_atomic(storage.join(folder, "report.html"), report_html(report).encode(), staging)
    return folder


def recorded_config(output: str) -> PreprocessConfig | None:
    """The configuration, with full paths, of the last run that published; None without a readable record."""
    url = storage.join(output, "runs", "config.json")
    if not storage.exists(url):
        return None
    try:
        return PreprocessConfig.model_validate_json(storage.read_bytes(url))
    except ValidationError:
        return None
