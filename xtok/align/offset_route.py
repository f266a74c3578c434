"""Offset route: character spans, for documents that a tokenizer normalizes.

A side's tokens fall into groups: a cut lies only where every token before ends at or before it and every token after starts at or
after it, so pieces of one character, which share its span, stay together. Characters in no span (a mark that was composed away, a trimmed
blank) are holes: they go to the token before, unless the other side has blanks there, then to the token after. What is left is an
ordinary lattice over characters. Spans are never trusted for text: `correct_chunks` compares what the ids say.

Shape legend: F = documents on this route, M = tokens of one side in them, W = those with a span of some width, G = groups,
L = characters of all documents on one line, C = chunks of the whole alignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.align.byte_readings import document_ranges, take_bytes
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.flat import FlatAlignment
from xtok.align.same_text import has_same_text, loose_text
from xtok.align.verify import Side

__all__ = ["OffsetPlaces", "SpanLookup", "correct_chunks", "offset_places"]


@dataclass(frozen=True, slots=True)
class SpanLookup:
    """Character spans in the original text of all tokens of the documents asked for, in their order.

    student int32 [Ms, 2], teacher int32 [Mt, 2]: half-open; (0, 0) for added specials and for tokens without a span. A document
    in which one side has no span at all counts as having none.
    """

    student: npt.NDArray[np.integer]
    teacher: npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class OffsetPlaces:
    """Places of one side's tokens in the F documents.

    documents, counts: int64 [F], which documents and how many tokens each. index: int64 [M], token indices. starts, ends: int64 [M],
    characters in the document, holes filled. active: bool [M]. lacks_blanks: bool [M], the token's span was widened by a hole.
    begins, extents: int64 [F], place of the first and after the last content. first_active: int64 [F], token index or -1.
    """

    documents: IntArray
    counts: IntArray
    index: IntArray
    starts: IntArray
    ends: IntArray
    active: BoolArray
    lacks_blanks: BoolArray
    begins: IntArray
    extents: IntArray
    first_active: IntArray


def offset_places(student: Side, teacher: Side, documents: IntArray, spans: SpanLookup) -> tuple[OffsetPlaces, OffsetPlaces]:
    """Places of both sides' tokens in `documents` (sorted, [F])."""
    sides = _Spans(student, documents, spans.student, "student"), _Spans(teacher, documents, spans.teacher, "teacher")
    usable = sides[0].has_wide() & sides[1].has_wide()
    bases = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum(np.maximum(sides[0].last_end(), sides[1].last_end()) + 1, out=bases[1:])
    groups = [side.groups(usable, bases) for side in sides]
    kinds = [group.kinds(int(bases[-1])) for group in groups]
    for group, other_kind in zip(groups, reversed(kinds), strict=True):
        group.fill_holes(other_kind)
    _fill_ends(groups[0], groups[1], kinds)
    return groups[0].places(documents), groups[1].places(documents)


class _Spans:
    """One side's spans of the F documents."""

    def __init__(self, side: Side, documents: IntArray, spans: npt.NDArray[np.integer], name: str) -> None:
        self.side = side
        self.index, self.bounds = document_ranges(side.tokens.offsets, documents)
        if spans.shape != (len(self.index), 2):
            raise ValueError(
                f"{name} spans have shape {spans.shape} for {len(self.index)} tokens: one (start, end) a token is needed"
            )
        self.starts, self.ends = spans[:, 0].astype(np.int64), spans[:, 1].astype(np.int64)
        self.is_wide = (self.ends > self.starts) & (self.starts >= 0)
        self.document = np.repeat(np.arange(len(documents)), np.diff(self.bounds))
        self.ids = side.tokens.ids[self.index]
        self.is_special = side.readings.is_special[self.ids]

    def has_wide(self) -> BoolArray:
        """bool [F]."""
        return np.bincount(self.document[self.is_wide], minlength=len(self.bounds) - 1) > 0

    def last_end(self) -> IntArray:
        """int64 [F]: greatest end of a span, 0 for none."""
        last = np.zeros(len(self.bounds) - 1, dtype=np.int64)
        np.maximum.at(last, self.document[self.is_wide], self.ends[self.is_wide])
        return last

    def groups(self, usable: BoolArray, bases: IntArray) -> _Groups:
        """The side's groups on the line, with documents that are not usable left out."""
        in_use = usable[self.document]
        # An added special has no span; one that the text itself spells has, and is content.
        active = in_use & (self.is_wide | ~self.is_special)
        wide = np.flatnonzero(self.is_wide & in_use)
        shift = bases[self.document[wide]]
        return _Groups(self, active, wide, self.starts[wide] + shift, self.ends[wide] + shift, bases)


class _Groups:
    """Groups of one side on the line of L characters.

    wide: int64 [W], positions among the M tokens. group: int64 [W]. begin, end: int64 [G], document: int64 [G].
    """

    def __init__(
        self, spans: _Spans, active: BoolArray, wide: IntArray, starts: IntArray, ends: IntArray, bases: IntArray
    ) -> None:
        self.spans, self.active, self.wide, self.bases = spans, active, wide, bases
        ended_by = np.maximum.accumulate(ends) if len(wide) else ends
        starts_from = np.minimum.accumulate(starts[::-1])[::-1] if len(wide) else starts
        is_first = np.ones(len(wide), dtype=bool)
        is_first[1:] = ended_by[:-1] <= starts_from[1:]
        self.group = np.cumsum(is_first) - 1
        self.first = np.flatnonzero(is_first)
        self.last = np.append(self.first[1:], len(wide))[: len(self.first)] - 1
        self.begin, self.end = starts_from[self.first], ended_by[self.last]
        self.raw_width = self.end - self.begin
        self.document = spans.document[wide[self.first]]
        self.data, self.cuts = _text_bytes(spans.side, spans.ids[wide])

    def kinds(self, length: int) -> npt.NDArray[np.uint8]:
        """uint8 [L]: 1 text, 2 blank, where the ids tell the characters one by one; 0 unknown."""
        kinds = np.zeros(length, dtype=np.uint8)
        begins_char = (self.data & 0xC0) != 0x80
        num_chars = np.zeros(len(self.data) + 1, dtype=np.int64)
        np.cumsum(begins_char, out=num_chars[1:])
        before, after = num_chars[self.cuts[self.first]], num_chars[self.cuts[self.last + 1]]
        told = after - before == self.raw_width
        counts = np.where(told, after - before, 0)
        place = np.arange(int(counts.sum())) + np.repeat(self.begin - (np.cumsum(counts) - counts), counts)
        is_told = np.repeat(told, after - before)
        kinds[place] = 1 + _is_blank(self.data)[begins_char][is_told]
        return kinds

    def fill_holes(self, other_kinds: npt.NDArray[np.uint8]) -> None:
        """Give each hole between two groups to the one before, its last blanks (as the other side tells them) to the one after."""
        text_before = _last_text(other_kinds)
        inner = np.flatnonzero(self.document[1:] == self.document[:-1])
        border = np.maximum(self.end[inner], text_before[self.begin[inner + 1] - 1] + 1)
        self.end[inner] = self.begin[inner + 1] = border

    def edges(self) -> tuple[IntArray, IntArray, IntArray]:
        """(documents that have groups, first and last group of each)."""
        documents, first = np.unique(self.document, return_index=True)
        return documents, first, np.append(first[1:], len(self.document))[: len(first)] - 1

    def text(self, first: int, last: int) -> bytes:
        """Bytes of the tokens of groups first..last (inclusive)."""
        return self.data[self.cuts[self.first[first]] : self.cuts[self.last[last] + 1]].tobytes()

    def places(self, documents: IntArray) -> OffsetPlaces:
        """The places of all M tokens."""
        spans, num_tokens = self.spans, len(self.spans.index)
        starts, ends = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
        begin, end = (line - self.bases[self.document] for line in (self.begin, self.end))
        starts[self.wide] = ends[self.wide] = begin[self.group]
        # The last token of a group covers it, the others stand at its beginning.
        ends[self.wide[self.last]] = end
        lacks_blanks = np.zeros(num_tokens, dtype=bool)
        lacks_blanks[self.wide] = (end - begin > self.raw_width)[self.group]
        narrow = np.setdiff1d(np.flatnonzero(self.active), self.wide, assume_unique=True)
        if len(narrow):
            following = np.minimum(np.searchsorted(self.wide, narrow), len(self.wide) - 1)
            preceding = np.maximum(np.searchsorted(self.wide, narrow) - 1, 0)
            joins_next = (self.wide[following] > narrow) & (spans.document[self.wide[following]] == spans.document[narrow])
            at = np.where(joins_next, begin[self.group[following]], end[self.group[preceding]])
            starts[narrow] = ends[narrow] = at
        begins, extents = np.zeros(len(documents), dtype=np.int64), np.zeros(len(documents), dtype=np.int64)
        filled, first, last = self.edges()
        begins[filled], extents[filled] = begin[first], end[last]
        first_active = np.full(len(documents), -1, dtype=np.int64)
        active = np.flatnonzero(self.active)[::-1]
        first_active[spans.document[active]] = spans.index[active]  # written backwards, so that the first stays
        return OffsetPlaces(
            documents, np.diff(spans.bounds), spans.index, starts, ends, self.active, lacks_blanks, begins, extents, first_active
        )


def _fill_ends(student: _Groups, teacher: _Groups, kinds: list[npt.NDArray[np.uint8]]) -> None:
    """Holes at a document's beginning and end, where the other side goes further.

    At the end a hole looks like a truncation: it is a hole where the other side has only blanks there, or where both sides' whole texts
    agree but for what normalizers change.
    """
    _, student_first, student_last = student.edges()
    _, teacher_first, teacher_last = teacher.edges()
    begin = np.minimum(student.begin[student_first], teacher.begin[teacher_first])
    student.begin[student_first] = teacher.begin[teacher_first] = begin
    student_end, teacher_end = student.end[student_last], teacher.end[teacher_last]
    end = np.maximum(student_end, teacher_end)
    text_before = np.where(student_end < teacher_end, _last_text(kinds[1])[end - 1], _last_text(kinds[0])[end - 1])
    is_hole = text_before < np.minimum(student_end, teacher_end)
    for at in np.flatnonzero(~is_hole & (student_end != teacher_end)):
        whole = [
            loose_text(side.text(int(first[at]), int(last[at])))
            for side, first, last in ((student, student_first, student_last), (teacher, teacher_first, teacher_last))
        ]
        is_hole[at] = whole[0] == whole[1]
    student.end[student_last] = np.where(is_hole, end, student_end)
    teacher.end[teacher_last] = np.where(is_hole, end, teacher_end)


def _last_text(kinds: npt.NDArray[np.uint8]) -> IntArray:
    """int64 [L]: the last place, up to and with each, that is not known to be blank."""
    return np.maximum.accumulate(np.where(kinds != 2, np.arange(len(kinds)), -1))


def _text_bytes(side: Side, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.uint8], IntArray]:
    return take_bytes(side.readings, side.readings.text[ids])


_BLANKS = tuple(char.encode() for char in map(chr, range(0x3001)) if char.isspace())


def _is_blank(data: npt.NDArray[np.uint8]) -> BoolArray:
    """bool [bytes]: a blank character (of Unicode's White_Space) begins here."""
    padded = np.append(data, np.zeros(2, dtype=np.uint8))
    words = [padded[at : at + len(data)] for at in range(3)]
    blank = np.zeros(len(data), dtype=bool)
    for char in _BLANKS:
        here = words[0] == char[0]
        for at, byte in enumerate(char[1:], start=1):
            here &= words[at] == byte
        blank |= here
    return blank


def correct_chunks(
    alignment: FlatAlignment, documents: IntArray, student: tuple[Side, OffsetPlaces], teacher: tuple[Side, OffsetPlaces]
) -> BoolArray:
    """bool [C]: `alignment.pair_is_correct` with the chunks of the offset-route documents judged by what their ids say."""
    correct = alignment.pair_is_correct.copy()
    left = _ChunkBytes(alignment, alignment.student_chunk_id, *student)
    right = _ChunkBytes(alignment, alignment.teacher_chunk_id, *teacher)
    assert np.array_equal(left.chunk, right.chunk), "a chunk has tokens on both sides"
    for at, chunk in enumerate(left.chunk.tolist()):
        one, other = left.text(at), right.text(at)
        if one != other:
            correct[chunk] = has_same_text(
                one,
                other,
                student_may_lack_blanks=left.lacks_blanks[at] or left.at_start[at],
                teacher_may_lack_blanks=right.lacks_blanks[at] or right.at_start[at],
            )
    return correct


class _ChunkBytes:
    """Bytes of the content chunks of one side's offset-route documents, in order."""

    def __init__(self, alignment: FlatAlignment, chunk_id: npt.NDArray[np.int32], side: Side, places: OffsetPlaces) -> None:
        document = np.repeat(places.documents, places.counts)
        kept = np.flatnonzero(places.active & (chunk_id[places.index] >= 0))
        index = places.index[kept]
        chunk = chunk_id[index] + alignment.pair_offsets[document[kept]]
        first = np.flatnonzero(np.append(True, chunk[1:] != chunk[:-1])) if len(chunk) else np.empty(0, dtype=np.int64)
        self.chunk = chunk[first]
        data, cuts = _text_bytes(side, side.tokens.ids[index])
        self._data, bounds = data.tobytes(), cuts[np.append(first, len(index))].tolist()
        self._begin, self._end = bounds[:-1], bounds[1:]
        self.lacks_blanks = np.logical_or.reduceat(places.lacks_blanks[kept], first).tolist() if len(first) else []
        # A dummy prefix stands at the beginning of the content: there either side may lack the blank.
        self.at_start = np.isin(index[first], places.first_active).tolist()

    def text(self, at: int) -> bytes:
        """Bytes of the chunk `self.chunk[at]`."""
        return self._data[self._begin[at] : self._end[at]]
