"""From a published dataset to rows in memory: which rows can be used, and the columns of one window.

A flag column that the manifest says is all True (the masks of text mode, the pairs of parts aligned by bytes alone) is not read:
it follows from the lengths. Every damage is a DamagedPartError that names the file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.manifest import FileEntry
from xtok import storage
from xtok.errors import DamagedPartError
from xtok.loader.order import RowCatalog, WindowRows
from xtok.loader.rows import Ragged, RaggedColumn, StudentRows, TeacherRows
from xtok.shards.read import Dataset, RowGroupRef, Side

__all__ = ["Window", "WindowReader", "build_catalog"]

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
    """Reads windows for the student and `teachers` (indices of teachers with files)."""

    def __init__(self, dataset: Dataset, teachers: Sequence[int]) -> None:
        self._source = _RowGroups(dataset)
        self._teachers = tuple(teachers)
        self._refs = dataset.row_groups()

    def read(self, window: WindowRows, selected: npt.NDArray[np.bool_]) -> Window:
        """The rows of `window` where `selected` (bool, one a row of the window), in its order."""
        slot, row = window.slot[selected], window.row[selected]
        needed = np.unique(slot)
        refs = [self._refs[group] for group in window.groups[needed]]
        starts = np.concatenate([[0], np.cumsum([ref.num_rows for ref in refs])]).astype(np.int64)
        student = _SideColumns(self._source, refs, "student", ["input_ids"], ["token_mask"], ["idx", "loss_multiplier"])
        columns = ["input_ids", "student_chunk_id", "teacher_chunk_id"]
        flags = ["token_mask", "pair_is_correct"]
        teachers = {teacher: _SideColumns(self._source, refs, teacher, columns, flags) for teacher in self._teachers}
        return Window(starts[np.searchsorted(needed, slot)] + row, student, teachers)


class Window:
    """The columns of a window in memory, and which of its rows are wanted in which order."""

    def __init__(self, rows: npt.NDArray[np.int64], student: _SideColumns, teachers: Mapping[int, _SideColumns]) -> None:
        self._rows, self._student, self._teachers = rows, student, teachers

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, start: int, end: int) -> StudentRows:
        """Rows [start, end) of the wanted order, copied out of the columns."""
        numbers = self._rows[start:end]
        rows = pa.array(numbers)
        ids = self._student.ragged("input_ids", rows)
        return StudentRows(
            idx=self._student.flat["idx"][numbers].astype(np.int64, copy=False),
            loss_multiplier=self._student.flat["loss_multiplier"][numbers].astype(np.float32, copy=False),
            ids=ids,
            token_mask=self._student.flags("token_mask", rows, like=ids),
            teachers={teacher: _take_teacher(columns, rows, ids) for teacher, columns in self._teachers.items()},
        )


def _take_teacher(columns: _SideColumns, rows: pa.Array, student_ids: Ragged) -> TeacherRows:
    ids = columns.ragged("input_ids", rows)
    return TeacherRows(
        ids=ids,
        token_mask=columns.flags("token_mask", rows, like=ids),
        student_chunk_id=columns.ragged("student_chunk_id", rows, like=student_ids),
        teacher_chunk_id=columns.ragged("teacher_chunk_id", rows, like=ids),
        pair_is_correct=columns.flags("pair_is_correct", rows),
    )


class _SideColumns:
    """Columns of one side over some row groups. flat: columns without lists, by name, one value a row."""

    def __init__(
        self,
        source: _RowGroups,
        refs: Sequence[RowGroupRef],
        side: Side,
        lists: Sequence[str],
        flags: Sequence[str],
        flat: Sequence[str] = (),
    ) -> None:
        self._where = ", ".join(dict.fromkeys(source.dataset.file(ref.part, side).path for ref in refs))
        constant = set.intersection(*(_all_true(source.dataset, ref, side) for ref in refs))
        read_lists = [*lists, *(name for name in flags if name not in constant)]
        tables = [source.read(ref, side, [*read_lists, *flat]) for ref in refs]
        self.flat = {name: np.concatenate([table.column(name).to_numpy() for table in tables]) for name in flat}
        self._lists = {name: self._column(name, tables) for name in read_lists}

    def ragged(self, name: str, rows: pa.Array, like: Ragged | None = None) -> Ragged:
        """Rows of a list column. DamagedPartError when they are not as long as those of `like`."""
        found = self._lists[name].take(rows)
        if like is not None and not np.array_equal(found.offsets, like.offsets):
            raise DamagedPartError(
                f"column {name} of {self._where} has rows of another length than their ids. `xtok verify` finds the damaged part."
            )
        return found

    def flags(self, name: str, rows: pa.Array, like: Ragged | None = None) -> Ragged | None:
        """Rows of a flag column, None when every element is True."""
        return self.ragged(name, rows, like) if name in self._lists else None

    def _column(self, name: str, tables: list[pa.Table]) -> RaggedColumn:
        try:
            return RaggedColumn([table.column(name) for table in tables])
        except pa.ArrowInvalid as error:
            raise DamagedPartError(f"column {name} of {self._where}: {error}. `xtok verify` finds the damaged part.") from error


class _RowGroups:
    """Reads row groups as `Dataset.read_row_group` does, and keeps the parsed footers of the files met lately.

    Parsing the footer of a file of many small row groups takes as long as reading one of them.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        # A store is asked once for all columns of a row group; a local file gains nothing from it.
        self._pre_buffer = storage.local_path(dataset.url) is None

    def read(self, ref: RowGroupRef, side: Side, columns: list[str]) -> pa.Table:
        """One row group of one side. Raises DamagedPartError naming the file."""
        entry = self.dataset.file(ref.part, side)
        try:
            file = storage.open_arrow(storage.join(self.dataset.url, entry.path))
            with file, pq.ParquetFile(file, metadata=self._footers.get(entry.path), pre_buffer=self._pre_buffer) as parquet:
                self._keep_footer(entry.path, parquet.metadata)
                table = parquet.read_row_group(ref.row_group, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(entry, str(error)) from error
        if table.num_rows != ref.num_rows:
            raise _damaged(entry, f"row group {ref.row_group} has {table.num_rows} rows, not {ref.num_rows}")
        return table

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
