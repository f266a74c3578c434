"""The flat alignment of many documents, and what follows from chunk ids alone.

Shape legend: D = documents, Ns, Nt = student and teacher tokens over all documents, C = chunks over all documents,
M = cuts over all documents that all sides share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.align.cuts import BoolArray, Chunks, IntArray

__all__ = ["BYTE_ROUTE", "OFFSET_ROUTE", "FlatAlignment", "SharedCuts", "exact_partition_masks", "keep_chunks", "shared_cuts"]

BYTE_ROUTE, OFFSET_ROUTE = 0, 1


@dataclass(frozen=True, slots=True)
class FlatAlignment:
    """Alignment of D documents, their tokens one after the other.

    student_chunk_id int32 [Ns], teacher_chunk_id int32 [Nt]: chunk within the token's document, -1 for none.
    num_chunks int64 [D]. pair_is_correct bool [C]: both sides of the chunk hold the same text; document d owns
    pair_is_correct[pair_offsets[d]:pair_offsets[d + 1]]. pair_offsets int64 [D + 1]. route uint8 [D]: 0 byte, 1 offset.
    """

    student_chunk_id: npt.NDArray[np.int32]
    teacher_chunk_id: npt.NDArray[np.int32]
    num_chunks: IntArray
    pair_is_correct: BoolArray
    pair_offsets: IntArray
    route: npt.NDArray[np.uint8]

    @staticmethod
    def from_chunks(chunks: Chunks, *, route: npt.NDArray[np.uint8] | None = None) -> FlatAlignment:
        """Chunks whose texts are known to be equal; `route` uint8 [D] is the byte route unless given."""
        offsets = np.zeros(len(chunks.num_chunks) + 1, dtype=np.int64)
        np.cumsum(chunks.num_chunks, out=offsets[1:])
        return FlatAlignment(
            chunks.student_chunk_id,
            chunks.teacher_chunk_id,
            chunks.num_chunks,
            np.ones(int(offsets[-1]), dtype=bool),
            offsets,
            np.zeros(len(chunks.num_chunks), dtype=np.uint8) if route is None else route,
        )


def exact_partition_masks(
    alignment: FlatAlignment, student_offsets: IntArray, teacher_offsets: IntArray
) -> tuple[BoolArray, BoolArray]:
    """(bool [Ns], bool [Nt]): tokens on a correct one-to-one pair.

    student_offsets, teacher_offsets: int64 [D + 1], the tokens of each document.
    """
    student = _chunk_of_token(alignment.student_chunk_id, student_offsets, alignment.pair_offsets)
    teacher = _chunk_of_token(alignment.teacher_chunk_id, teacher_offsets, alignment.pair_offsets)
    num_pairs = len(alignment.pair_is_correct)
    exact = np.append(alignment.pair_is_correct, False)  # the last entry stands for "no chunk"
    for chunk in (student, teacher):
        exact &= np.bincount(chunk, minlength=num_pairs + 1) == 1
    exact[-1] = False
    return exact[student], exact[teacher]


def keep_chunks(alignment: FlatAlignment, keep: BoolArray, student_offsets: IntArray, teacher_offsets: IntArray) -> FlatAlignment:
    """The alignment with only the chunks of `keep` (bool [C]), numbered afresh in each document.

    For a subset of regions and for leaving out the first content pair.
    """
    if len(keep) != len(alignment.pair_is_correct):
        raise ValueError(f"keep has {len(keep)} entries for {len(alignment.pair_is_correct)} chunks")
    kept_before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=kept_before[1:])
    offsets = kept_before[alignment.pair_offsets]
    number = kept_before[:-1] - np.repeat(offsets[:-1], alignment.num_chunks)
    renumbered: npt.NDArray[np.int32] = np.append(np.where(keep, number, -1), -1).astype(np.int32)
    student = _chunk_of_token(alignment.student_chunk_id, student_offsets, alignment.pair_offsets)
    teacher = _chunk_of_token(alignment.teacher_chunk_id, teacher_offsets, alignment.pair_offsets)
    return FlatAlignment(
        renumbered[student], renumbered[teacher], np.diff(offsets), alignment.pair_is_correct[keep], offsets, alignment.route
    )


@dataclass(frozen=True, slots=True)
class SharedCuts:
    """Places where all sides may be cut without a byte lost or seen twice.

    student int64 [M], teachers: one int64 [M] a teacher: how many of the document's tokens lie before the cut, on that side. offsets
    int64 [D + 1]: the cuts of each document, ascending; the document's end is among them where all sides end together.
    """

    student: IntArray
    teachers: tuple[IntArray, ...]
    offsets: IntArray


def shared_cuts(
    alignments: Sequence[FlatAlignment], student_offsets: IntArray, teacher_offsets: Sequence[IntArray]
) -> SharedCuts:
    """Cuts that the student shares with every teacher, for windows of an overlong document.

    alignments: one per teacher, each over the same student tokens (content only, nothing truncated). teacher_offsets: their int64 [D + 1].
    A cut lies after the last token of a chunk of every alignment.
    """
    if not alignments or len(alignments) != len(teacher_offsets):
        raise ValueError(f"{len(alignments)} alignments and {len(teacher_offsets)} teacher_offsets: give one of each per teacher")
    num_tokens = len(alignments[0].student_chunk_id)
    num_sharing = np.zeros(num_tokens, dtype=np.int32)
    before_cut: list[IntArray] = []
    for alignment, offsets in zip(alignments, teacher_offsets, strict=True):
        student_last = _last_token_of_chunk(alignment.student_chunk_id, student_offsets, alignment.pair_offsets)
        teacher_last = _last_token_of_chunk(alignment.teacher_chunk_id, offsets, alignment.pair_offsets)
        num_sharing[student_last] += 1
        by_student_token = np.zeros(num_tokens, dtype=np.int64)
        by_student_token[student_last] = 1 + teacher_last - np.repeat(offsets[:-1], alignment.num_chunks)
        before_cut.append(by_student_token)
    cut = np.flatnonzero(num_sharing == len(alignments))
    cut_offsets = np.searchsorted(cut, student_offsets)
    student = 1 + cut - np.repeat(student_offsets[:-1], np.diff(cut_offsets))
    return SharedCuts(student, tuple(column[cut] for column in before_cut), cut_offsets)


def _chunk_of_token(chunk_id: npt.NDArray[np.int32], offsets: IntArray, pair_offsets: IntArray) -> IntArray:
    """int64 [N]: each token's chunk over all documents; C for a token in none."""
    chunk = np.repeat(pair_offsets[:-1], np.diff(offsets))
    chunk += chunk_id
    chunk[chunk_id < 0] = pair_offsets[-1]
    return chunk


def _last_token_of_chunk(chunk_id: npt.NDArray[np.int32], offsets: IntArray, pair_offsets: IntArray) -> IntArray:
    """int64 [C]: index of the last token of every chunk."""
    last = np.zeros(int(pair_offsets[-1]) + 1, dtype=np.int64)
    last[_chunk_of_token(chunk_id, offsets, pair_offsets)] = np.arange(len(chunk_id))  # of equal chunks the last write stays
    return last[:-1]
