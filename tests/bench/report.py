"""Figures of the benchmarks as a table: each value beside its baseline of the same run, their ratio, and the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Figure", "Limit", "figure_of", "print_figures"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure must keep: `at most` or `at least` a bound, of its ratio to the baseline or, without one, of the value."""

    kind: str
    bound: float

    def holds(self, number: float) -> bool:
        return not math.isnan(number) and (number <= self.bound if self.kind == "at most" else number >= self.bound)

    def __str__(self) -> str:
        return f"{'≤' if self.kind == 'at most' else '≥'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. baseline: what it is compared with, measured in the same run, in the same unit; None for an absolute
    figure (bytes a token). limit: None for a figure that is only shown."""

    metric: str
    value: float
    baseline: float | None
    limit: Limit | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """value / baseline, or None without a baseline."""
        if self.baseline is None:
            return None
        return self.value / self.baseline if self.baseline else math.nan

    @property
    def passed(self) -> bool:
        """Whether the limit holds (of the ratio, or of the value where there is no baseline); True without a limit."""
        number = self.value if self.ratio is None else self.ratio
        return self.limit is None or self.limit.holds(number)


def figure_of(row: dict[str, Any]) -> Figure:
    """Check what a benchmark returned: keys metric, value, baseline, limit, unit, no others.

    limit: None or a string such as "<= 0.35" or ">= 5". ValueError for anything else, so that a misspelt limit fails loudly.
    """
    if set(row) != {"metric", "value", "baseline", "limit", "unit"}:
        raise ValueError(f"a figure has the keys metric, value, baseline, limit, unit; this one has {sorted(row)}")
    baseline = row["baseline"]
    return Figure(
        metric=str(row["metric"]),
        value=float(row["value"]),
        baseline=None if baseline is None else float(baseline),
        limit=_limit_of(row["limit"]),
        unit=str(row["unit"]),
    )


def _limit_of(text: str | None) -> Limit | None:
    if text is None:
        return None
    sign, _, bound = str(text).partition(" ")
    kinds = {"<=": "at most", "≤": "at most", ">=": "at least", "≥": "at least"}
    try:
        return Limit(kinds[sign], float(bound))
    except (KeyError, ValueError):
        raise ValueError(f"limit {text!r} should read like '<= 0.35' or '>= 5'") from None


def print_figures(title: str, figures: list[Figure], console: Console) -> None:
    """One table. Passed and missed limits are words, not colours alone."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    table.add_column("figure", overflow="fold")
    for column in ("value", "baseline", "ratio", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for figure in figures:
        verdict = "" if figure.limit is None else "[green]pass[/]" if figure.passed else "[bold red]MISSED[/]"
        table.add_row(
            escape(figure.metric),
            f"{_short(figure.value)} {figure.unit}",
            "" if figure.baseline is None else f"{_short(figure.baseline)} {figure.unit}",
            "" if figure.ratio is None else f"{figure.ratio:.3g} ×",
            "" if figure.limit is None else str(figure.limit),
            verdict,
        )
    console.print(table)


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
