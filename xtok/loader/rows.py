"""The rows of one row group in memory, column by column, as Parquet gave them: flat values and row bounds, without a copy.

Legend: D rows of the row group, N student tokens, Nt teacher tokens, P chunks; summed over those rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xtok.loader.partition import exact_masks, num_chunks_of_rows

__all__ = ["GroupRows", "ListColumn", "TeacherColumns", "teacher_columns"]

_BLOCK_TOKENS = 32_768  # exact pairs are found for so many tokens at a time: the intermediate arrays stay in the cache


@dataclass(frozen=True)
class ListColumn:
    """A list column. values: [N]; offsets: int64 [D + 1], half-open row bounds; bounds: the same as Python integers."""

    values: npt.NDArray[np.generic]
    offsets: npt.NDArray[np.int64]
    bounds: list[int]

    @classmethod
    def from_flat(cls, values: npt.NDArray[np.generic], offsets: npt.NDArray[np.int64]) -> ListColumn:
        """values [N] and offsets int64 [D + 1]."""
        return cls(values, offsets, offsets.tolist())

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> ListColumn:
        """A column of list<int32> or list<bool>; a null row is an empty one. Raises pa.ArrowInvalid when a list holds nulls."""
        array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        return cls.from_flat(_as_values(array.values), array.offsets.to_numpy().astype(np.int64))


@dataclass(frozen=True)
class TeacherColumns:
    """What one teacher adds.

    ids: int32; token_mask: bool, or None where every token is in the mask. student_chunk_id: int32 over the student's tokens;
    teacher_chunk_id: int32 over the teacher's. student_exact, teacher_exact: bool over the same, tokens on a correct one-to-one
    pair. pair_is_correct: bool, or None where every pair is correct; num_chunks: of each row.
    """

    ids: ListColumn
    token_mask: ListColumn | None
    student_chunk_id: ListColumn
    teacher_chunk_id: ListColumn
    student_exact: ListColumn
    teacher_exact: ListColumn
    pair_is_correct: ListColumn | None
    num_chunks: list[int]


@dataclass(frozen=True)
class GroupRows:
    """One row group. idx: of each row; loss_multiplier: of each row; teachers: by teacher_index."""

    idx: list[int]
    loss_multiplier: list[float]
    ids: ListColumn
    token_mask: ListColumn | None
    teachers: Mapping[int, TeacherColumns]


def teacher_columns(
    ids: ListColumn,
    token_mask: ListColumn | None,
    student_chunk_id: ListColumn,
    teacher_chunk_id: ListColumn,
    pair_is_correct: ListColumn | None,
) -> TeacherColumns:
    """The columns read, completed by those that follow from them."""
    if pair_is_correct is None:
        num_chunks = num_chunks_of_rows(student_chunk_id.values.astype(np.int32, copy=False), student_chunk_id.offsets)
    else:
        num_chunks = np.diff(pair_is_correct.offsets)
    student_exact, teacher_exact = _exact(student_chunk_id, teacher_chunk_id, pair_is_correct, num_chunks)
    return TeacherColumns(
        ids=ids,
        token_mask=token_mask,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
        student_exact=ListColumn(student_exact, student_chunk_id.offsets, student_chunk_id.bounds),
        teacher_exact=ListColumn(teacher_exact, teacher_chunk_id.offsets, teacher_chunk_id.bounds),
        pair_is_correct=pair_is_correct,
        num_chunks=num_chunks.tolist(),
    )


def _exact(
    student: ListColumn, teacher: ListColumn, correct: ListColumn | None, num_chunks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """bool [N] and [Nt], block of rows by block of rows."""
    masks = np.empty(len(student.values), dtype=bool), np.empty(len(teacher.values), dtype=bool)
    pair_offsets = np.zeros(len(num_chunks) + 1, dtype=np.int64)
    np.cumsum(num_chunks, out=pair_offsets[1:])
    flags = np.ones(int(pair_offsets[-1]), dtype=bool) if correct is None else correct.values.astype(bool, copy=False)
    first_flag = 0 if correct is None else correct.bounds[0]
    ends = np.searchsorted(student.offsets, np.arange(student.bounds[0], student.bounds[-1], _BLOCK_TOKENS)[1:])
    cuts = np.unique(np.concatenate([[0], ends, [len(num_chunks)]]))
    for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        sides = [slice(column.bounds[start], column.bounds[end]) for column in (student, teacher)]
        pairs = pair_offsets[start : end + 1]
        found = exact_masks(
            student.values[sides[0]].astype(np.int32, copy=False),
            student.offsets[start : end + 1] - student.bounds[start],
            teacher.values[sides[1]].astype(np.int32, copy=False),
            teacher.offsets[start : end + 1] - teacher.bounds[start],
            flags[first_flag + int(pairs[0]) : first_flag + int(pairs[-1])],
            pairs - pairs[0],
        )
        masks[0][sides[0]], masks[1][sides[1]] = found
    return masks


def _as_values(values: pa.Array) -> npt.NDArray[np.generic]:
    """The elements of a list array as numpy, without a copy for integers; booleans are unpacked from bits."""
    if values.null_count:
        raise pa.ArrowInvalid("a list holds nulls")
    if not pa.types.is_boolean(values.type):
        return values.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]
    bits = np.frombuffer(values.buffers()[1], dtype=np.uint8) if len(values) else np.empty(0, dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=values.offset + len(values))[values.offset :].view(np.bool_)
