"""Pads rows in memory into one batch with the collator's keys, dtypes and values.

Legend: B rows, Ts and Tt padded student and teacher lengths, P padded number of chunks (at least 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xtok.batch import BatchedDataDict
from xtok.loader.rows import GroupRows, ListColumn
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


def assemble(rows: Sequence[tuple[GroupRows, int]], shape: BatchShape) -> BatchedDataDict:
    """The rows (row group, row within it), in order, as one batch; filler rows complete it to B."""
    numbers = [row for _, row in rows]
    groups = [group for group, _ in rows]
    filler = [0] * (shape.batch_size - len(rows))
    student = _Side([group.ids for group in groups], numbers, filler, shape.student)
    batch = BatchedDataDict(
        input_ids=student.ids(),
        input_lengths=student.input_lengths(),
        token_mask=student.mask([group.token_mask for group in groups]),
        sample_mask=_tensor([*(group.loss_multiplier[row] for group, row in rows), *filler], np.float32),
        idx=[*(group.idx[row] for group, row in rows), *(FILLER_IDX for _ in filler)],
    )
    for index, side_shape in shape.teachers.items():
        found = [group.teachers[index] for group in groups]
        teacher = _Side([columns.ids for columns in found], numbers, filler, side_shape)
        batch[f"teacher_{index}_input_ids"] = teacher.ids()
        batch[f"teacher_{index}_input_lengths"] = teacher.input_lengths()
        batch[f"teacher_{index}_token_mask"] = teacher.mask([columns.token_mask for columns in found])
        num_chunks = [columns.num_chunks[row] for columns, row in zip(found, numbers, strict=True)] + filler
        pairs = PaddedLayout(num_chunks)
        correct = _flags_of([columns.pair_is_correct for columns in found], numbers, num_chunks)
        alignment = {
            "pair_valid": pairs.real(np.bool_),
            "pair_is_correct": pairs.real(np.bool_) if correct is None else pairs.place(correct, False, np.bool_),
            "student_exact_partition_mask": student.place([columns.student_exact for columns in found], False, np.bool_),
            "teacher_exact_partition_mask": teacher.place([columns.teacher_exact for columns in found], False, np.bool_),
            "student_chunk_id": student.place([columns.student_chunk_id for columns in found], -1, np.int64),
            "teacher_chunk_id": teacher.place([columns.teacher_chunk_id for columns in found], -1, np.int64),
            "num_chunks": _tensor(num_chunks, np.int64),
        }
        batch.update({f"alignment_{index}_{name}": value for name, value in alignment.items()})
    return batch


def _tensor(values: Sequence[int] | Sequence[float], dtype: npt.DTypeLike) -> torch.Tensor:
    """[len(values)] of `dtype`; by way of numpy, which reads short lists several times as fast as torch does."""
    return torch.from_numpy(np.array(values, dtype=dtype))


class _Side:
    """Ids of one side of a batch and where they stand in [B, T]."""

    def __init__(self, ids: Sequence[ListColumn], numbers: Sequence[int], filler: Sequence[int], shape: SideShape) -> None:
        self._numbers, self._num_filler, self._pad_token_id = numbers, len(filler), shape.pad_token_id
        self._ids = _rows_of(ids, numbers)
        self._lengths = [*map(len, self._ids), *filler]
        self._layout = PaddedLayout(self._lengths, divisor=shape.divisor, at_least=shape.at_least)

    def ids(self) -> torch.Tensor:
        """int64 [B, T]."""
        return self._layout.place(self._ids, self._pad_token_id, np.int64)

    def input_lengths(self) -> torch.Tensor:
        """int64 [B]; a filler row counts one token."""
        real = self._lengths[: len(self._ids)]
        return _tensor(real + [_FILLER_LENGTH] * self._num_filler, np.int64)

    def mask(self, columns: Sequence[ListColumn | None]) -> torch.Tensor:
        """int64 [B, T]; None for rows of which every token is in the mask."""
        flags = _flags_of(columns, self._numbers, self._lengths)
        return self._layout.real(np.int64) if flags is None else self._layout.place(flags, 0, np.int64)

    def place(self, columns: Sequence[ListColumn], pad_value: int | bool, dtype: npt.DTypeLike) -> torch.Tensor:
        """[B, T] of `dtype`, one column a row."""
        return self._layout.place(_rows_of(columns, self._numbers), pad_value, dtype)


def _rows_of(columns: Sequence[ListColumn], numbers: Sequence[int]) -> list[npt.NDArray[np.generic]]:
    """Row `numbers[i]` of column i, as views."""
    return [column.values[column.bounds[row] : column.bounds[row + 1]] for column, row in zip(columns, numbers, strict=True)]


def _flags_of(
    columns: Sequence[ListColumn | None], numbers: Sequence[int], lengths: Sequence[int]
) -> list[npt.NDArray[np.generic]] | None:
    """Rows of flag columns, all True where a column is None; None when all are."""
    if all(column is None for column in columns):
        return None
    return [
        np.ones(length, dtype=np.bool_) if column is None else column.values[column.bounds[row] : column.bounds[row + 1]]
        for column, row, length in zip(columns, numbers, lengths, strict=False)
    ]
