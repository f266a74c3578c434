"""Rows as flat arrays in their final order: taken from the columns of a window, ready to be cut into batches.

Legend: D rows, N student tokens, Nt teacher tokens, P chunks; all of them summed over the rows held. Offsets are int64 [D + 1],
half-open row bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xtok.loader.partition import exact_masks, num_chunks_of_rows

__all__ = ["Ragged", "RaggedColumn", "StudentRows", "TeacherRows", "join_rows", "no_rows", "offsets_of"]


@dataclass(frozen=True)
class Ragged:
    """Values of D rows, one after the other. values: [N]; offsets: int64 [D + 1]."""

    values: npt.NDArray[np.generic]
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TeacherRows:
    """What one teacher adds to D rows.

    ids: int32; token_mask: bool, or None where every token is in the mask. student_chunk_id: int32 over the student's tokens;
    teacher_chunk_id: int32 over the teacher's. pair_is_correct: bool, or None where every pair is correct.
    """

    ids: Ragged
    token_mask: Ragged | None
    student_chunk_id: Ragged
    teacher_chunk_id: Ragged
    pair_is_correct: Ragged | None

    @cached_property
    def pair_offsets(self) -> npt.NDArray[np.int64]:
        """int64 [D + 1]: bounds of each row's chunks."""
        if self.pair_is_correct is not None:
            return self.pair_is_correct.offsets
        return offsets_of(
            num_chunks_of_rows(self.student_chunk_id.values.astype(np.int32, copy=False), self.student_chunk_id.offsets)
        )

    @cached_property
    def exact(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """bool [N] and [Nt], over the student's and over the teacher's tokens: on a correct one-to-one pair."""
        correct = np.ones(int(self.pair_offsets[-1]), dtype=bool) if self.pair_is_correct is None else self.pair_is_correct.values
        return exact_masks(
            self.student_chunk_id.values.astype(np.int32, copy=False),
            self.student_chunk_id.offsets,
            self.teacher_chunk_id.values.astype(np.int32, copy=False),
            self.teacher_chunk_id.offsets,
            correct.astype(bool, copy=False),
            self.pair_offsets,
        )


@dataclass(frozen=True)
class StudentRows:
    """D rows in their final order. idx: int64 [D]; loss_multiplier: float32 [D]; teachers: by teacher_index."""

    idx: npt.NDArray[np.int64]
    loss_multiplier: npt.NDArray[np.float32]
    ids: Ragged
    token_mask: Ragged | None
    teachers: Mapping[int, TeacherRows]

    def __len__(self) -> int:
        return len(self.idx)


def join_rows(pieces: Sequence[StudentRows]) -> StudentRows:
    """Rows of several pieces (at least one) under one another."""
    if len(pieces) == 1:
        return pieces[0]
    student_ids = [piece.ids for piece in pieces]
    return StudentRows(
        idx=np.concatenate([piece.idx for piece in pieces]),
        loss_multiplier=np.concatenate([piece.loss_multiplier for piece in pieces]),
        ids=_join(student_ids),
        token_mask=_join_flags([piece.token_mask for piece in pieces], student_ids),
        teachers={teacher: _join_teacher([piece.teachers[teacher] for piece in pieces]) for teacher in pieces[0].teachers},
    )


def no_rows(teachers: Sequence[int]) -> StudentRows:
    """No rows at all, of these teachers."""
    nothing = Ragged(np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
    teacher = TeacherRows(nothing, None, nothing, nothing, None)
    return StudentRows(
        np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), nothing, None, dict.fromkeys(teachers, teacher)
    )


def _join_teacher(pieces: Sequence[TeacherRows]) -> TeacherRows:
    ids = [piece.ids for piece in pieces]
    pairs = [Ragged(np.empty(0, dtype=np.bool_), piece.pair_offsets) for piece in pieces]
    return TeacherRows(
        ids=_join(ids),
        token_mask=_join_flags([piece.token_mask for piece in pieces], ids),
        student_chunk_id=_join([piece.student_chunk_id for piece in pieces]),
        teacher_chunk_id=_join([piece.teacher_chunk_id for piece in pieces]),
        pair_is_correct=_join_flags([piece.pair_is_correct for piece in pieces], pairs),
    )


def _join(pieces: Sequence[Ragged]) -> Ragged:
    lengths = [np.diff(piece.offsets) for piece in pieces]
    return Ragged(np.concatenate([piece.values for piece in pieces]), offsets_of(np.concatenate(lengths)))


def _join_flags(pieces: Sequence[Ragged | None], shapes: Sequence[Ragged]) -> Ragged | None:
    """None stands for all True, in rows as long as those of the piece's shape; None when all pieces are."""
    if all(piece is None for piece in pieces):
        return None
    filled = [
        piece or Ragged(np.ones(int(shape.offsets[-1]), dtype=np.bool_), shape.offsets)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]
    return _join(filled)


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [D + 1] bounds of rows with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class RaggedColumn:
    """A list column of int32 or bool of all row groups of a window, from which rows are taken in any order.

    Each list is one binary value of its bytes for Arrow, whose `take` then copies rows with memcpy: several times faster than a
    take of lists, which looks up every element.
    """

    def __init__(self, columns: Sequence[pa.ChunkedArray]) -> None:
        """`columns` are joined in order. Raises pa.ArrowInvalid when a list holds nulls."""
        chunks = [chunk for column in columns for chunk in column.chunks]
        values = [_as_values(chunk.values) for chunk in chunks]
        self._dtype = values[0].dtype
        # Joined once: a take from several chunks would join them at every call.
        self._blobs = pa.concat_arrays(
            [_as_blobs(flat, chunk.offsets.to_numpy()) for flat, chunk in zip(values, chunks, strict=True)]
        )

    def take(self, rows: pa.Array) -> Ragged:
        """The rows named (int64), in that order, copied."""
        taken = self._blobs.take(rows)
        _, bounds_buffer, data = taken.buffers()
        width = self._dtype.itemsize
        bounds = np.frombuffer(bounds_buffer, dtype=np.int64)[taken.offset : taken.offset + len(rows) + 1]
        values = np.frombuffer(data if data is not None else b"", dtype=self._dtype, count=int(bounds[-1]) // width)
        return Ragged(values[int(bounds[0]) // width :], (bounds - bounds[0]) // width)


def _as_blobs(values: npt.NDArray[np.generic], offsets: npt.NDArray[np.integer]) -> pa.Array:
    bounds = offsets.astype(np.int64) * values.itemsize
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(values)])


def _as_values(values: pa.Array) -> npt.NDArray[np.generic]:
    """The elements of a list array as numpy, without a copy for integers; booleans are unpacked from bits."""
    if not pa.types.is_boolean(values.type):
        return np.ascontiguousarray(values.to_numpy(zero_copy_only=True))
    if values.null_count:
        raise pa.ArrowInvalid("a list of booleans holds nulls")
    bits = np.frombuffer(values.buffers()[1], dtype=np.uint8) if len(values) else np.empty(0, dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=values.offset + len(values))[values.offset :].view(np.bool_)
