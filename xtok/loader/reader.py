"""From a published dataset to rows in memory: which rows can be used, and the rows of one window.

A flag column that the manifest says is all True (the masks of text mode, the pairs of parts aligned by bytes alone) is not read:
it follows from the lengths. Every damage is a DamagedPartError that names the file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.manifest import FileEntry
from xtok import storage
from xtok.errors import DamagedPartError
from xtok.loader.order import RowCatalog, WindowRows
from xtok.loader.rows import GroupRows, ListColumn, TeacherColumns, teacher_columns
from xtok.shards.read import Dataset, RowGroupRef, Side

__all__ = ["WindowReader", "build_catalog"]

_SCAN_THREADS = 8  # scanning for refused rows waits on storage, not on the processor
_FOOTERS_KEPT = 64


def build_catalog(dataset: Dataset, teachers: Sequence[int]) -> RowCatalog:
    """The rows of `dataset` that every one of `teachers` (those with files) accepted.

    The manifest says which parts hold refused rows; only there a small column is read.
    """
    refs = dataset.row_groups()
    parts = dataset.manifest.parts
    wanted = [
        (group, ref, teacher)
        for group, ref in enumerate(refs)
        for teacher in teachers
        if parts[ref.part].teachers[teacher].num_null_rows
    ]

    def accepted(item: tuple[int, RowGroupRef, int]) -> npt.NDArray[np.bool_]:
        _, ref, teacher = item
        route = dataset.read_row_group(ref, teacher, ["route"]).column("route")
        return np.asarray(route.is_valid().to_numpy(), dtype=bool)

    usable: dict[int, npt.NDArray[np.bool_]] = {}
    refused: dict[tuple[int, int], int] = {}
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        for (group, ref, teacher), flags in zip(wanted, pool.map(accepted, wanted), strict=True):
            usable[group] = usable[group] & flags if group in usable else flags
            refused[ref.part, teacher] = refused.get((ref.part, teacher), 0) + int((~flags).sum())
    for (part, teacher), count in refused.items():
        promised = parts[part].teachers[teacher].num_null_rows
        if count != promised:
            raise _damaged(dataset.file(part, teacher), f"{count} refused rows, the manifest says {promised}")
    usable = {group: flags for group, flags in usable.items() if not flags.all()}
    return RowCatalog(np.array([ref.num_rows for ref in refs], dtype=np.int64), usable)


class WindowReader:
    """Reads windows for the student and `teachers` (indices of teachers with files), through `cache` where one is given."""

    def __init__(self, dataset: Dataset, teachers: Sequence[int], cache: storage.FileCache | None = None) -> None:
        self._source = _RowGroups(dataset, cache)
        self._teachers = tuple(teachers)
        self._refs = dataset.row_groups()

    def read(self, window: WindowRows, selected: npt.NDArray[np.bool_]) -> list[tuple[GroupRows, int]]:
        """The rows of `window` where `selected` (bool, one a row of the window), in its order: row group, and row within it."""
        slots, rows = window.slot[selected], window.row[selected]
        groups = {slot: self._read_group(self._refs[window.groups[slot]]) for slot in np.unique(slots).tolist()}
        return [(groups[slot], row) for slot, row in zip(slots.tolist(), rows.tolist(), strict=True)]

    def _read_group(self, ref: RowGroupRef) -> GroupRows:
        student = _SideTable(self._source, ref, "student", ["input_ids", "idx", "loss_multiplier"], ["token_mask"])
        ids = student.lists("input_ids")
        return GroupRows(
            idx=student.table.column("idx").to_pylist(),
            loss_multiplier=student.table.column("loss_multiplier").to_pylist(),
            ids=ids,
            token_mask=student.flags("token_mask", like=ids),
            teachers={teacher: self._read_teacher(ref, teacher, ids) for teacher in self._teachers},
        )

    def _read_teacher(self, ref: RowGroupRef, teacher: int, student_ids: ListColumn) -> TeacherColumns:
        columns, flags = ["input_ids", "student_chunk_id", "teacher_chunk_id"], ["token_mask", "pair_is_correct"]
        side = _SideTable(self._source, ref, teacher, columns, flags)
        ids = side.lists("input_ids")
        return teacher_columns(
            ids=ids,
            token_mask=side.flags("token_mask", like=ids),
            student_chunk_id=side.lists("student_chunk_id", like=student_ids),
            teacher_chunk_id=side.lists("teacher_chunk_id", like=ids),
            pair_is_correct=side.flags("pair_is_correct"),
        )


class _SideTable:
    """One side of one row group: the columns needed, and flags that may follow from the manifest."""

    def __init__(self, source: _RowGroups, ref: RowGroupRef, side: Side, columns: list[str], flags: list[str]) -> None:
        self._path = source.dataset.file(ref.part, side).path
        all_true = _all_true(source.dataset, ref, side)
        self._flags = [name for name in flags if name not in all_true]
        self.table = source.read(ref, side, [*columns, *self._flags])

    def lists(self, name: str, like: ListColumn | None = None) -> ListColumn:
        """A list column. DamagedPartError when it holds nulls, or rows that are not as long as those of `like`."""
        column = self.table.column(name)
        try:
            found = ListColumn.from_arrow(column)
        except pa.ArrowInvalid as error:
            raise DamagedPartError(f"column {name} of {self._path}: {error}. `xtok verify` checks the whole dataset.") from error
        if like is not None:
            differs = np.diff(found.offsets) != np.diff(like.offsets)
            if bool((differs & column.is_valid().to_numpy()).any()):
                raise DamagedPartError(
                    f"column {name} of {self._path} has rows of another length than their ids. "
                    "`xtok verify` checks the whole dataset."
                )
        return found

    def flags(self, name: str, like: ListColumn | None = None) -> ListColumn | None:
        """A flag column, None when every element is True."""
        return self.lists(name, like) if name in self._flags else None


class _RowGroups:
    """Reads row groups as `Dataset.read_row_group` does, and keeps the parsed footers of the files met lately.

    Parsing the footer of a file of many small row groups takes as long as reading one of them.
    """

    def __init__(self, dataset: Dataset, cache: storage.FileCache | None) -> None:
        self.dataset, self._cache = dataset, cache
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        # A store is asked once for all columns of a row group; a local file gains nothing from it.
        self._pre_buffer = cache is None and storage.local_path(dataset.url) is None

    def read(self, ref: RowGroupRef, side: Side, columns: list[str]) -> pa.Table:
        """One row group of one side. Raises DamagedPartError naming the file."""
        entry = self.dataset.file(ref.part, side)
        try:
            file, footer = self._open(entry), self._footers.get(entry.path)
            with file, pq.ParquetFile(file, metadata=footer, pre_buffer=self._pre_buffer) as parquet:
                self._keep_footer(entry.path, parquet.metadata)
                table = parquet.read_row_group(ref.row_group, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            if storage.is_no_damage(error):
                raise
            raise _damaged(entry, str(error)) from error
        if table.num_rows != ref.num_rows:
            raise _damaged(entry, f"row group {ref.row_group} has {table.num_rows} rows, not {ref.num_rows}")
        return table

    def _open(self, entry: FileEntry) -> pa.NativeFile:
        url = storage.join(self.dataset.url, entry.path)
        return storage.open_arrow(url) if self._cache is None else self._cache.open_arrow(url, entry.sha256)

    def _keep_footer(self, path: str, footer: pq.FileMetaData) -> None:
        self._footers[path] = footer
        self._footers.move_to_end(path)
        if len(self._footers) > _FOOTERS_KEPT:
            self._footers.popitem(last=False)


def _all_true(dataset: Dataset, ref: RowGroupRef, side: Side) -> set[str]:
    """Flag columns of which the manifest says that every element is True."""
    names = {"token_mask"} if dataset.manifest.mode == "text" else set()
    if side != "student":
        counts = dataset.manifest.parts[ref.part].teachers[side]
        if counts.num_chunks == counts.num_correct_chunks:
            names.add("pair_is_correct")
    return names


def _damaged(entry: FileEntry, what: str) -> DamagedPartError:
    return DamagedPartError(f"{entry.path}: {what}. `xtok verify` checks the whole dataset.")
