"""Rows of one window as flat arrays in their final order: read from Parquet, gathered once, ready to be cut into batches.

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

__all__ = ["Ragged", "StudentRows", "TeacherRows", "gather_flat", "gather_ragged", "offsets_of"]


@dataclass(frozen=True)
class Ragged:
    """Values of D rows, one after the other. values: [N]; offsets: int64 [D + 1]."""

    values: npt.NDArray[np.generic]
    offsets: npt.NDArray[np.int64]

    def run(self, start: int, end: int) -> npt.NDArray[np.generic]:
        """Values of rows [start, end), a view."""
        return self.values[self.offsets[start] : self.offsets[end]]

    def lengths(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """int64 [end - start]: values in each row."""
        return np.diff(self.offsets[start : end + 1])


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
        return offsets_of(num_chunks_of_rows(self.student_chunk_id.values.astype(np.int32, copy=False), self.student_chunk_id.offsets))

    @cached_property
    def exact(self) -> tuple[Ragged, Ragged]:
        """bool over the student's and over the teacher's tokens: on a correct one-to-one pair."""
        correct = np.ones(int(self.pair_offsets[-1]), dtype=bool) if self.pair_is_correct is None else self.pair_is_correct.values
        student, teacher = exact_masks(
            self.student_chunk_id.values.astype(np.int32, copy=False),
            self.student_chunk_id.offsets,
            self.teacher_chunk_id.values.astype(np.int32, copy=False),
            self.teacher_chunk_id.offsets,
            correct.astype(bool, copy=False),
            self.pair_offsets,
        )
        return Ragged(student, self.student_chunk_id.offsets), Ragged(teacher, self.teacher_chunk_id.offsets)


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


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [D + 1] bounds of rows with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather_flat(columns: Sequence[pa.ChunkedArray], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    """Rows of a column without lists; `rows` counts through `columns`, which are joined in order."""
    return np.concatenate([column.to_numpy() for column in columns])[rows]


def gather_ragged(columns: Sequence[pa.ChunkedArray], rows: npt.NDArray[np.int64]) -> Ragged:
    """Rows of a list column, in the order of `rows`, which counts through `columns`, joined in order.

    Each list is handed to Arrow as one binary value of its bytes: its `take` then copies rows with memcpy, several times faster
    than a take of lists, which looks up every element. Raises pa.ArrowInvalid when a list holds nulls.
    """
    chunks = [chunk for column in columns for chunk in column.chunks]
    views = [_as_values(chunk.values) for chunk in chunks]
    width = views[0].itemsize
    blobs = [_as_blobs(values, chunk.offsets.to_numpy()) for values, chunk in zip(views, chunks, strict=True)]
    taken = pa.chunked_array(blobs).take(pa.array(rows))
    blob = taken.chunk(0) if taken.num_chunks == 1 else pa.concat_arrays(taken.chunks)
    bounds = np.frombuffer(blob.buffers()[1], dtype=np.int64)[blob.offset : blob.offset + len(rows) + 1]
    data = blob.buffers()[2]
    values = np.frombuffer(data if data is not None else b"", dtype=views[0].dtype, count=int(bounds[-1]) // width)
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
