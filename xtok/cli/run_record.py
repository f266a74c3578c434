"""What a run leaves in <dataset>/runs/ for people, and what of it is read again.

The dataset itself holds no path of this machine; the record of the run (runs/config.json, by `xtok.shards.publish`) does, so
`xtok inspect` finds the tokenizers there.
"""

from __future__ import annotations

import datetime
import os

from pydantic import ValidationError

from schemas.config import PreprocessConfig
from xtok import storage

__all__ = ["recorded_config", "write_report"]


def write_report(output: str, report: str) -> str:
    """Write a run's report as runs/<time>-<process>/report.md; returns its URL. Such folders sort by time."""
    now = datetime.datetime.now(datetime.UTC)
    url = storage.join(output, "runs", f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}", "report.md")
    storage.write_atomic(url, report.encode(), storage.join(output, "runs", "staging"))
    return url


def recorded_config(output: str) -> PreprocessConfig | None:
    """The configuration, with full paths, of the last run that published; None without a readable record."""
    url = storage.join(output, "runs", "config.json")
    if not storage.exists(url):
        return None
    try:
        return PreprocessConfig.model_validate_json(storage.read_bytes(url))
    except ValidationError:
        return None
