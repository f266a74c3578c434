"""The torch view of an alignment: padded tensors, and pairs a person can read.

Shape legend: B = rows, Ts, Tt = padded student and teacher lengths, P = most chunks in a row (at least 1).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from xtok.align.cuts import IntArray
from xtok.align.flat import FlatAlignment, exact_partition_masks

__all__ = ["AlignmentBatch", "AlignmentPair"]


class AlignmentPair(NamedTuple):
    """One chunk of one row: which tokens of each side hold the same stretch of text.

    chunk: number in the row. student, teacher: half-open token spans (start, end). is_correct: both sides hold the same text.
    """

    chunk: int
    student: tuple[int, int]
    teacher: tuple[int, int]
    is_correct: bool


@dataclass(frozen=True)
class AlignmentBatch:
    """Alignment of B rows.

    pair_valid, pair_is_correct: bool [B, P], chunk p of the row exists; holds the same text on both sides.
    student_exact_partition_mask bool [B, Ts], teacher_exact_partition_mask bool [B, Tt]: tokens on a correct one-to-one pair.
    student_chunk_id int64 [B, Ts], teacher_chunk_id int64 [B, Tt]: chunk of each token, -1 for none and for padding.
    num_chunks: int64 [B].
    """

    pair_valid: torch.Tensor
    pair_is_correct: torch.Tensor
    student_exact_partition_mask: torch.Tensor
    teacher_exact_partition_mask: torch.Tensor
    student_chunk_id: torch.Tensor
    teacher_chunk_id: torch.Tensor
    num_chunks: torch.Tensor

    @staticmethod
    def from_flat(
        alignment: FlatAlignment,
        student_offsets: IntArray,
        teacher_offsets: IntArray,
        student_length: int,
        teacher_length: int,
        *,
        student_places: IntArray | None = None,
        teacher_places: IntArray | None = None,
    ) -> AlignmentBatch:
        """Padded tensors of a flat alignment whose documents are the rows.

        student_offsets, teacher_offsets: int64 [B + 1], the tokens of each row. student_length, teacher_length: Ts and Tt. Rows
        are padded on the right, unless student_places / teacher_places (int64 [N], row * length + position) say where each
        token stands.
        ValueError for a row longer than the length.
        """
        student = _places(student_offsets, student_length, "student") if student_places is None else student_places
        teacher = _places(teacher_offsets, teacher_length, "teacher") if teacher_places is None else teacher_places
        num_rows = len(alignment.num_chunks)
        most = max(1, int(alignment.num_chunks.max(initial=0)))
        pairs = _places(alignment.pair_offsets, most, "pairs")
        student_exact, teacher_exact = exact_partition_masks(alignment, student_offsets, teacher_offsets)
        return AlignmentBatch(
            pair_valid=_padded(np.ones(len(pairs), dtype=bool), pairs, (num_rows, most), False),
            pair_is_correct=_padded(alignment.pair_is_correct, pairs, (num_rows, most), False),
            student_exact_partition_mask=_padded(student_exact, student, (num_rows, student_length), False),
            teacher_exact_partition_mask=_padded(teacher_exact, teacher, (num_rows, teacher_length), False),
            student_chunk_id=_padded(alignment.student_chunk_id, student, (num_rows, student_length), -1),
            teacher_chunk_id=_padded(alignment.teacher_chunk_id, teacher, (num_rows, teacher_length), -1),
            num_chunks=torch.from_numpy(alignment.num_chunks.copy()),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> AlignmentBatch:
        """The same batch on `device`."""
        return AlignmentBatch(**{name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.as_dict().items()})

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Field name -> tensor, in the order of the class."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def pairs(self, row: int) -> list[AlignmentPair]:
        """The row's chunks in order. IndexError for a row that is not there."""
        student, teacher = (ids[row].cpu().numpy() for ids in (self.student_chunk_id, self.teacher_chunk_id))
        correct = self.pair_is_correct[row].tolist()
        result = []
        for chunk in range(int(self.num_chunks[row])):
            spans = [np.flatnonzero(ids == chunk) for ids in (student, teacher)]
            left, right = ((int(span[0]), int(span[-1]) + 1) for span in spans)
            result.append(AlignmentPair(chunk, left, right, correct[chunk]))
        return result


def _places(offsets: IntArray, length: int, name: str) -> IntArray:
    """int64 [N]: place of each entry in a right-padded [B, length] table."""
    counts = np.diff(offsets)
    longest = int(counts.max(initial=0))
    if longest > length:
        raise ValueError(f"{name} row {int(counts.argmax())} has {longest} tokens, more than the length {length} to pad to")
    return np.arange(int(offsets[-1])) + np.repeat(np.arange(len(counts)) * length - offsets[:-1], counts)


def _padded(values: npt.NDArray[np.generic], places: IntArray, shape: tuple[int, int], fill: int | bool) -> torch.Tensor:
    dtype: type[np.generic] = np.bool_ if isinstance(fill, bool) else np.int64
    table = np.full(shape[0] * shape[1], fill, dtype=dtype)
    table[places] = values
    return torch.from_numpy(table.reshape(shape))
