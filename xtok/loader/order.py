"""The global order of rows: a pure function of the dataset, the seed and the epoch.

Row groups are permuted; every `shuffle_row_groups` neighbours of that permutation form a window, whose rows are permuted. Ranks,
workers and batch sizes have no part in it. Rows that a requested teacher refused are left out without moving the others. The
keys come from an integer hash of our own (splitmix64's finalizer), so that no library release can change an order.

Legend: G row groups, W windows, R rows of the order (all rows but those left out).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EpochOrder", "RowCatalog", "WindowRows"]

_GROUPS, _ROWS = 1, 2  # streams of keys


@dataclass(frozen=True)
class RowCatalog:
    """How many rows each row group holds and which of them are usable.

    num_rows: int64 [G], rows on disk. usable: row group -> bool [rows], only for those with rows to leave out.
    """

    num_rows: npt.NDArray[np.int64]
    usable: Mapping[int, npt.NDArray[np.bool_]]

    def num_usable(self) -> npt.NDArray[np.int64]:
        """int64 [G]: rows that take part."""
        counts = self.num_rows.copy()
        for group, flags in self.usable.items():
            counts[group] = int(flags.sum())
        return counts

    def usable_rows(self, group: int) -> npt.NDArray[np.int64]:
        """int64: row numbers within `group` that take part, ascending."""
        flags = self.usable.get(group)
        return np.arange(self.num_rows[group], dtype=np.int64) if flags is None else np.flatnonzero(flags)

    def digest(self, *settings: Any) -> str:
        """Hex digest of the catalog and `settings`: two loaders with one digest have the same order in every epoch."""
        state = hashlib.sha256(repr(settings).encode())
        state.update(self.num_rows.tobytes())
        for group in sorted(self.usable):
            state.update(f"{group}:".encode() + np.packbits(self.usable[group]).tobytes())
        return state.hexdigest()


@dataclass(frozen=True)
class WindowRows:
    """One window in order. groups: row groups to read. slot, row: int64 [rows], index into `groups` and row within that group."""

    groups: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


class EpochOrder:
    """The order of one epoch; positions are 0 to R - 1."""

    def __init__(self, catalog: RowCatalog, *, seed: int, epoch: int, shuffle: bool, shuffle_row_groups: int) -> None:
        num_groups = len(catalog.num_rows)
        groups = np.arange(num_groups, dtype=np.int64)
        if shuffle:
            groups = groups[np.argsort(_keys(seed, epoch, _GROUPS, groups), kind="stable")]
        self._catalog, self._groups = catalog, groups
        self._seed, self._epoch, self._shuffle, self._span = seed, epoch, shuffle, shuffle_row_groups
        self.window_starts = self._starts(catalog.num_usable()[groups])

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.window_starts[-1])

    @property
    def num_windows(self) -> int:
        """W."""
        return len(self.window_starts) - 1

    def window_of(self, position: int) -> int:
        """The window that holds `position`; W for positions past the end."""
        return (
            int(np.searchsorted(self.window_starts, position, side="right")) - 1 if position < self.num_rows else self.num_windows
        )

    def window(self, index: int) -> WindowRows:
        """Rows of positions [window_starts[index], window_starts[index + 1])."""
        groups = self._groups[index * self._span : (index + 1) * self._span]
        rows = [self._catalog.usable_rows(int(group)) for group in groups]
        slot = np.repeat(np.arange(len(groups), dtype=np.int64), [len(found) for found in rows])
        row = np.concatenate(rows)
        if self._shuffle:
            order = np.argsort(_keys(self._seed, self._epoch, _ROWS, groups[slot], row), kind="stable")
            slot, row = slot[order], row[order]
        return WindowRows(groups, slot, row)

    def _starts(self, usable: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        first_groups = np.arange(0, len(usable), self._span)
        starts = np.zeros(len(first_groups) + 1, dtype=np.int64)
        if len(first_groups):
            np.cumsum(np.add.reduceat(usable, first_groups), out=starts[1:])
        return starts


def _keys(seed: int, epoch: int, stream: int, *numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """uint64, one key for each tuple of `numbers`; each number is folded into the hash of those before it."""
    prefix: Sequence[int] = (seed, epoch, stream)
    key = np.zeros(1, dtype=np.uint64)
    for number in prefix:
        key = _mix(key ^ np.uint64(number % 2**64))
    for column in numbers:
        key = _mix(key ^ column.astype(np.uint64))
    return key


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea, Flood 2014); arithmetic is modulo 2**64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
