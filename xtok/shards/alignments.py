"""The alignment columns of one teacher: a whole block aligned at once, or the windows of a split document sliced from it.

Shape legend: R = rows, D = documents, Ns, Nt = tokens of all rows together, C = chunks of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from schemas.manifest import SideCounts
from xtok.align.flat import FlatAlignment, exact_partition_masks
from xtok.align.lattice import SpanLookup, align_flat
from xtok.shards.columns import row_sums, select_rows
from xtok.shards.sides import BackendDiffers, LoadedSide
from xtok.shards.timing import stage
from xtok.tokenizers import FlatTokens

__all__ = ["AlignedSide", "align_rows", "aligned_counts", "covered_tokens", "slice_alignment"]

Value = TypeVar("Value", bound=np.generic)
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AlignedSide:
    """A teacher's rows and their alignment. covered, supervised: int64 [R], student tokens in a chunk, and all that count."""

    tokens: FlatTokens
    alignment: FlatAlignment
    covered: IntArray
    supervised: IntArray

    @property
    def coverage(self) -> npt.NDArray[np.float32]:
        """float32 [R]: covered over supervised, 1.0 where nothing is supervised."""
        return np.where(self.supervised > 0, self.covered / np.maximum(self.supervised, 1), 1.0).astype(np.float32)


def align_rows(
    student: LoadedSide,
    teacher: LoadedSide,
    student_tokens: FlatTokens,
    teacher_tokens: FlatTokens,
    texts: Sequence[str],
    text_rows: IntArray,
    *,
    with_specials: bool,
) -> FlatAlignment:
    """Alignment of R rows.

    texts, text_rows: int64 [R], row r is of texts[text_rows[r]], whose characters count where the bytes do not verify.
    with_specials: the ids hold each side's added specials. Raises BackendDiffers when the reference gives other ids for such a
    row than those at hand.
    """

    def spans(rows: IntArray) -> SpanLookup:
        sides = ((student, student_tokens), (teacher, teacher_tokens))
        return SpanLookup(*(_spans_of(side, tokens, rows, texts, text_rows, with_specials) for side, tokens in sides))

    with stage("align"):
        return align_flat(student.adapter, teacher.adapter, student_tokens, teacher_tokens, spans=spans)


def _spans_of(
    side: LoadedSide, tokens: FlatTokens, rows: IntArray, texts: Sequence[str], text_rows: IntArray, with_specials: bool
) -> npt.NDArray[np.int32]:
    """int32 [M, 2], character spans of all tokens of `rows`, one after the other; (0, 0) for added specials."""
    num_prefix, num_suffix = (len(side.prefix), len(side.suffix)) if with_specials else (0, 0)
    before, after = np.zeros((num_prefix, 2), dtype=np.int32), np.zeros((num_suffix, 2), dtype=np.int32)
    found: list[npt.NDArray[np.int32]] = []
    for row in rows.tolist():
        content = tokens.row(row)[num_prefix : int(tokens.lengths[row]) - num_suffix]
        spans = side.spans.spans(int(text_rows[row]), texts[text_rows[row]], content)
        if spans is None:
            raise BackendDiffers(side.index, f"{side.name}: the fast backend gave other ids for a text aligned by offsets")
        found.extend((before, spans, after))
    return np.concatenate(found)


def aligned_counts(side: AlignedSide, student_tokens: FlatTokens) -> SideCounts:
    """What the manifest says about these rows of a teacher."""
    exact, _ = exact_partition_masks(side.alignment, student_tokens.offsets, side.tokens.offsets)
    return SideCounts(
        num_tokens=len(side.tokens.ids),
        num_unverified_rows=int((side.alignment.route != 0).sum()),
        num_supervised=int(side.supervised.sum()),
        num_covered=int(side.covered.sum()),
        num_chunks=len(side.alignment.pair_is_correct),
        num_correct_chunks=int(side.alignment.pair_is_correct.sum()),
        num_one_to_one=int(exact.sum()),
    )


def covered_tokens(
    alignment: FlatAlignment, student_tokens: FlatTokens, is_special: npt.NDArray[np.bool_]
) -> tuple[IntArray, IntArray]:
    """(covered, supervised) int64 [R] of text mode, where every student token that is no special is supervised."""
    counts = ~is_special[student_tokens.ids]
    supervised = row_sums(counts, student_tokens.offsets)
    counts &= alignment.student_chunk_id >= 0
    return row_sums(counts, student_tokens.offsets), supervised


def slice_alignment(
    documents: FlatAlignment,
    offsets: tuple[IntArray, IntArray],
    owner: IntArray,
    bounds: tuple[IntArray, IntArray],
    specials: FlatAlignment,
    num_prefix: tuple[int, int],
) -> FlatAlignment:
    """Alignment of windows, cut out of that of whole documents, with each side's specials put around every window.

    documents: content only. offsets: (student, teacher) int64 [D + 1], their tokens. owner: int64 [W], each window's document.
    bounds: (student, teacher) int64 [W, 2], half-open places in the document's own tokens. specials: the alignment of one
    document that holds nothing but both sides' specials; num_prefix: how many of them, on each side, come before the text.
    """
    chunks_before = _chunks_before(documents, offsets[0])
    first_token = offsets[0][owner]
    before_document = chunks_before[first_token]
    first = chunks_before[first_token + bounds[0][:, 0]] - before_document
    num_content = chunks_before[first_token + bounds[0][:, 1]] - before_document - first
    num_prefix_pairs = 1 + int(specials.student_chunk_id[: num_prefix[0]].max(initial=-1))
    sides = []
    for side, chunk_id in enumerate((documents.student_chunk_id, documents.teacher_chunk_id)):
        starts, lengths = offsets[side][owner] + bounds[side][:, 0], np.diff(bounds[side], axis=1)[:, 0]
        content, content_offsets = select_rows(chunk_id, offsets[side], starts, lengths)
        content = np.where(content < 0, -1, content - np.repeat(first - num_prefix_pairs, lengths)).astype(np.int32)
        around = specials.student_chunk_id if side == 0 else specials.teacher_chunk_id
        # A pair after the text is numbered after the window's own chunks.
        ids = np.where(around >= num_prefix_pairs, around + num_content[:, None], around).astype(np.int32)
        prefix, suffix = ids[:, : num_prefix[side]], ids[:, num_prefix[side] :]
        sides.append(_wrap(content, content_offsets, prefix, suffix)[0])
    correct, correct_offsets = select_rows(
        documents.pair_is_correct, documents.pair_offsets, documents.pair_offsets[owner] + first, num_content
    )
    num_pairs = len(specials.pair_is_correct)
    ones = np.ones((len(owner), num_pairs), dtype=bool)
    correct, pair_offsets = _wrap(correct, correct_offsets, ones[:, :num_prefix_pairs], ones[:, num_prefix_pairs:])
    return FlatAlignment(sides[0], sides[1], num_content + num_pairs, correct, pair_offsets, documents.route[owner])


def _chunks_before(documents: FlatAlignment, offsets: IntArray) -> IntArray:
    """int64 [Ns + 1]: chunks, over all documents, that begin before each student token."""
    chunk = documents.student_chunk_id + np.repeat(documents.pair_offsets[:-1], np.diff(offsets))
    inside = np.flatnonzero(documents.student_chunk_id >= 0)[::-1]
    first = np.zeros(len(documents.pair_is_correct), dtype=np.int64)
    first[chunk[inside]] = inside  # of equal chunks the last write stays: the first token
    before = np.zeros(len(chunk) + 1, dtype=np.int64)
    before[first + 1] = 1
    return np.cumsum(before)


def _wrap(
    values: npt.NDArray[Value], offsets: IntArray, prefix: npt.NDArray[Value], suffix: npt.NDArray[Value]
) -> tuple[npt.NDArray[Value], IntArray]:
    """Puts row r of `prefix` ([R, p]) before and of `suffix` ([R, s]) after row r of the values; returns values and offsets."""
    num_prefix, num_suffix = prefix.shape[1], suffix.shape[1]
    new_offsets = offsets + (num_prefix + num_suffix) * np.arange(len(offsets), dtype=np.int64)
    wrapped = np.empty(int(new_offsets[-1]), dtype=values.dtype)
    is_content = np.ones(len(wrapped), dtype=bool)
    before = new_offsets[:-1, None] + np.arange(num_prefix)
    after = new_offsets[1:, None] - num_suffix + np.arange(num_suffix)
    for edge, places in ((prefix, before), (suffix, after)):
        wrapped[places] = edge
        is_content[places] = False
    wrapped[is_content] = values
    return wrapped, new_offsets
