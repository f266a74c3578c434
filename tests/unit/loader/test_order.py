"""The global order against a slow twin in Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok.loader.order import EpochOrder, RowCatalog

WORD = 2**64


def slow_key(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = ((key ^ number % WORD) + 0x9E3779B97F4A7C15) % WORD
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % WORD
        key ^= key >> 31
    return key


def slow_order(usable: list[list[bool]], seed: int, epoch: int, shuffle: bool, span: int) -> list[list[tuple[int, int]]]:
    """Windows of (row group, row)."""
    groups = list(range(len(usable)))
    if shuffle:
        groups.sort(key=lambda group: slow_key(seed, epoch, 1, group))
    windows = []
    for start in range(0, len(groups), span):
        rows = [(group, row) for group in groups[start : start + span] for row, flag in enumerate(usable[group]) if flag]
        if shuffle:
            rows.sort(key=lambda place: slow_key(seed, epoch, 2, *place))
        windows.append(rows)
    return windows


@given(
    usable=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=9),
    seed=st.integers(-3, 2**63),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    span=st.integers(1, 5),
)
def test_equals_the_slow_twin(usable: list[list[bool]], seed: int, epoch: int, shuffle: bool, span: int) -> None:
    flags = {group: np.array(row) for group, row in enumerate(usable) if not all(row)}
    catalog = RowCatalog(np.array([len(row) for row in usable], dtype=np.int64), flags)
    order = EpochOrder(catalog, seed=seed, epoch=epoch, shuffle=shuffle, shuffle_row_groups=span)
    wanted = slow_order(usable, seed, epoch, shuffle, span)
    assert order.num_windows == len(wanted)
    assert order.num_rows == sum(map(sum, usable))
    position = 0
    for index, rows in enumerate(wanted):
        window = order.window(index)
        assert [(int(window.groups[slot]), int(row)) for slot, row in zip(window.slot, window.row, strict=True)] == rows
        assert order.window_starts[index] == position
        for _ in rows:
            assert order.window_of(position) == index
            position += 1
    assert order.window_of(position) == len(wanted)


@pytest.mark.parametrize("change", ["rows", "usable", "settings"])
def test_digest_tells_orders_apart(change: str) -> None:
    rows, flags, settings = np.array([3, 4]), {1: np.array([True, False, True, True])}, (0, True, 8)
    catalog = RowCatalog(rows, flags)
    assert catalog.digest(*settings) == RowCatalog(rows.copy(), dict(flags)).digest(*settings)
    other = {
        "rows": RowCatalog(np.array([4, 4]), flags).digest(*settings),
        "usable": RowCatalog(rows, {1: np.array([True, True, False, True])}).digest(*settings),
        "settings": catalog.digest(1, True, 8),
    }[change]
    assert other != catalog.digest(*settings)
