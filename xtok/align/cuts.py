"""Cuts to chunks: the one algorithm behind text mode, chat mode and the offset route.

A side's tokens lie on a line as half-open places. A cut is a place where one of its tokens begins or ends; a chunk is a maximal
run between two neighbouring cuts that both sides share and both sides cover without a hole. Each side's cuts are marked in a
boolean array over the line, looked up at the other side's ends, and a running count of what is shared numbers the slots between
shared cuts: equal cuts give equal numbers on both sides, so nothing is sorted and nothing is joined.

Shape legend: D = documents, N = tokens of one side over all documents, I = islands (runs of touching tokens) of one side,
K = shared cuts, L = length of the line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.align.running_count import running_count

__all__ = ["BoolArray", "Chunks", "IntArray", "LineSide", "TokenPlaces", "chunks_from_cuts", "chunks_on_line"]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """One side's tokens, each with its place in its document.

    starts, ends: int64 [N], half-open places counted from the document's own start, in a unit that both sides share (content bytes, or
    characters). offsets: int64 [D + 1], which tokens a document owns. active: bool [N], False for tokens that take no part
    (context, specials, padding): they get chunk id -1 and their places are ignored; None means all are active.
    Active tokens of a document are in order and do not overlap. A zero-width one belongs to the chunk that follows it where it
    touches the next token, else to the chunk of the token it touches before. Several regions that are to be aligned alone lie
    one after the other on the same document line, at least one place apart; a token whose text differs between the sides
    (an end-of-turn token) gets a width of one in a place of its own, the same on both sides.
    """

    starts: IntArray
    ends: IntArray
    offsets: IntArray
    active: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """student_chunk_id int32 [Ns], teacher_chunk_id int32 [Nt]: -1 or the chunk, numbered from 0 in each document by place.

    num_chunks: int64 [D].
    """

    student_chunk_id: npt.NDArray[np.int32]
    teacher_chunk_id: npt.NDArray[np.int32]
    num_chunks: IntArray


@dataclass(frozen=True, slots=True)
class LineSide:
    """One side of all documents on one common line.

    ends: int64 [N]. offsets: int64 [D + 1]. zero: int64, sorted indices of zero-width tokens. silent: int64, sorted indices, a
    part of `zero`, of tokens outside the lattice, whose end is set to length + 1. An island is a run of touching tokens, kept at
    least one place away from the next; island_first int64 [I], the index of its first token, sorted; island_start, island_end
    int64 [I], its places.
    """

    ends: IntArray
    offsets: IntArray
    zero: IntArray
    silent: IntArray
    island_first: IntArray
    island_start: IntArray
    island_end: IntArray


def chunks_from_cuts(student: TokenPlaces, teacher: TokenPlaces) -> Chunks:
    """Chunks of documents whose tokens carry places; see `TokenPlaces` for regions, border tokens and pairs by decree.

    Both sides hold the same number of documents (ValueError otherwise). The caller vouches that what both sides cover is the same text.
    """
    if len(student.offsets) != len(teacher.offsets):
        raise ValueError(
            f"student holds {len(student.offsets) - 1} documents, teacher {len(teacher.offsets) - 1}: align the same documents"
        )
    sides = [_Active.of(places) for places in (student, teacher)]
    extents = np.maximum(sides[0].extents(), sides[1].extents()) + 1
    bases = np.zeros(len(student.offsets), dtype=np.int64)
    np.cumsum(extents, out=bases[1:])
    chunks = chunks_on_line(sides[0].on_line(bases), sides[1].on_line(bases), int(bases[-1]))
    return Chunks(
        sides[0].spread(chunks.student_chunk_id, len(student.starts)),
        sides[1].spread(chunks.teacher_chunk_id, len(teacher.starts)),
        chunks.num_chunks,
    )


def chunks_on_line(student: LineSide, teacher: LineSide, length: int) -> Chunks:
    """Chunks of sides already laid on one line of `length` places (ends lie in [0, length])."""
    student_marks, teacher_marks = _marks(student, length), _marks(teacher, length)
    student_slot, student_start, student_end = _slots(student, teacher_marks)
    teacher_slot, teacher_start, teacher_end = _slots(teacher, student_marks)
    num_shared = int(student_slot[-1])
    assert num_shared == int(teacher_slot[-1]), "both sides must count the same shared cuts"
    holes = [np.array([num_shared])]  # what follows the last shared cut
    for side, slot, start_shared, end_shared in (
        (student, student_slot, student_start, student_end),
        (teacher, teacher_slot, teacher_start, teacher_end),
    ):
        # Before an island lies a hole; where its start is not shared, the other side began earlier or later.
        holes.append(slot[side.island_first] - start_shared)
        holes.append(_last_slots(side, slot)[~end_shared])  # the other side goes on
    number, num_chunks = _number_by_document(np.unique(np.concatenate(holes)), student_slot[student.offsets])
    return Chunks(_chunk_ids(student, student_slot, number), _chunk_ids(teacher, teacher_slot, number), num_chunks)


def _marks(side: LineSide, length: int) -> BoolArray:
    """bool [length + 2]: the side's cuts. The last place is where silent tokens lie, and is no cut."""
    marks = np.zeros(length + 2, dtype=bool)
    marks[side.ends] = True
    marks[-1] = False
    marks[side.island_start] = True
    return marks


def _slots(side: LineSide, other_marks: BoolArray) -> tuple[npt.NDArray[np.int32], BoolArray, BoolArray]:
    """Number of shared cuts at or before each token's start.

    Returns slot int32 [N + 1] (the last entry counts all shared cuts) and, per island, whether its start and its end are shared.
    A side counts each of its cuts once: the end of every token with a width, and the start of every island.
    """
    events = np.zeros(len(side.ends) + 1, dtype=np.int8)
    np.take(other_marks.view(np.int8), side.ends, out=events[1:], mode="clip")
    events[side.zero + 1] = 0
    start_shared = other_marks[side.island_start]
    events[side.island_first] += start_shared
    return running_count(events), start_shared, other_marks[side.island_end]


def _last_slots(side: LineSide, slot: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """int32 [I]: slot that is open after an island's last token, given that its end is not shared."""
    after = np.append(side.island_first[1:], len(side.ends))
    # The next island's first token already counts its own shared start, so look at the token before it.
    last: npt.NDArray[np.int32] = slot[after - 1]
    return last


def _number_by_document(holes: IntArray, first_slot: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], IntArray]:
    """(number int32 [K + 1]: the chunk number of each slot within its document, or -1; chunks per document int64 [D]).

    holes: sorted slots that are no chunk; the last one is slot K, and one lies before each document's first chunk, so between two of
    them numbers run on. first_slot [D + 1]: slot of each document's first student token, or of the hole before it.
    """
    run_first = np.append(0, holes[:-1] + 1)
    chunks_before = first_slot - np.searchsorted(holes, first_slot)
    document = np.searchsorted(first_slot, run_first, side="right") - 1
    document = np.clip(document, 0, max(len(first_slot) - 2, 0))
    shift = np.arange(len(holes)) + chunks_before[document]
    number = np.arange(holes[-1] + 1, dtype=np.int32) - np.repeat(shift.astype(np.int32), holes - run_first + 1)
    number[holes] = -1
    return number, np.diff(chunks_before)


def _chunk_ids(side: LineSide, slot: npt.NDArray[np.int32], number: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    ids = np.take(number, slot[:-1])
    ids[side.silent] = -1
    if len(side.zero) > len(side.silent):
        _join_trailing_zero_width(side, ids)
    return ids


def _join_trailing_zero_width(side: LineSide, ids: npt.NDArray[np.int32]) -> None:
    """A zero-width token with nothing after it in its island belongs to the chunk before it."""
    has_width = np.ones(len(ids), dtype=bool)
    has_width[side.zero] = False
    wide = np.flatnonzero(has_width)
    lone = np.setdiff1d(side.zero, side.silent, assume_unique=True)
    island = np.searchsorted(side.island_first, lone, side="right") - 1
    island_first = side.island_first[island]
    island_after = np.append(side.island_first, len(ids))[island + 1]
    at = np.searchsorted(wide, lone)
    following, preceding = np.append(wide, len(ids))[at], np.append(wide, -1)[at - 1]
    joins = (following >= island_after) & (preceding >= island_first)
    ids[lone[joins]] = ids[preceding[joins]]


@dataclass(frozen=True, slots=True)
class _Active:
    """The active tokens of one side. index: int64 [N active] into the side's tokens, or None when all are active."""

    starts: IntArray
    ends: IntArray
    offsets: IntArray
    index: IntArray | None

    @staticmethod
    def of(places: TokenPlaces) -> _Active:
        if not len(places.starts) == len(places.ends) == places.offsets[-1]:
            raise ValueError(
                f"{len(places.starts)} starts and {len(places.ends)} ends for documents of {int(places.offsets[-1])} tokens"
            )
        if places.active is None or bool(places.active.all()):
            return _Active(places.starts, places.ends, places.offsets, None)
        index = np.flatnonzero(places.active)
        return _Active(places.starts[index], places.ends[index], np.searchsorted(index, places.offsets), index)

    def extents(self) -> IntArray:
        """int64 [D]: end of each document's last token, 0 for an empty document."""
        extents = np.zeros(len(self.offsets) - 1, dtype=np.int64)
        filled = np.diff(self.offsets) > 0
        extents[filled] = self.ends[self.offsets[1:][filled] - 1]
        return extents

    def on_line(self, bases: IntArray) -> LineSide:
        """The tokens with each document's base (int64 [D + 1]) added."""
        shift = np.repeat(bases[:-1], np.diff(self.offsets))
        starts, ends = self.starts + shift, self.ends + shift
        first = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        if len(starts):
            first = np.append(0, first)
        last = np.append(first[1:], len(starts))[: len(first)] - 1
        silent = np.empty(0, dtype=np.int64)
        return LineSide(ends, self.offsets, np.flatnonzero(starts == ends), silent, first, starts[first], ends[last])

    def spread(self, ids: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int32]:
        """Chunk ids of all tokens of the side."""
        if self.index is None:
            return ids
        spread = np.full(num_tokens, -1, dtype=np.int32)
        spread[self.index] = ids
        return spread
