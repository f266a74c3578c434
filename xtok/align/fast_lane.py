"""The short way through the byte lattice, for documents that need no second thought: equal lengths, specials at the ends only.

Lengths alone give each side's cuts; the cuts that both sides share give the chunks. Only then are bytes compared, and only where needed:
a chunk of one token on each side holds equal bytes exactly when both ids are of one class (classes of equal byte strings over both
vocabularies, made once), which is two look-ups; the tokens of all other chunks are spelled out and compared as one string. Since
chunks tile a document, this is the comparison of the whole bytes. A document that fails anywhere is left to the general way, which
knows every reading; what is settled here, the general way would settle alike (a parity test says so).

Shape legend: D = documents, N = tokens of one side, K = content chunks over all documents, V = readings of one side's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from xtok.align.byte_readings import readings_of, take_bytes
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.specials import RolePairs, pair_roles
from xtok.align.verify import Side, prefix_guess
from xtok.tokenizers.adapter import TokenizerAdapter

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
    strips = prefix_guess(student, teacher), prefix_guess(teacher, student)
    left, right = _Line.of(student, strips[0]), _Line.of(teacher, strips[1])
    simple = left.simple & right.simple & (np.diff(left.bounds) == np.diff(right.bounds))
    if not np.array_equal(left.bounds, right.bounds):
        return _align_some(student, teacher, simple)
    shared = _shared_starts(left, right), _shared_starts(right, left)
    starts = np.flatnonzero(shared[0]), np.flatnonzero(shared[1])
    if len(starts[0]) != len(starts[1]):
        return None  # only zero-width pieces can do this, and their documents are not simple
    first_chunk = np.searchsorted(starts[0], student.tokens.offsets)
    settled = simple & _same_bytes((left, right), shared, starts, first_chunk)
    pairs = pair_roles((student.adapter, student.tokens, student.specials), (teacher.adapter, teacher.tokens, teacher.specials))
    return _number((left, right), shared, first_chunk, pairs, settled)


def _align_some(student: Side, teacher: Side, simple: BoolArray) -> FastAlignment | None:
    """The simple documents alone, where others keep the two sides from lying on one line."""
    documents = np.flatnonzero(simple)
    if 2 * len(documents) < len(simple):
        return None  # not worth a copy
    (left, left_index), (right, right_index) = student.select(documents), teacher.select(documents)
    found = align_fast(left, right)
    if found is None:
        return None
    settled = np.zeros(len(simple), dtype=bool)
    settled[documents] = found.settled
    num_chunks = np.zeros(len(simple), dtype=np.int64)
    num_chunks[documents] = found.num_chunks
    student_ids = np.full(len(student.tokens.ids), -1, dtype=np.int32)
    teacher_ids = np.full(len(teacher.tokens.ids), -1, dtype=np.int32)
    student_ids[left_index], teacher_ids[right_index] = found.student_chunk_id, found.teacher_chunk_id
    return FastAlignment(settled, student_ids, teacher_ids, num_chunks)


@dataclass(frozen=True, slots=True)
class _Line:
    """One side's content bytes as one line over all documents.

    columns: int64 [N], reading of each token. cuts: int64 [N + 1], specials have no width. bounds: int64 [D + 1], the documents' ends on
    the line. simple: bool [D].
    """

    side: Side
    columns: IntArray
    cuts: IntArray
    bounds: IntArray
    simple: BoolArray

    @staticmethod
    def of(side: Side, strip: BoolArray) -> _Line:
        tokens, specials = side.tokens, side.specials
        columns, lengths = side.without_prefix(strip)
        cuts = np.zeros(len(columns) + 1, dtype=np.int64)
        np.cumsum(lengths, out=cuts[1:])
        num_specials = np.bincount(specials.document, minlength=tokens.num_texts)
        simple = (num_specials == specials.num_leading + specials.num_trailing) & ~side.has_unknown("marks")
        empty = side.empty if lengths is side.lengths else np.flatnonzero(lengths == 0)
        if len(empty) != len(specials.index):  # pieces without bytes: which chunk they join is for the general way
            simple[np.searchsorted(tokens.offsets, np.setdiff1d(empty, specials.index), side="right") - 1] = False
        return _Line(side, columns, cuts, cuts[tokens.offsets], simple)


def _shared_starts(line: _Line, other: _Line) -> BoolArray:
    """bool [N]: the content tokens that begin a chunk."""
    marks = np.zeros(int(other.cuts[-1]) + 1, dtype=bool)
    marks[other.cuts[:-1]] = True
    shared = np.take(marks, line.cuts[:-1], mode="clip")  # "clip" spares numpy the check: no cut lies outside
    shared[line.side.specials.index] = False
    return shared


def _same_bytes(
    lines: tuple[_Line, _Line], shared: tuple[BoolArray, BoolArray], starts: tuple[IntArray, IntArray], first_chunk: IntArray
) -> BoolArray:
    """bool [D]: every chunk of the document holds the same bytes on both sides. starts: int64 [K], first token of each chunk."""
    classes = byte_classes(lines[0].side.adapter, lines[1].side.adapter)
    left, right = (
        np.take(own, np.take(line.columns, start, mode="clip"), mode="clip")
        for own, line, start in zip(classes, lines, starts, strict=True)
    )
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
    data, _ = take_bytes(line.side.readings, np.take(line.columns, np.flatnonzero(is_spelled), mode="clip"))
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
        number = is_first.astype(np.int32)
        number[offsets[has_tokens]] += (before - reached).astype(np.int32)
        np.cumsum(number, out=number)
        number[line.side.specials.index] = -1
        number[paired] = pair_number
        ids.append(number)
    return FastAlignment(settled, ids[0], ids[1], content + leading + trailing)


_CLASSES: WeakKeyDictionary[TokenizerAdapter, WeakKeyDictionary[TokenizerAdapter, tuple[Int32Array, Int32Array]]] = (
    WeakKeyDictionary()
)


def byte_classes(student: TokenizerAdapter, teacher: TokenizerAdapter) -> tuple[Int32Array, Int32Array]:
    """(int32 [V student], int32 [V teacher]): equal numbers exactly for readings of equal bytes; made once for each pair."""
    known = _CLASSES.setdefault(student, WeakKeyDictionary())
    found = known.get(teacher)
    if found is None:
        left, right = readings_of(student).values, readings_of(teacher).values
        encoded = pc.dictionary_encode(pa.concat_arrays([left, right])).indices.to_numpy().astype(np.int32)
        found = known[teacher] = encoded[: len(left)], encoded[len(left) :]
    return found
