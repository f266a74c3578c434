"""Losses and acceptance of a run as a PNG. Needs matplotlib (the extra `train`), draws without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from xtok import storage

__all__ = ["draw_plot"]

LOSSES = {"loss": "loss", "kd_loss": "KD", "ce_loss": "CE", "draft_loss": "draft"}


def draw_plot(lines: Sequence[dict[str, Any]], path: str) -> bool:
    """Write the picture to `path`: losses over steps, and below, where there is a draft, its expected accepted length and acceptance by
    slot. Evaluations are dots. False, and nothing is written, without matplotlib or without a line."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not lines:
        return False
    with_draft = any(line.get("tau") is not None for line in lines)
    figure = Figure(figsize=(8, 7 if with_draft else 4), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(2 if with_draft else 1, 1, squeeze=False)[:, 0]
    for key, name in LOSSES.items():
        _draw(rows[0], lines, name, lambda line, key=key: line.get(key))
    rows[0].set(ylabel="nats", xlabel=None if with_draft else "step")
    rows[0].legend(loc="upper right")
    if with_draft:
        _draw(rows[1], lines, "expected accepted length (tau)", lambda line: line.get("tau"))
        rows[1].set(xlabel="step", ylabel="tokens a round")
        rates = rows[1].twinx()
        num_slots = max(len(line.get("draft_greedy_acceptance_by_slot") or []) for line in lines)
        for slot in range(num_slots):
            _draw(rates, lines, f"slot {slot + 1}", lambda line, slot=slot: _rate(line, slot), linewidth=0.8, linestyle=":")
        rates.set(ylabel="greedy acceptance", ylim=(0, 1))
        rows[1].legend(loc="upper left")
        rates.legend(loc="lower right", ncols=4, fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    storage.write_atomic(path, picture.getvalue())
    return True


def _rate(line: dict[str, Any], slot: int) -> float | None:
    rates = line.get("draft_greedy_acceptance_by_slot") or []
    return rates[slot] if slot < len(rates) else None


def _draw(axes: Any, lines: Sequence[dict[str, Any]], name: str, value: Any, **style: Any) -> None:
    """A line through the training steps and a dot for each evaluation, in one colour; nothing where there is no value."""
    colour = None
    for kind in ("train", "evaluation"):
        points = [(line["step"], value(line)) for line in lines if line["kind"] == kind and value(line) is not None]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if kind == "train":
            [drawn] = axes.plot(steps, values, label=name, **style)
            colour = drawn.get_color()
        else:
            axes.plot(steps, values, "o", markersize=4, color=colour, label=None if colour else name)
