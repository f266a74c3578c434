"""PaddedLayout against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xtok.padding import PaddedLayout


@given(
    rows=st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=5),
    divisor=st.integers(1, 4),
    least=st.integers(1, 5),
)
def test_places_rows_as_lists_do(rows: list[list[int]], divisor: int, least: int) -> None:
    layout = PaddedLayout([*map(len, rows), 0], divisor=divisor, at_least=least)
    placed = layout.place([np.array(row, dtype=np.int32) for row in rows], -7, np.int64)
    width = max(least, *map(len, rows))
    width += -width % divisor
    assert placed.tolist() == [row + [-7] * (width - len(row)) for row in [*rows, []]]
    assert layout.real(np.int64).tolist() == [[1] * len(row) + [0] * (width - len(row)) for row in [*rows, []]]
