"""The running count against numpy's own sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok.align.running_count import MAX_LENGTH, running_count, running_ends


@given(st.lists(st.integers(0, 31), max_size=70), st.data())
def test_equals_cumsum_with_jumps(values: list[int], data: st.DataObject) -> None:
    marks = np.array(values, dtype=np.int8)
    places = st.lists(st.integers(0, max(len(values) - 1, 0)), max_size=12 if values else 0)
    jump_at = np.array(sorted(data.draw(places)), dtype=np.int64)
    jump_by = np.array(
        data.draw(st.lists(st.integers(-1000, 1000), min_size=len(jump_at), max_size=len(jump_at))), dtype=np.int64
    )
    want = marks.astype(np.int64)
    np.add.at(want, jump_at, jump_by)
    got = running_count(marks, jump_at, jump_by)
    assert got.dtype == np.int32
    assert np.array_equal(got, np.cumsum(want))
    assert np.array_equal(running_count(marks), np.cumsum(marks, dtype=np.int64))


@given(st.lists(st.one_of(st.integers(0, 20), st.just(MAX_LENGTH)), max_size=70))
def test_ends_equal_cumsum(values: list[int]) -> None:
    for dtype in (np.uint16, np.int64):
        got = running_ends(np.array(values, dtype=dtype))
        assert got.dtype == np.int64
        assert got.tolist() == [0, *np.cumsum(values, dtype=np.int64).tolist()]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1023, 1024])
def test_full_words(count: int) -> None:
    assert np.array_equal(running_count(np.ones(count, dtype=bool)), np.arange(1, count + 1))
    assert np.array_equal(running_count(np.full(count, 31, dtype=np.uint8)), 31 * np.arange(1, count + 1))
