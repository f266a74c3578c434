"""From a published dataset to rows in memory: which rows can be used, and the rows of one window.

A boolean column that its Parquet statistics prove to be all True (the masks of text mode, the pairs of the byte route) is not
read: it follows from the lengths. Every damage is a DamagedPartError that names the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.manifest import FileEntry
from xtok.errors import DamagedPartError
from xtok.loader.order import RowCatalog, WindowRows
from xtok.loader.rows import Ragged, StudentRows, TeacherRows, gather_flat, gather_ragged
from xtok.shards.read import Dataset, RowGroupRef, Side

__all__ = ["WindowReader", "build_catalog"]

_SCAN_THREADS = 8  # scanning for refused rows waits on storage, not on the processor


def build_catalog(dataset: Dataset, teachers: Sequence[int]) -> RowCatalog:
    """The rows of `dataset` that every one of `teachers` (those with files) accepted.

    The manifest says which parts hold refused rows; only there a small column is read.
    """
    refs = dataset.row_groups()
    parts = dataset.manifest.parts
    wanted = [
        (group, ref, teacher) for group, ref in enumerate(refs) for teacher in teachers if parts[ref.part].teachers[teacher].num_null_rows
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
    """Reads the rows of one window, in order, for the student and `teachers` (indices of teachers with files)."""

    def __init__(self, dataset: Dataset, teachers: Sequence[int]) -> None:
        self._dataset = dataset
        self._teachers = tuple(teachers)
        self._refs = dataset.row_groups()
        self._all_true: dict[tuple[int, Side], list[frozenset[str]]] = {}

    def read(self, window: WindowRows, selected: npt.NDArray[np.bool_]) -> StudentRows:
        """The rows of `window` where `selected` (bool, one a row of the window), in its order."""
        slot, row = window.slot[selected], window.row[selected]
        needed = np.unique(slot)
        refs = [self._refs[group] for group in window.groups[needed]]
        starts = np.concatenate([[0], np.cumsum([ref.num_rows for ref in refs])]).astype(np.int64)
        rows = starts[np.searchsorted(needed, slot)] + row

        student = _SideColumns(self, refs, rows, "student", ["idx", "loss_multiplier", "input_ids"], ["token_mask"])
        ids = student.ragged("input_ids")
        return StudentRows(
            idx=student.flat("idx").astype(np.int64, copy=False),
            loss_multiplier=student.flat("loss_multiplier").astype(np.float32, copy=False),
            ids=ids,
            token_mask=student.flags("token_mask", ids),
            teachers={teacher: self._read_teacher(refs, rows, teacher, ids) for teacher in self._teachers},
        )

    def _read_teacher(self, refs: Sequence[RowGroupRef], rows: npt.NDArray[np.int64], teacher: int, student_ids: Ragged) -> TeacherRows:
        columns = ["input_ids", "student_chunk_id", "teacher_chunk_id"]
        side = _SideColumns(self, refs, rows, teacher, columns, ["token_mask", "pair_is_correct"])
        ids = side.ragged("input_ids")
        student_chunk_id, teacher_chunk_id = side.ragged("student_chunk_id"), side.ragged("teacher_chunk_id")
        side.require_same_lengths("student_chunk_id", student_chunk_id, student_ids)
        side.require_same_lengths("teacher_chunk_id", teacher_chunk_id, ids)
        return TeacherRows(
            ids=ids,
            token_mask=side.flags("token_mask", ids),
            student_chunk_id=student_chunk_id,
            teacher_chunk_id=teacher_chunk_id,
            pair_is_correct=None if side.is_all_true("pair_is_correct") else side.ragged("pair_is_correct"),
        )

    def read_tables(self, refs: Sequence[RowGroupRef], side: Side, columns: Sequence[str]) -> list[pa.Table]:
        """One table a row group."""
        return [self._dataset.read_row_group(ref, side, columns) for ref in refs]

    def all_true(self, ref: RowGroupRef, side: Side) -> frozenset[str]:
        """Boolean list columns of a row group whose statistics say that every element is True. Remembered for the whole file."""
        known = self._all_true.get((ref.part, side))
        if known is None:
            known = _all_true_columns(self._dataset, self._dataset.file(ref.part, side))
            self._all_true[ref.part, side] = known
        return known[ref.row_group]

    def file_names(self, refs: Sequence[RowGroupRef], side: Side) -> str:
        """Paths of the files behind `refs`, for messages."""
        return ", ".join(dict.fromkeys(self._dataset.file(ref.part, side).path for ref in refs))


class _SideColumns:
    """Columns of one side over some row groups: what is needed, and flags that may follow from statistics."""

    def __init__(
        self,
        reader: WindowReader,
        refs: Sequence[RowGroupRef],
        rows: npt.NDArray[np.int64],
        side: Side,
        needed: list[str],
        flags: list[str],
    ) -> None:
        constant = frozenset.intersection(*(reader.all_true(ref, side) for ref in refs))
        self._constant = constant.intersection(flags)
        self._rows, self._where = rows, reader.file_names(refs, side)
        self._tables = reader.read_tables(refs, side, [*needed, *(name for name in flags if name not in constant)])

    def is_all_true(self, name: str) -> bool:
        return name in self._constant

    def flat(self, name: str) -> npt.NDArray[np.generic]:
        return gather_flat([table.column(name) for table in self._tables], self._rows)

    def ragged(self, name: str) -> Ragged:
        try:
            return gather_ragged([table.column(name) for table in self._tables], self._rows)
        except pa.ArrowInvalid as error:
            raise DamagedPartError(f"column {name} of {self._where}: {error}. `xtok verify` finds the damaged part.") from error

    def flags(self, name: str, ids: Ragged) -> Ragged | None:
        """None when all True, else flags as long as `ids`."""
        if self.is_all_true(name):
            return None
        flags = self.ragged(name)
        self.require_same_lengths(name, flags, ids)
        return flags

    def require_same_lengths(self, name: str, column: Ragged, ids: Ragged) -> None:
        if not np.array_equal(column.offsets, ids.offsets):
            raise DamagedPartError(
                f"column {name} of {self._where} has rows of another length than their ids. `xtok verify` finds the damaged part."
            )


def _all_true_columns(dataset: Dataset, entry: FileEntry) -> list[frozenset[str]]:
    try:
        with dataset.open_parquet(entry) as parquet:
            metadata = parquet.metadata
            return [frozenset(_all_true_of_group(metadata.row_group(group))) for group in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(entry, str(error)) from error


def _all_true_of_group(group: pa.parquet.RowGroupMetaData) -> list[str]:
    names = []
    for index in range(group.num_columns):
        column = group.column(index)
        statistics = column.statistics if column.physical_type == "BOOLEAN" else None
        # Nulls are missing lists (rows that a teacher refused) or missing elements; the latter are refused when read.
        if statistics is not None and statistics.has_min_max and statistics.min is True:
            names.append(column.path_in_schema.split(".")[0])
    return names


def _damaged(entry: FileEntry, what: str) -> DamagedPartError:
    return DamagedPartError(f"{entry.path}: {what}. `xtok verify` checks the whole dataset.")
