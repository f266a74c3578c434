"""Metrics of a run: one JSON object a step in `metrics.jsonl`, TensorBoard where it is installed, and a progress bar.

Every line has step, kind ("train" or "evaluation"; evaluation of step 0 is that of the untrained models) and time (seconds since 1970).
Losses are in nats, ratios of sums over the ranks, micro-batches and rows of the step:
- loss; kd_loss (all teachers, by weight), kd_loss_{i}, teacher_weight_{i}; ce_loss; draft_loss (DSpark also draft_l1 and
  draft_confidence_bce); tau, the expected accepted length with greedy drafts, of `draft_tau_greedy` and `draft_tau_overlap` (sampled);
  `draft_{greedy,overlap}_acceptance_by_slot`, a list; evaluation only: perplexity.
- coverage_{i}: share of supervised tokens in a valid chunk of teacher i; top1_agreement_{i}; num_valid_chunks_{i} (a micro-batch);
  teacher_mass_outside_{i}: of the columns not compared; empty_chunks_{i}.
- of a step only: grad_norm (before clipping), lr (of the student, or the draft alone), tokens (student tokens, padding left out),
  tokens_per_s, seconds (of the step), and of it or beside it seconds_waiting (for the batch), seconds_counting (normalizers),
  seconds_saving (the checkpoint that the step before started, as far as it held training up).
A value that nothing counted for is null.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from xtok import storage
from xtok.draft.metrics import MetricSum

__all__ = ["METRICS_FILE", "MetricsLog", "summarize"]

METRICS_FILE = "metrics.jsonl"


def summarize(metrics: Mapping[str, MetricSum]) -> dict[str, Any]:
    """Ratios of summed metrics as plain numbers: lists for metrics by slot; what is no finite number (NaN: nothing counted) is None."""
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        ratio = metric.value().tolist()
        values[name] = [_number(x) for x in ratio] if isinstance(ratio, list) else _number(ratio)
    return values


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


class MetricsLog:
    """Written by the main rank only; on other ranks every method does nothing.

    A resumed run drops the lines of steps it will run again, so that the file has one line a step.
    """

    def __init__(self, folder: str, *, num_steps: int, first_step: int, is_main: bool) -> None:
        self._is_main, self._bar = is_main, None
        if not is_main:
            return
        self._path = Path(folder) / METRICS_FILE
        self._lines = _kept_lines(self._path, first_step)
        storage.write_atomic(str(self._path), b"".join(self._lines))
        self._stream = storage.open_append(str(self._path))
        self._board = _tensorboard(folder, first_step)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._bar.start()
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step)

    def write(self, step: int, values: Mapping[str, Any], *, kind: str = "train") -> None:
        """One line: kind "train" or "evaluation"."""
        if not self._is_main:
            return
        record = {"step": step, "kind": kind, "time": time.time(), **values}
        with storage.reported("append to", str(self._path)):
            self._stream.write(json.dumps(record).encode() + b"\n")
            self._stream.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        if self._bar is not None and kind == "train":
            loss, rate = values.get("loss"), values.get("tokens_per_s", 0.0)
            self._bar.update(self._task, completed=step, description=f"loss {loss:.4f}  {rate:,.0f} tokens/s")

    def close(self) -> None:
        """Flush and close."""
        if not self._is_main:
            return
        self._stream.close()
        if self._board is not None:
            self._board.close()
        if self._bar is not None:
            self._bar.stop()


def _kept_lines(path: Path, first_step: int) -> list[bytes]:
    """Lines of steps up to `first_step`; a line cut short by a kill is dropped."""
    if first_step == 0 or not path.exists():
        return []
    kept = []
    for line in storage.read_bytes(str(path)).splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and step <= first_step and line.endswith(b"\n"):
            kept.append(line)
    return kept


def _tensorboard(folder: str, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None  # the extra `train` brings it
    board = str(Path(folder) / "tensorboard")
    with storage.reported("write", board):
        return SummaryWriter(board, purge_step=first_step + 1)
