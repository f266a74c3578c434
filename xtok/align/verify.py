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

import numpy as np

from xtok.align.byte_readings import document_ranges, equal_prefixes, take_bytes
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.side import Side, SpecialReading

__all__ = ["Verification", "prefix_guess", "verify"]

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
        chosen = without[0][documents] ^ flips[0], without[1][documents] ^ flips[1]
        likely = _heads_agree(student, teacher, chosen, reading, documents)
        if not likely.any():
            continue
        documents, chosen = documents[likely], (chosen[0][likely], chosen[1][likely])
        (left, left_index), (right, right_index) = student.select(documents), teacher.select(documents)
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


_HEAD = 8  # tokens


def _heads_agree(
    student: Side, teacher: Side, without_prefix: tuple[BoolArray, BoolArray], reading: Reading, documents: IntArray
) -> BoolArray:
    """bool [len(documents)]: the first bytes are equal. Most readings that do not fit show it there, for little.

    without_prefix: bool [len(documents)] a side.
    """
    heads = []
    for side, chosen, special_reading in zip((student, teacher), without_prefix, reading, strict=True):
        without = np.zeros(len(side.first_content), dtype=bool)
        without[documents] = chosen
        index, bounds = document_ranges(side.tokens.offsets, documents, at_most=_HEAD)
        data, cuts = take_bytes(side.readings, side.columns(without, special_reading)[index])
        heads.append((data, cuts[bounds]))
    return equal_prefixes(*heads[0], *heads[1])


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
    # A lone blank that may be a dummy prefix leaves nothing to compare: it may be a cut-off text, or a blank that was rewritten.
    kept = student.may_have_prefix & ~without_prefix[0], teacher.may_have_prefix & ~without_prefix[1]
    has_text = (student_lengths > kept[0]) & (teacher_lengths > kept[1])
    equal &= has_text | (student_lengths == teacher_lengths) | ~(student.has_content & teacher.has_content)
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
