"""Pieces in which a tokenizer changed the text (NFC, lower case): aligned by `xtok.align` as documents of their own.

A row whose token bytes do not spell the rendering has places from character spans only. Often the change lies in the context and the
piece itself still verifies by its bytes; else it takes the offset route, spans counted from the piece's start. Such rows are few.

Shape legend: P = changed pieces, M = tokens of one side in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from xtok.align.lattice import OFFSET_ROUTE, SpanLookup, align_flat
from xtok.chat.locate import LocatedPart
from xtok.chat.places import IntArray, PieceTokens
from xtok.tokenizers import FlatTokens

__all__ = ["ChangedPieces", "ChunkedTokens", "align_changed"]


@dataclass(frozen=True, slots=True)
class ChunkedTokens:
    """int64 [M] each: index of the token in its side, its piece, and its chunk within the piece, -1 for none."""

    index: IntArray
    piece: IntArray
    chunk: IntArray


@dataclass(frozen=True, slots=True)
class ChangedPieces:
    """pieces: int64 [P]. by_offset: bool [P]. correct: per piece, bool [chunks of the piece]."""

    pieces: IntArray
    student: ChunkedTokens
    teacher: ChunkedTokens
    by_offset: npt.NDArray[np.bool_]
    correct: list[npt.NDArray[np.bool_]]


def align_changed(
    pieces: IntArray, texts: list[bytes], student: tuple[LocatedPart, PieceTokens], teacher: tuple[LocatedPart, PieceTokens]
) -> ChangedPieces:
    """Align `pieces` (sorted, [P]), whose text is `texts`, each as one document."""
    ours, theirs = (_Documents(pieces, texts, *side) for side in (student, teacher))

    def spans(documents: IntArray) -> SpanLookup:
        return SpanLookup(ours.spans_of(documents), theirs.spans_of(documents))

    flat = align_flat(student[0].side.adapter, teacher[0].side.adapter, ours.tokens, theirs.tokens, spans=spans)
    bounds = flat.pair_offsets.tolist()
    return ChangedPieces(
        pieces,
        ours.chunked(flat.student_chunk_id),
        theirs.chunked(flat.teacher_chunk_id),
        flat.route == OFFSET_ROUTE,
        [flat.pair_is_correct[start:end] for start, end in pairwise(bounds)],
    )


class _Documents:
    """One side's tokens of the P pieces, as documents."""

    def __init__(self, pieces: IntArray, texts: list[bytes], part: LocatedPart, tokens: PieceTokens) -> None:
        chosen = np.isin(tokens.piece, pieces)
        self.index, self.piece = tokens.index[chosen], tokens.piece[chosen]
        self.tokens = FlatTokens(part.tokens.ids[self.index], np.searchsorted(self.piece, np.append(pieces, pieces[-1] + 1)))
        self._spans = np.zeros((len(self.index), 2), dtype=np.int32)
        low, high = tokens.starts[chosen], tokens.ends[chosen]
        for document, text in enumerate(texts):
            own = slice(int(self.tokens.offsets[document]), int(self.tokens.offsets[document + 1]))
            first_bytes = (np.frombuffer(text, dtype=np.uint8) & 0xC0) != 0x80
            num_begun = np.concatenate(([0], np.cumsum(first_bytes)))
            # A token that ends, or begins, inside a character shares that character's span.
            begins_inside = np.append(~first_bytes, False)[low[own]]
            self._spans[own, 0] = num_begun[low[own]] - begins_inside
            self._spans[own, 1] = num_begun[high[own]]

    def spans_of(self, documents: IntArray) -> npt.NDArray[np.int32]:
        """int32 [tokens of `documents`, 2], characters from the piece's start."""
        document = np.repeat(np.arange(self.tokens.num_texts), self.tokens.lengths)
        return self._spans[np.isin(document, documents)]

    def chunked(self, chunk_id: npt.NDArray[np.int32]) -> ChunkedTokens:
        """The tokens with the chunk each fell into."""
        return ChunkedTokens(self.index, self.piece, chunk_id.astype(np.int64))
