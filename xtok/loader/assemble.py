"""Cuts rows in memory into padded batches with the collator's keys, dtypes and values, several batches at a time.

Legend: K batches of B rows, Ts and Tt padded student and teacher lengths, P padded number of chunks (at least 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xtok.batch import BatchedDataDict
from xtok.loader.rows import Ragged, StudentRows, TeacherRows
from xtok.padding import PaddedLayout

__all__ = ["FILLER_IDX", "BatchShape", "SideShape", "assemble"]

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
    """batch_size: B. teachers: shape of every teacher with files, by teacher_index."""

    batch_size: int
    student: SideShape
    teachers: Mapping[int, SideShape]


def assemble(rows: StudentRows, shape: BatchShape) -> list[BatchedDataDict]:
    """`rows` in order as batches of B; filler rows complete the last one. Rows without any give one batch of fillers."""
    num_batches = max(1, -(-len(rows) // shape.batch_size))
    num_filler = num_batches * shape.batch_size - len(rows)
    student = _Side(rows.ids, num_filler, shape.batch_size, shape.student)
    columns: dict[str, list[Any]] = {
        "input_ids": student.ids(),
        "input_lengths": student.lengths(),
        "token_mask": student.mask(rows.token_mask),
        "sample_mask": _per_row(rows.loss_multiplier, num_filler, 0.0, shape.batch_size),
        "idx": [batch.tolist() for batch in _per_row(rows.idx, num_filler, FILLER_IDX, shape.batch_size)],
    }
    for teacher_index, side_shape in shape.teachers.items():
        columns |= _teacher_columns(
            teacher_index, rows.teachers[teacher_index], student, side_shape, num_filler, shape.batch_size
        )
    return [BatchedDataDict({key: batches[number] for key, batches in columns.items()}) for number in range(num_batches)]


def _teacher_columns(
    teacher_index: int, rows: TeacherRows, student: _Side, shape: SideShape, num_filler: int, batch_size: int
) -> dict[str, list[torch.Tensor]]:
    teacher = _Side(rows.ids, num_filler, batch_size, shape)
    num_chunks = _with_filler(np.diff(rows.pair_offsets), num_filler, 0)
    pairs = PaddedLayout(num_chunks, batch_size)
    correct = rows.pair_is_correct
    student_exact, teacher_exact = rows.exact
    columns = {
        f"teacher_{teacher_index}_input_ids": teacher.ids(),
        f"teacher_{teacher_index}_input_lengths": teacher.lengths(),
        f"teacher_{teacher_index}_token_mask": teacher.mask(rows.token_mask),
    }
    alignment = {
        "pair_valid": pairs.real(np.bool_),
        "pair_is_correct": pairs.real(np.bool_) if correct is None else pairs.place(correct.values, False, np.bool_),
        "student_exact_partition_mask": student.layout.place(student_exact, False, np.bool_),
        "teacher_exact_partition_mask": teacher.layout.place(teacher_exact, False, np.bool_),
        "student_chunk_id": student.layout.place(rows.student_chunk_id.values, -1, np.int64),
        "teacher_chunk_id": teacher.layout.place(rows.teacher_chunk_id.values, -1, np.int64),
        "num_chunks": _batches_of(num_chunks, batch_size),
    }
    return columns | {f"alignment_{teacher_index}_{name}": batches for name, batches in alignment.items()}


class _Side:
    """Ids of one side of K batches and where they stand in [B, T]."""

    def __init__(self, ids: Ragged, num_filler: int, batch_size: int, shape: SideShape) -> None:
        self._ids, self._num_filler, self._batch_size, self._pad_token_id = ids, num_filler, batch_size, shape.pad_token_id
        self._lengths = _with_filler(np.diff(ids.offsets), num_filler, 0)
        self.layout = PaddedLayout(self._lengths, batch_size, divisor=shape.divisor, at_least=shape.at_least)

    def ids(self) -> list[torch.Tensor]:
        """int64 [B, T] each."""
        return self.layout.place(self._ids.values, self._pad_token_id, np.int64)

    def lengths(self) -> list[torch.Tensor]:
        """int64 [B] each; a filler row counts one token."""
        lengths = self._lengths.copy()
        lengths[len(lengths) - self._num_filler :] = _FILLER_LENGTH
        return _batches_of(lengths, self._batch_size)

    def mask(self, flags: Ragged | None) -> list[torch.Tensor]:
        """int64 [B, T] each: `flags`, None where every real token is in the mask."""
        return self.layout.real(np.int64) if flags is None else self.layout.place(flags.values, 0, np.int64)


def _with_filler(values: npt.NDArray[Any], num_filler: int, filler: float) -> npt.NDArray[Any]:
    return np.concatenate([values, np.full(num_filler, filler, dtype=values.dtype)]) if num_filler else values


def _batches_of(values: npt.NDArray[Any], batch_size: int) -> list[torch.Tensor]:
    """[B] each."""
    return [torch.from_numpy(values[start : start + batch_size]) for start in range(0, len(values), batch_size)]


def _per_row(values: npt.NDArray[Any], num_filler: int, filler: float, batch_size: int) -> list[torch.Tensor]:
    return _batches_of(_with_filler(values, num_filler, filler), batch_size)
