"""Is a chunk of the offset route correct? Spans say where its tokens lie, never what they say: their bytes are compared.

Shape legend: M = tokens of one side in the documents of the offset route, C = chunks of the whole alignment, R = those that are content of
these documents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xtok.align.cuts import BoolArray, IntArray
from xtok.align.flat import FlatAlignment
from xtok.align.offset_route import OffsetPlaces
from xtok.align.same_text import has_same_text
from xtok.align.side import Side, text_bytes

__all__ = ["correct_chunks"]


def correct_chunks(
    alignment: FlatAlignment, documents: IntArray, student: tuple[Side, OffsetPlaces], teacher: tuple[Side, OffsetPlaces]
) -> BoolArray:
    """bool [C]: `alignment.pair_is_correct` with the chunks of the offset-route documents judged by what their ids say."""
    correct = alignment.pair_is_correct.copy()
    left = _ChunkBytes(alignment, alignment.student_chunk_id, *student)
    right = _ChunkBytes(alignment, alignment.teacher_chunk_id, *teacher)
    assert np.array_equal(left.chunk, right.chunk), "a chunk has tokens on both sides"
    for at in np.flatnonzero(~_equal_runs(left.data, left.bounds, right.data, right.bounds)).tolist():
        correct[left.chunk[at]] = has_same_text(
            left.text(at),
            right.text(at),
            student_may_lack_blanks=bool(left.may_lack_blanks[at]),
            teacher_may_lack_blanks=bool(right.may_lack_blanks[at]),
        )
    return correct


def _equal_runs(
    left: npt.NDArray[np.uint8], left_bounds: IntArray, right: npt.NDArray[np.uint8], right_bounds: IntArray
) -> BoolArray:
    """bool [R]: run r holds the same bytes on both sides. *_bounds: int64 [R + 1], R runs, which tile each side's bytes."""
    lengths, other_lengths = np.diff(left_bounds), np.diff(right_bounds)
    equal: BoolArray = lengths == other_lengths
    one, other = left[np.repeat(equal, lengths)], right[np.repeat(equal, other_lengths)]
    ends = np.cumsum(lengths[equal])
    equal[np.flatnonzero(equal)[np.searchsorted(ends, np.flatnonzero(one != other), side="right")]] = False
    return equal


class _ChunkBytes:
    """Bytes of the content chunks of one side's offset-route documents, in order.

    chunk: int64 [R], which chunks. data: uint8, their bytes. bounds: int64 [R + 1]. may_lack_blanks: bool [R].
    """

    def __init__(self, alignment: FlatAlignment, chunk_id: npt.NDArray[np.int32], side: Side, places: OffsetPlaces) -> None:
        document = np.repeat(places.documents, places.counts)
        kept = np.flatnonzero(places.active & (chunk_id[places.index] >= 0))
        index = places.index[kept]
        chunk = chunk_id[index] + alignment.pair_offsets[document[kept]]
        first = np.flatnonzero(np.append(True, chunk[1:] != chunk[:-1])) if len(chunk) else np.empty(0, dtype=np.int64)
        self.chunk = chunk[first]
        self.data, cuts = text_bytes(side, side.tokens.ids[index])
        self.bounds: IntArray = cuts[np.append(first, len(index))]
        lacks_blanks = np.logical_or.reduceat(places.lacks_blanks[kept], first) if len(first) else np.empty(0, dtype=bool)
        # A dummy prefix stands at the beginning of the content: there either side may lack the blank.
        self.may_lack_blanks: BoolArray = lacks_blanks | np.isin(index[first], places.first_active)

    def text(self, at: int) -> bytes:
        """Bytes of the chunk `self.chunk[at]`."""
        return self.data[self.bounds[at] : self.bounds[at + 1]].tobytes()
