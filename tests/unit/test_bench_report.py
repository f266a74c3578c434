"""The benchmark runner must not lie: ratios, limits both ways, and no figure that passes by being malformed."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from tests.bench.report import figure_of, print_figures


def row(**changes: Any) -> dict[str, Any]:
    return {"metric": "m", "value": 3.0, "baseline": 10.0, "limit": "<= 0.35", "unit": "s"} | changes


@pytest.mark.parametrize(
    ("changes", "ratio", "passed"),
    [
        ({}, 0.3, True),
        ({"limit": "<= 0.25"}, 0.3, False),
        ({"limit": ">= 0.25"}, 0.3, True),
        ({"limit": ">= 0.31"}, 0.3, False),
        ({"limit": None}, 0.3, True),
        ({"baseline": None, "limit": "<= 3"}, None, True),
        ({"baseline": None, "limit": ">= 3.01"}, None, False),
        ({"value": math.nan}, math.nan, False),
        ({"baseline": 0.0}, math.nan, False),
    ],
)
def test_ratio_and_limit(changes: dict[str, Any], ratio: float | None, passed: bool) -> None:
    figure = figure_of(row(**changes))
    assert figure.ratio == ratio or (
        ratio is not None and math.isnan(ratio) and figure.ratio is not None and math.isnan(figure.ratio)
    )
    assert figure.passed is passed


@pytest.mark.parametrize("changes", [{"limit": "0.35"}, {"limit": "< 0.35"}, {"limit": "<= x"}, {"extra": 1}])
def test_a_malformed_figure_fails_loudly(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"limit|keys"):
        figure_of(row(**changes))


def test_the_table_shows_all_and_misses_in_words() -> None:
    stream = io.StringIO()
    figures = [figure_of(row(metric="[a] fast", limit="<= 0.25")), figure_of(row(value=12345.6, unit="tokens/s"))]
    print_figures("name: what", figures, Console(file=stream, width=120, color_system=None))
    text = stream.getvalue()
    assert "[a] fast" in text
    assert "12,346 tokens/s" in text
    assert "0.3 ×" in text
    assert "≤ 0.25" in text
    assert text.count("MISSED") == 2
