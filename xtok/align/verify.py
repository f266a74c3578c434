"""Byte verification: do both sides' ids stand for the same bytes, after each tokenizer's declared edits?

Ids alone do not always tell which reading of an id holds: a dummy prefix blank may or may not have been added (a window from
the middle of a document has none), a special token may be added, quoted or a separator. The likeliest reading is taken for all
documents at once; only documents whose bytes then differ try the others, and only equal bytes count.

Shape legend: D = documents, N = tokens of one side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from xtok.align.byte_readings import check_ids, document_ranges, equal_prefixes, readings_of, take_bytes
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.specials import UNK, Specials, find_specials
from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.flat import FlatTokens

__all__ = ["Side", "Verification", "prefix_guess", "verify"]

# How special tokens are read. marks: BOS and EOS amid the text are marks of their role, all else is empty. amid: those amid the
# text are their literal text. undeclared: so are those at the ends beyond what the tokenizer adds by itself. all; none.
SpecialReading = Literal["marks", "amid", "undeclared", "all", "none"]
Reading = tuple[SpecialReading, SpecialReading]  # student, teacher
Flips = tuple[bool, bool]  # take the other view of the dummy prefix than the guess: student, teacher
READINGS: tuple[Reading, ...] = (
    ("marks", "marks"),
    ("amid", "amid"),
    ("undeclared", "undeclared"),
    ("all", "undeclared"),
    ("undeclared", "all"),
    ("all", "all"),
    ("none", "none"),
)


class Side:
    """One side's documents, ready to be read. TokenizerError for ids that the tokenizer does not have."""

    def __init__(self, adapter: TokenizerAdapter, tokens: FlatTokens) -> None:
        check_ids(adapter, tokens)
        self.adapter, self.tokens, self.readings = adapter, tokens, readings_of(adapter)
        # As indices once: every look-up by 32-bit ids would widen them again.
        self.wide_ids: IntArray = tokens.ids.astype(np.int64)
        self.lengths: npt.NDArray[np.int32] = np.take(self.readings.lengths, self.wide_ids, mode="clip")  # checked above
        self.empty: IntArray = np.flatnonzero(self.lengths == 0)
        is_special = self.readings.is_special[tokens.ids[self.empty]]  # special tokens have no bytes in the plain reading
        self.specials: Specials = find_specials(self.empty[is_special], tokens.offsets)
        self.first_content = tokens.offsets[:-1] + self.specials.num_leading
        self.has_content = self.first_content < tokens.offsets[1:]
        ids = tokens.ids if len(tokens.ids) else np.zeros(1, dtype=np.int32)
        self.first_id = ids[np.where(self.has_content, self.first_content, 0)]
        self.begins_blank = self.has_content & self.readings.begins_blank[self.first_id]
        self.may_have_prefix = self.begins_blank & (adapter.prefix_space != "never")

    def select(self, documents: IntArray) -> tuple[Side, IntArray]:
        """The side with only those documents, and the indices of their tokens in this one."""
        index, offsets = document_ranges(self.tokens.offsets, documents)
        return Side(self.adapter, FlatTokens(self.tokens.ids[index], offsets)), index

    def remainder_begins_blank(self, *, if_empty: bool = False) -> BoolArray:
        """bool [D]: what follows the first content byte begins with a blank; `if_empty` where nothing follows."""
        ids = self.tokens.ids
        alone = self.readings.is_lone_blank[self.first_id]
        following = self.first_content + 1
        exists = following < self.tokens.offsets[1:] - self.specials.num_trailing
        next_id = ids[np.where(exists, following, 0)] if len(ids) else self.first_id
        following_blank = np.where(exists, self.readings.begins_blank[next_id], if_empty)
        return np.where(alone, following_blank, self.readings.second_blank[self.first_id])

    def without_prefix(self, documents: BoolArray) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """(reading int64 [N], bytes int32 [N]) of each token, the first content token of `documents` (bool [D]) without its blank."""
        strip = self.first_content[documents]
        if not len(strip):
            return self.wide_ids, self.lengths
        columns, lengths = self.wide_ids.copy(), self.lengths.copy()
        columns[strip] = self.readings.unprefixed[columns[strip]]
        lengths[strip] = self.readings.lengths[columns[strip]]
        return columns, lengths

    def columns(self, without_prefix: BoolArray, reading: SpecialReading) -> npt.NDArray[np.int32]:
        """int32 [N]: entry of `readings.values` for each token. without_prefix: bool [D], leave out the dummy prefix blank."""
        literal, marks = self._literal(reading), self._amid() if reading == "marks" else None
        strip = self.first_content[without_prefix]
        if not len(strip) and not literal.any() and (marks is None or not marks.any()):
            return self.tokens.ids
        columns = self.tokens.ids.copy()
        columns[strip] = self.readings.unprefixed[columns[strip]]
        for chosen, other in ((literal, self.readings.literal), (marks, self.readings.role_mark)):
            if chosen is not None:
                index = self.specials.index[chosen]
                columns[index] = other[columns[index]]
        return columns

    def num_literal(self, reading: SpecialReading) -> IntArray:
        """int64 [D]: special tokens that stand for their text in this reading."""
        return np.bincount(self.specials.document[self._literal(reading)], minlength=len(self.first_content))

    def has_unknown(self, reading: SpecialReading) -> BoolArray:
        """bool [D]: some UNK token stands for text that its id does not tell."""
        role_code = self.adapter.table.role_code[self.tokens.ids[self.specials.index]]
        unknown = (role_code == UNK) & ~self._literal(reading)
        return np.bincount(self.specials.document[unknown], minlength=len(self.first_content)) > 0

    def _amid(self) -> BoolArray:
        return ~(self.specials.leads | self.specials.trails)

    def _literal(self, reading: SpecialReading) -> BoolArray:
        if reading == "all":
            return np.ones(len(self.specials.index), dtype=bool)
        if reading == "amid":
            return self._amid()
        if reading == "undeclared":
            return ~self._declared()
        return np.zeros(len(self.specials.index), dtype=bool)

    def _declared(self) -> BoolArray:
        """bool [S]: the tokens that the tokenizer itself puts around a text, where they stand at the ends."""
        index, ids, document = self.specials.index, self.tokens.ids[self.specials.index], self.specials.document
        from_start = index - self.tokens.offsets[document]
        from_end = self.tokens.offsets[document + 1] - 1 - index
        declared = np.zeros(len(index), dtype=bool)
        for at, token_id in enumerate(self.adapter.prefix_ids):
            declared |= (from_start == at) & (ids == token_id)
        for at, token_id in enumerate(self.adapter.suffix_ids[::-1]):
            declared |= (from_end == at) & (ids == token_id)
        return declared


@dataclass(frozen=True, slots=True)
class Verification:
    """is_verified: bool [D]. student_cuts int64 [Ns + 1], teacher_cuts int64 [Nt + 1]: running count of content bytes at token borders.

    A special token outside the lattice has no bytes there.
    """

    is_verified: BoolArray
    student_cuts: IntArray
    teacher_cuts: IntArray


def verify(student: Side, teacher: Side) -> Verification:
    """Which documents hold the same bytes on both sides, up to the end of the shorter, and where their tokens are cut.

    Where one tokenizer drops or rewrites text as a rule (its route is "offset"), both sides must end together. A reading in which
    both sides end together settles a document; of others the one that covers most bytes is kept.
    """
    without = prefix_guess(student, teacher), prefix_guess(teacher, student)
    first = _compare(student, teacher, without, READINGS[0])
    covered, is_whole = first.covered.copy(), first.is_whole.copy()
    if is_whole.all():
        return Verification(covered >= 0, first.student_cuts, first.teacher_cuts)
    student_changes: list[tuple[IntArray, IntArray]] = []
    teacher_changes: list[tuple[IntArray, IntArray]] = []
    fits = covered >= 0
    for flips, reading in _other_readings():
        if flips == (False, False):
            fits = np.zeros(len(covered), dtype=bool)
        documents = np.flatnonzero(~is_whole & ~fits & _applies(student, teacher, flips, reading, covered))
        if not len(documents):
            continue
        (left, left_index), (right, right_index) = student.select(documents), teacher.select(documents)
        chosen = without[0][documents] ^ flips[0], without[1][documents] ^ flips[1]
        found = _compare(left, right, chosen, reading)
        fits[documents] = found.covered >= 0
        better = found.is_whole | (found.covered > covered[documents])
        if better.any():
            covered[documents[better]] = found.covered[better]
            is_whole[documents[better]] = found.is_whole[better]
            student_changes.append(_lengths_of(left, left_index, found.student_cuts, better))
            teacher_changes.append(_lengths_of(right, right_index, found.teacher_cuts, better))
    return Verification(
        covered >= 0, _patched(first.student_cuts, student_changes), _patched(first.teacher_cuts, teacher_changes)
    )


def prefix_guess(side: Side, other: Side) -> BoolArray:
    """bool [D]: the first blank is a dummy prefix, judged by what the other side begins with."""
    kind, other_kind = side.adapter.prefix_space, other.adapter.prefix_space
    if kind == "always" and other_kind != "never":
        return side.may_have_prefix
    if kind == other_kind or not side.may_have_prefix.any():
        # Two tokenizers that both add a blank only where there is none: equal blanks cancel out.
        return np.zeros(len(side.first_content), dtype=bool)
    text_begins_blank = other.begins_blank if other_kind == "never" else other.remainder_begins_blank()
    if kind == "always":
        # A blank with nothing after it is the dummy prefix of a truncated text.
        return side.may_have_prefix & (side.remainder_begins_blank(if_empty=True) | ~text_begins_blank)
    return side.may_have_prefix & ~text_begins_blank


def _other_readings() -> Iterator[tuple[Flips, Reading]]:
    for reading in READINGS:
        for flips in product((False, True), repeat=2):
            if reading != READINGS[0] or any(flips):
                yield (flips[0], flips[1]), reading


def _applies(student: Side, teacher: Side, flips: Flips, reading: Reading, covered: IntArray) -> BoolArray:
    """bool [D]: documents for which this reading says anything new. covered: int64 [D], bytes that some reading made equal, or -1."""
    applies = np.ones(len(covered), dtype=bool)
    for side, flip in zip((student, teacher), flips, strict=True):
        if flip:
            applies &= side.may_have_prefix
    if reading[0] == "none":
        return applies & (covered < 0) & (student.num_literal("amid") + teacher.num_literal("amid") > 0)
    if "all" in reading:  # what the tokenizer adds by itself is quoted text only where nothing else fits
        applies &= covered <= 0
    if reading[0] != "marks":
        applies &= student.num_literal(reading[0]) + teacher.num_literal(reading[1]) > 0
    return applies


@dataclass(frozen=True, slots=True)
class _Comparison:
    """covered: int64 [D], equal bytes up to the end of the shorter side, -1 where they differ. is_whole: bool [D], both end there."""

    covered: IntArray
    is_whole: BoolArray
    student_cuts: IntArray
    teacher_cuts: IntArray


def _compare(student: Side, teacher: Side, without_prefix: tuple[BoolArray, BoolArray], reading: Reading) -> _Comparison:
    student_bytes, student_cuts = take_bytes(student.readings, student.columns(without_prefix[0], reading[0]))
    teacher_bytes, teacher_cuts = take_bytes(teacher.readings, teacher.columns(without_prefix[1], reading[1]))
    student_bounds, teacher_bounds = student_cuts[student.tokens.offsets], teacher_cuts[teacher.tokens.offsets]
    equal = equal_prefixes(student_bytes, student_bounds, teacher_bytes, teacher_bounds)
    equal &= ~(student.has_unknown(reading[0]) | teacher.has_unknown(reading[1]))
    student_lengths, teacher_lengths = np.diff(student_bounds), np.diff(teacher_bounds)
    if "offset" in (student.adapter.route, teacher.adapter.route):
        equal &= student_lengths == teacher_lengths  # what is missing may have been dropped rather than cut off
    shorter = np.minimum(student_lengths, teacher_lengths)
    # A lone dummy prefix leaves nothing to compare: it may be a cut-off text, or a blank that was rewritten.
    equal &= (shorter > 0) | (student_lengths == teacher_lengths) | ~(student.has_content & teacher.has_content)
    covered = np.where(equal, shorter, -1)
    return _Comparison(covered, equal & (student_lengths == teacher_lengths), student_cuts, teacher_cuts)


def _lengths_of(side: Side, index: IntArray, cuts: IntArray, chosen: BoolArray) -> tuple[IntArray, IntArray]:
    """Token indices (of the whole part) and byte lengths of the chosen documents' tokens."""
    is_chosen = np.repeat(chosen, side.tokens.lengths)
    return index[is_chosen], np.diff(cuts)[is_chosen]


def _patched(cuts: IntArray, changed: list[tuple[IntArray, IntArray]]) -> IntArray:
    if not changed:
        return cuts
    lengths = np.diff(cuts)
    for index, new in changed:
        lengths[index] = new
    patched = np.zeros(len(cuts), dtype=np.int64)
    np.cumsum(lengths, out=patched[1:])
    return patched
