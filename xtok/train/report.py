"""What a run left, for people: its table of metrics and its report in Markdown, pure functions of `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.train.metrics_log import METRICS_FILE

__all__ = ["metrics_table", "read_metrics", "train_report_markdown"]

Line = dict[str, Any]
# Column -> where its value is found; a column that no line fills is left out.
COLUMNS = {
    "loss": "loss",
    "KD": "kd_loss",
    "CE": "ce_loss",
    "perplexity": "perplexity",
    "draft loss": "draft_loss",
    "tau": "tau",
    "tokens/s": "tokens_per_s",
    "lr": "lr",
}
MAX_TRAINING_ROWS = 20


def read_metrics(output: str) -> list[Line]:
    """The whole lines of a run's metrics.jsonl, in order; none when there is no such file yet."""
    path = storage.join(output, METRICS_FILE)
    if not storage.exists(path):
        return []
    whole = storage.read_bytes(path).rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def metrics_table(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Every evaluation, and up to twenty evenly chosen training steps, by step: plain numbers under readable names."""
    training = [line for line in lines if line["kind"] == "train"]
    places = {round(i * (len(training) - 1) / max(1, MAX_TRAINING_ROWS - 1)) for i in range(MAX_TRAINING_ROWS)}
    chosen = [line for place, line in enumerate(training) if place in places]
    chosen += [line for line in lines if line["kind"] == "evaluation"]
    chosen.sort(key=lambda line: (line["step"], line["kind"] != "train"))
    columns = {name: key for name, key in COLUMNS.items() if any(line.get(key) is not None for line in chosen)}
    rows = []
    for line in chosen:
        values = {name: _rounded(line.get(key)) for name, key in columns.items()}
        slots = line.get("draft_greedy_acceptance_by_slot") or []
        accepted = {"accepted by slot": " ".join("-" if rate is None else f"{rate:.2f}" for rate in slots)} if slots else {}
        rows.append({"step": line["step"], "kind": line["kind"], **values, **accepted})
    return rows


def train_report_markdown(
    config: TrainConfig, lines: Sequence[Line], *, exported: dict[str, str], seconds: float, plot: str | None
) -> str:
    """The report: what was trained, how it went, where it lies. plot: name of the picture beside it, or None."""
    training = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    num_tokens = sum(line["tokens"] for line in training)
    parts = [f"{name} {weight:g}" for name, weight in config.objectives.model_dump().items() if weight]
    text = [
        "# Training run",
        "",
        f"`{config.student.model}` on `{config.dataset}` with {len(config.teachers)} teachers: {', '.join(parts)}. "
        f"{training[-1]['step'] if training else 0:,} steps, {num_tokens:,} student tokens in the steps shown; this launch took "
        f"{seconds:.0f} s.",
        "",
    ]
    if len(evaluations) > 1:
        text += ["| held-out rows | before | after |", "|---|--:|--:|"]
        first, last = evaluations[0], evaluations[-1]
        for name, key in COLUMNS.items():
            if first.get(key) is not None and last.get(key) is not None:
                text.append(f"| {name} | {_shown(first[key])} | {_shown(last[key])} |")
        text.append("")
    if plot is not None:
        text += [f"![losses and acceptance]({plot})", ""]
    else:
        text += ["No plot: it needs matplotlib (`pip install 'xtok[train]'`).", ""]
    text += [f"- {name}: `{path}`" for name, path in exported.items()] or ["Nothing was exported."]
    text += ["", *_markdown_table(metrics_table(lines))]
    return "\n".join(text) + "\n"


def _markdown_table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        return ["No step was logged."]
    out = ["| " + " | ".join(names) + " |", "|" + "|".join("---" if name == "kind" else "--:" for name in names) + "|"]
    return out + ["| " + " | ".join(_shown(row.get(name)) for name in names) + " |" for row in rows]


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
