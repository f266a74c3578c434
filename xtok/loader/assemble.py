"""Cuts rows in memory into padded batches with the collator's keys, dtypes and values.

Legend: B rows of the batch, Ts and Tt padded student and teacher lengths, P padded number of chunks (at least 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from xtok.batch import BatchedDataDict
from xtok.loader.rows import Ragged, StudentRows
from xtok.padding import padded_width, place_rows, real_positions

__all__ = ["FILLER_IDX", "BatchShape", "RowRun", "SideShape", "assemble"]

# A filler row completes the last batch: one pad token (attention over an empty row is NaN), outside every mask.
FILLER_IDX = -1
_FILLER_LENGTH = 1


@dataclass(frozen=True)
class SideShape:
    """How one side is padded. at_least: minimal width in tokens (the context length, or 1); divisor: width is a multiple of it."""

    pad_token_id: int
    at_least: int
    divisor: int


@dataclass(frozen=True)
class BatchShape:
    """num_rows: B. teachers: shape of every teacher with files, by teacher_index."""

    num_rows: int
    student: SideShape
    teachers: Mapping[int, SideShape]


@dataclass(frozen=True)
class RowRun:
    """Rows [start, end) of rows in memory."""

    rows: StudentRows
    start: int
    end: int


def assemble(runs: Sequence[RowRun], shape: BatchShape) -> BatchedDataDict:
    """The rows of `runs`, in order, as one batch; filler rows complete it to `shape.num_rows`."""
    num_filler = shape.num_rows - sum(run.end - run.start for run in runs)
    student = _Side([_cut(run.rows.ids, run) for run in runs], num_filler, shape.student)
    batch = BatchedDataDict(
        input_ids=student.ids(),
        input_lengths=student.lengths(),
        token_mask=student.mask([_cut(run.rows.token_mask, run) for run in runs]),
        sample_mask=torch.from_numpy(_column([run.rows.loss_multiplier[run.start : run.end] for run in runs], num_filler, 0.0, np.float32)),
        idx=_column([run.rows.idx[run.start : run.end] for run in runs], num_filler, FILLER_IDX, np.int64).tolist(),
    )
    for teacher_index, teacher_shape in shape.teachers.items():
        _add_teacher(batch, runs, student, teacher_index, teacher_shape, num_filler)
    return batch


def _add_teacher(
    batch: BatchedDataDict, runs: Sequence[RowRun], student: _Side, teacher_index: int, shape: SideShape, num_filler: int
) -> None:
    found = [(run.rows.teachers[teacher_index], run) for run in runs]
    teacher = _Side([_cut(rows.ids, run) for rows, run in found], num_filler, shape)
    batch[f"teacher_{teacher_index}_input_ids"] = teacher.ids()
    batch[f"teacher_{teacher_index}_input_lengths"] = teacher.lengths()
    batch[f"teacher_{teacher_index}_token_mask"] = teacher.mask([_cut(rows.token_mask, run) for rows, run in found])

    counts = [np.diff(rows.pair_offsets[run.start : run.end + 1]) for rows, run in found]
    num_chunks = _column(counts, num_filler, 0, np.int64)
    is_pair = real_positions(num_chunks, padded_width(num_chunks, 1))
    correct = _join_flags([_cut(rows.pair_is_correct, run) for rows, run in found], [int(count.sum()) for count in counts])
    fields = {
        "pair_valid": torch.from_numpy(is_pair),
        "pair_is_correct": torch.from_numpy(is_pair.copy()) if correct is None else place_rows(correct, is_pair, False, np.bool_),
        "student_exact_partition_mask": student.place([_cut(rows.exact[0], run).values for rows, run in found], False, np.bool_),
        "teacher_exact_partition_mask": teacher.place([_cut(rows.exact[1], run).values for rows, run in found], False, np.bool_),
        "student_chunk_id": student.place([_cut(rows.student_chunk_id, run).values for rows, run in found], -1, np.int64),
        "teacher_chunk_id": teacher.place([_cut(rows.teacher_chunk_id, run).values for rows, run in found], -1, np.int64),
        "num_chunks": torch.from_numpy(num_chunks),
    }
    batch.update({f"alignment_{teacher_index}_{name}": value for name, value in fields.items()})


class _Side:
    """One side of a batch: where its real tokens stand in [B, T]."""

    def __init__(self, ids: Sequence[Ragged], num_filler: int, shape: SideShape) -> None:
        self._ids, self._num_filler, self._pad_token_id = [run.values for run in ids], num_filler, shape.pad_token_id
        self._lengths = _column([np.diff(run.offsets) for run in ids], num_filler, 0, np.int64)
        self._positions = real_positions(self._lengths, padded_width(self._lengths, shape.divisor, shape.at_least))

    def ids(self) -> torch.Tensor:
        """int64 [B, T]."""
        return self.place(self._ids, self._pad_token_id, np.int64)

    def lengths(self) -> torch.Tensor:
        """int64 [B]; a filler row counts one token."""
        lengths = self._lengths.copy()
        lengths[len(lengths) - self._num_filler :] = _FILLER_LENGTH
        return torch.from_numpy(lengths)

    def mask(self, flags: Sequence[Ragged | None]) -> torch.Tensor:
        """int64 [B, T]: `flags`, None for runs where every real token is in the mask."""
        joined = _join_flags(flags, [len(ids) for ids in self._ids])
        return torch.from_numpy(self._positions.astype(np.int64)) if joined is None else self.place(joined, 0, np.int64)

    def place(self, runs: Sequence[npt.NDArray[np.generic]], pad_value: int | bool, dtype: npt.DTypeLike) -> torch.Tensor:
        """[B, T] of `dtype`."""
        return place_rows(runs, self._positions, pad_value, dtype)


@overload
def _cut(column: Ragged, run: RowRun) -> Ragged: ...
@overload
def _cut(column: Ragged | None, run: RowRun) -> Ragged | None: ...
def _cut(column: Ragged | None, run: RowRun) -> Ragged | None:
    """The column's rows of `run`, without a copy; its offsets keep counting from the column's start."""
    return None if column is None else Ragged(column.run(run.start, run.end), column.offsets[run.start : run.end + 1])


def _join_flags(flags: Sequence[Ragged | None], lengths: Sequence[int]) -> list[npt.NDArray[np.generic]] | None:
    """Values of every run, True where a run has None; None when all have."""
    if all(run is None for run in flags):
        return None
    return [np.ones(length, dtype=np.bool_) if run is None else run.values for run, length in zip(flags, lengths, strict=True)]


def _column(runs: Sequence[npt.NDArray[Any]], num_filler: int, filler: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[B]: values of every run, then the filler rows' value."""
    return np.concatenate([*runs, np.full(num_filler, filler, dtype=dtype)]).astype(dtype, copy=False)
