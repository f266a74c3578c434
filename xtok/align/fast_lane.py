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
    chunk_starts = _shared_starts(left, right), _shared_starts(right, left)
    if len(chunk_starts[0]) != len(chunk_starts[1]):
        return None  # only zero-width pieces can do this, and their documents are not simple
    first_chunk = np.searchsorted(chunk_starts[0], student.tokens.offsets)
    strides = _strides(left, chunk_starts[0]), _strides(right, chunk_starts[1])
    sizes = (
        _sizes(left, chunk_starts[0], strides[0], first_chunk),
        _sizes(right, chunk_starts[1], strides[1], first_chunk),
    )
    settled = simple & _same_bytes((left, right), chunk_starts, sizes, first_chunk)
    pairs = pair_roles((student.adapter, student.tokens, student.specials), (teacher.adapter, teacher.tokens, teacher.specials))
    return _number((left, right), chunk_starts, strides, first_chunk, pairs, settled)


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
    the line. content_end: int64 [D], index after each document's last content token. simple: bool [D].
    """

    side: Side
    columns: IntArray
    cuts: IntArray
    bounds: IntArray
    content_end: IntArray
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
        return _Line(side, columns, cuts, cuts[tokens.offsets], tokens.offsets[1:] - specials.num_trailing, simple)


def _shared_starts(line: _Line, other: _Line) -> IntArray:
    """int64 [K]: index of the first token of each content chunk."""
    marks = np.zeros(int(other.cuts[-1]) + 1, dtype=bool)
    marks[other.cuts[:-1]] = True
    shared = marks[line.cuts[:-1]]
    shared[line.side.specials.index] = False
    return np.flatnonzero(shared)


def _strides(line: _Line, starts: IntArray) -> IntArray:
    """int64 [K]: tokens from each chunk's first to the next one's, specials between them included."""
    strides = np.empty(len(starts), dtype=np.int64)
    np.subtract(starts[1:], starts[:-1], out=strides[:-1])
    strides[-1:] = len(line.columns) - starts[-1:]
    return strides


def _sizes(line: _Line, starts: IntArray, strides: IntArray, first_chunk: IntArray) -> IntArray:
    """int64 [K]: content tokens of each chunk; trailing specials and the next document's leading ones are left out."""
    sizes = strides.copy()
    has_chunk = np.diff(first_chunk) > 0
    last = first_chunk[1:][has_chunk] - 1
    sizes[last] = line.content_end[has_chunk] - starts[last]
    return sizes


def _same_bytes(
    lines: tuple[_Line, _Line], starts: tuple[IntArray, IntArray], sizes: tuple[IntArray, IntArray], first_chunk: IntArray
) -> BoolArray:
    """bool [D]: every chunk of the document holds the same bytes on both sides."""
    classes = byte_classes(lines[0].side.adapter, lines[1].side.adapter)
    alone = (sizes[0] == 1) & (sizes[1] == 1)
    left, right = (np.take(own, np.take(line.columns, start)) for own, line, start in zip(classes, lines, starts, strict=True))
    differs = alone & (left != right)
    same = np.ones(len(first_chunk) - 1, dtype=bool)
    if differs.any():
        same[np.searchsorted(first_chunk, np.flatnonzero(differs), side="right") - 1] = False
    longer = np.flatnonzero(~alone)
    spelled = [_spell(line, start[longer], size[longer]) for line, start, size in zip(lines, starts, sizes, strict=True)]
    if np.array_equal(spelled[0], spelled[1]):
        return same
    # Chunks have equal lengths on both sides, so the two strings can be held against each other byte by byte.
    place = np.flatnonzero(spelled[0] != spelled[1])
    lengths = lines[0].cuts[starts[0][longer] + sizes[0][longer]] - lines[0].cuts[starts[0][longer]]
    chunk = longer[np.searchsorted(np.cumsum(lengths), place, side="right")]
    same[np.searchsorted(first_chunk, chunk, side="right") - 1] = False
    return same


def _spell(line: _Line, starts: IntArray, sizes: IntArray) -> npt.NDArray[np.uint8]:
    """Bytes of the tokens of some chunks, one after the other."""
    total = int(sizes.sum())
    ends = np.cumsum(sizes)
    index = np.arange(total)
    index += np.repeat(starts - ends + sizes, sizes)
    data, _ = take_bytes(line.side.readings, line.columns[index])
    return data


def _number(
    lines: tuple[_Line, _Line],
    starts: tuple[IntArray, IntArray],
    strides: tuple[IntArray, IntArray],
    first_chunk: IntArray,
    pairs: RolePairs,
    settled: BoolArray,
) -> FastAlignment:
    """Chunk ids: role pairs of the beginning, content chunks, role pairs of the end, from 0 in each document."""
    num_documents = len(settled)
    content = np.diff(first_chunk)
    leading = np.bincount(pairs.document[pairs.leads], minlength=num_documents)
    trailing = np.bincount(pairs.document[~pairs.leads], minlength=num_documents)
    number = np.arange(len(starts[0]), dtype=np.int32)
    number -= np.repeat((first_chunk[:-1] - leading).astype(np.int32), content)
    pair_number = pairs.rank + np.where(pairs.leads, 0, (leading + content)[pairs.document])
    ids = []
    for line, start, stride, paired in zip(lines, starts, strides, (pairs.student, pairs.teacher), strict=True):
        before = np.full(start[0] if len(start) else len(line.columns), -1, dtype=np.int32)
        filled = np.concatenate([before, np.repeat(number, stride)])
        filled[line.side.specials.index] = -1
        filled[paired] = pair_number
        ids.append(filled)
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
