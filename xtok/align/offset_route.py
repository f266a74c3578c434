"""Offset route: character spans, for documents that a tokenizer normalizes.

A side's tokens fall into groups: a cut lies only where every token before ends at or before it and every token after starts at or
after it, so pieces of one character, which share its span, stay together. Characters in no span (a mark that was composed away, a trimmed
blank) are holes: they go to the token before, unless the other side has blanks there, then to the token after. What is left is an
ordinary lattice over characters. Spans are never trusted for text: `chunk_texts` compares what the ids say.

Shape legend: F = documents on this route, M = tokens of one side in them, W = those with a span of some width, G = groups,
L = characters of all documents on one line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.align.byte_readings import document_ranges
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.same_text import is_loosely_equal
from xtok.align.side import Side, text_bytes

__all__ = ["OffsetPlaces", "SpanLookup", "offset_places"]


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
    kinds = [group.kinds(int(bases[-1]), *other.gaps(group)) for group, other in zip(groups, reversed(groups), strict=True)]
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

    def holes(self) -> IntArray:
        """int64: the groups that a hole in the document follows."""
        return np.flatnonzero((self.document[1:] == self.document[:-1]) & (self.end[:-1] < self.begin[1:]))

    def gaps(self, other: _Groups) -> tuple[IntArray, IntArray]:
        """(begins, ends): the holes of this side, and what the other side (of the same documents) holds beyond its last group."""
        inner = self.holes()
        last, other_last = self.edges()[2], other.edges()[2]
        begin, end = self.end[last], other.end[other_last]
        return np.append(self.end[inner], begin[begin < end]), np.append(self.begin[inner + 1], end[begin < end])

    def kinds(self, length: int, begins: IntArray, ends: IntArray) -> npt.NDArray[np.uint8]:
        """uint8 [L]: 1 text, 2 blank, where the ids tell the characters one by one; 0 unknown. Between `begins` and `ends` only."""
        kinds = np.zeros(length, dtype=np.uint8)
        first = np.searchsorted(self.end, begins, side="right")
        counts = np.maximum(np.searchsorted(self.begin, ends) - first, 0)
        chosen = np.unique(np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts))
        if not len(chosen):
            return kinds
        index, token_bounds = document_ranges(np.append(self.first, len(self.wide)), chosen)
        data, cuts = self._text(self.wide[index])
        bounds = cuts[token_bounds]
        begins_char = (data & 0xC0) != 0x80
        num_chars = np.zeros(len(data) + 1, dtype=np.int64)
        np.cumsum(begins_char, out=num_chars[1:])
        widths = np.diff(num_chars[bounds])
        told = widths == self.raw_width[chosen]
        counts = np.where(told, widths, 0)
        place = np.arange(int(counts.sum())) + np.repeat(self.begin[chosen] - (np.cumsum(counts) - counts), counts)
        kinds[place] = 1 + _is_blank(data)[begins_char][np.repeat(told, widths)]
        return kinds

    def fill_holes(self, other_kinds: npt.NDArray[np.uint8]) -> None:
        """Give each hole between two groups to the one before, its last blanks (as the other side tells them) to the one after."""
        inner = self.holes()
        if not len(inner):
            return
        text_before = _last_text(other_kinds)
        border = np.maximum(self.end[inner], text_before[self.begin[inner + 1] - 1] + 1)
        self.end[inner] = self.begin[inner + 1] = border

    def edges(self) -> tuple[IntArray, IntArray, IntArray]:
        """(documents that have groups, first and last group of each)."""
        begins = np.append(True, self.document[1:] != self.document[:-1]) if len(self.document) else np.empty(0, dtype=bool)
        first = np.flatnonzero(begins)
        return self.document[first], first, np.append(first[1:], len(self.document))[: len(first)] - 1

    def text(self, first: int, last: int) -> bytes:
        """Bytes of the tokens of groups first..last (inclusive)."""
        data, _ = self._text(self.wide[self.first[first] : self.last[last] + 1])
        return data.tobytes()

    def _text(self, positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Bytes and cuts of those of the M tokens."""
        return text_bytes(self.spans.side, self.spans.ids[positions])

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
        is_narrow = self.active.copy()
        is_narrow[self.wide] = False
        narrow = np.flatnonzero(is_narrow)
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
        is_hole[at] = is_loosely_equal(
            student.text(int(student_first[at]), int(student_last[at])),
            teacher.text(int(teacher_first[at]), int(teacher_last[at])),
        )
    student.end[student_last] = np.where(is_hole, end, student_end)
    teacher.end[teacher_last] = np.where(is_hole, end, teacher_end)


def _last_text(kinds: npt.NDArray[np.uint8]) -> IntArray:
    """int64 [L]: the last place, up to and with each, that is not known to be blank."""
    return np.maximum.accumulate(np.where(kinds != 2, np.arange(len(kinds)), -1))


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
