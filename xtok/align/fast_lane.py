"""The short way through the byte lattice, for documents that need no second thought: equal lengths, specials at the ends only.

Lengths alone give each side's cuts; the cuts that both sides share give the chunks. Only then are bytes compared, and only where needed:
a chunk of one token on each side holds equal bytes exactly when both tokens have one code (see `token_codes`), which is looked up
with the lengths; the tokens of all other chunks are spelled out and compared as one string. Since chunks tile a document, this is the
comparison of the whole bytes. A document that fails anywhere is left to the general way, which knows every reading; what is settled
here, the general way would settle alike (a parity test says so).

Shape legend: D = documents, N = tokens of one side, K = content chunks over all documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from xtok.align.byte_readings import document_ranges, take_bytes
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.running_count import running_count, running_ends
from xtok.align.side import Plain, Side
from xtok.align.specials import RolePairs, pair_roles
from xtok.align.verify import prefix_guess

__all__ = ["FastAlignment", "align_fast"]

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FastAlignment:
    """settled: bool [D]. The rest as in FlatAlignment, of worth for settled documents only: all pairs are correct, all routes byte."""

    settled: BoolArray
    student_chunk_id: Int32Array
    teacher_chunk_id: Int32Array
    num_chunks: IntArray


def align_fast(student: Side, teacher: Side) -> FastAlignment | None:
    """Align what needs no second thought; None where the two tokenizers never allow it, or no document does."""
    if "offset" in (student.adapter.route, teacher.adapter.route):
        return None
    lines = _Line.of(student, prefix_guess(student, teacher)), _Line.of(teacher, prefix_guess(teacher, student))
    simple = lines[0].simple & lines[1].simple & (np.diff(lines[0].bounds) == np.diff(lines[1].bounds))
    if not simple.any():
        return None
    if not simple.all():
        lines = lines[0].without(~simple), lines[1].without(~simple)
    shared = _shared_starts(*lines), _shared_starts(*reversed(lines))
    starts = np.flatnonzero(shared[0]), np.flatnonzero(shared[1])
    first_chunk = np.searchsorted(starts[0], student.tokens.offsets)
    settled = simple & _same_bytes(lines, shared, starts, first_chunk)
    pairs = pair_roles((student.adapter, student.tokens, student.specials), (teacher.adapter, teacher.tokens, teacher.specials))
    return _number(lines, shared, first_chunk, pairs, settled)


@dataclass(frozen=True, slots=True)
class _Line:
    """One side's content bytes as one line over all documents.

    plain: the reading of each token. cuts: int64 [N + 1], specials have no width. bounds: int64 [D + 1], the documents' ends on the line.
    simple: bool [D]. muted: int64, sorted indices of tokens that take no part; they have no width.
    """

    side: Side
    plain: Plain
    cuts: IntArray
    bounds: IntArray
    simple: BoolArray
    muted: IntArray

    @staticmethod
    def of(side: Side, strip: BoolArray) -> _Line:
        tokens, specials = side.tokens, side.specials
        plain = side.without_prefix(strip)
        cuts = running_ends(plain.lengths)
        num_specials = np.bincount(specials.document, minlength=tokens.num_texts)
        simple = (num_specials == specials.num_leading + specials.num_trailing) & ~side.has_unknown("marks")
        empty = side.empty if plain.lengths is side.lengths else np.flatnonzero(plain.lengths == 0)
        if len(empty) != len(specials.index):  # pieces without bytes: which chunk they join is for the general way
            simple[np.searchsorted(tokens.offsets, np.setdiff1d(empty, specials.index), side="right") - 1] = False
        return _Line(side, plain, cuts, cuts[tokens.offsets], simple, np.empty(0, dtype=np.int64))

    def without(self, documents: BoolArray) -> _Line:
        """The line on which `documents` (bool [D]) have no width: they must not shift the others against the other side."""
        offsets = self.side.tokens.offsets
        muted, _ = document_ranges(offsets, np.flatnonzero(documents))
        lengths = self.plain.lengths.copy()
        lengths[muted] = 0
        cuts = running_ends(lengths)
        return replace(self, plain=replace(self.plain, lengths=lengths), cuts=cuts, bounds=cuts[offsets], muted=muted)


def _shared_starts(line: _Line, other: _Line) -> BoolArray:
    """bool [N]: the content tokens that begin a chunk."""
    marks = np.zeros(int(other.cuts[-1]) + 1, dtype=bool)
    marks[other.cuts[:-1]] = True
    shared = np.take(marks, line.cuts[:-1], mode="clip")  # "clip" spares numpy the check: no cut lies outside
    shared[line.side.specials.index] = False
    shared[line.muted] = False
    return shared


def _same_bytes(
    lines: tuple[_Line, _Line], shared: tuple[BoolArray, BoolArray], starts: tuple[IntArray, IntArray], first_chunk: IntArray
) -> BoolArray:
    """bool [D]: every chunk of the document holds the same bytes on both sides. starts: int64 [K], first token of each chunk."""
    left, right = (np.take(line.plain.codes, start, mode="clip") for line, start in zip(lines, starts, strict=True))
    # Two first tokens of equal bytes end at a cut that both sides share, so each is its whole chunk. All else is spelled out.
    longer = np.flatnonzero(left != right)
    same = np.ones(len(first_chunk) - 1, dtype=bool)
    spelled = [
        _spell(line, is_first, np.take(start, longer, mode="clip"))
        for line, is_first, start in zip(lines, shared, starts, strict=True)
    ]
    if np.array_equal(spelled[0], spelled[1]):
        return same
    # Chunks have equal lengths on both sides, so the two strings can be held against each other byte by byte.
    begins = np.append(lines[0].cuts[starts[0]], lines[0].cuts[-1])
    place = np.flatnonzero(spelled[0] != spelled[1])
    chunk = longer[np.searchsorted(np.cumsum(begins[longer + 1] - begins[longer]), place, side="right")]
    same[np.searchsorted(first_chunk, chunk, side="right") - 1] = False
    return same


def _spell(line: _Line, is_first: BoolArray, chosen: IntArray) -> npt.NDArray[np.uint8]:
    """Bytes of the tokens that are not first in a chunk, and of the chosen ones, which are; specials add none.

    is_first: bool [N]; chosen: int64, token indices.
    """
    is_spelled = ~is_first
    is_spelled[chosen] = True
    is_spelled[line.muted] = False
    data, _ = take_bytes(line.side.readings, np.take(line.plain.columns, np.flatnonzero(is_spelled), mode="clip"))
    return data


def _number(
    lines: tuple[_Line, _Line], shared: tuple[BoolArray, BoolArray], first_chunk: IntArray, pairs: RolePairs, settled: BoolArray
) -> FastAlignment:
    """Chunk ids: role pairs of the beginning, content chunks, role pairs of the end, from 0 in each document.

    One running count of the chunks' first tokens, set back at the first token of each document.
    """
    num_documents = len(settled)
    content = np.diff(first_chunk)
    leading = np.bincount(pairs.document[pairs.leads], minlength=num_documents)
    trailing = np.bincount(pairs.document[~pairs.leads], minlength=num_documents)
    pair_number = pairs.rank + np.where(pairs.leads, 0, (leading + content)[pairs.document])
    ids = []
    for line, is_first, paired in zip(lines, shared, (pairs.student, pairs.teacher), strict=True):
        offsets = line.side.tokens.offsets
        has_tokens = np.flatnonzero(offsets[1:] > offsets[:-1])
        before = leading[has_tokens] - 1
        reached = np.append(0, (before + content[has_tokens])[:-1])  # at the end of the document before
        number = running_count(is_first, offsets[has_tokens], before - reached)
        number[line.side.specials.index] = -1
        number[paired] = pair_number
        ids.append(number)
    return FastAlignment(settled, ids[0], ids[1], content + leading + trailing)
