"""Alignment of flat id arrays: the path that shards, loader and collator share, numpy only.

Documents whose bytes verify take the byte route. The others take the offset route where the caller can give character spans, and
have only role pairs where it cannot. All documents lie on one line, each in the unit of its route:

    | BOS pair . | content ................ | . EOS pair . |        one document; "." keeps islands apart

Shape legend: D = documents, N = tokens of one side, R = role pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from xtok.align.chunk_texts import correct_chunks
from xtok.align.cuts import BoolArray, Chunks, IntArray, LineSide, TokenPlaces, chunks_from_cuts, chunks_on_line
from xtok.align.fast_lane import FastAlignment, align_fast
from xtok.align.flat import (
    BYTE_ROUTE,
    OFFSET_ROUTE,
    FlatAlignment,
    SharedCuts,
    exact_partition_masks,
    keep_chunks,
    shared_cuts,
)
from xtok.align.offset_route import OffsetPlaces, SpanLookup, offset_places
from xtok.align.side import Side, pair_of_sides
from xtok.align.specials import RolePairs, Specials, find_specials, pair_roles
from xtok.align.verify import verify
from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.flat import FlatTokens

__all__ = [
    "BYTE_ROUTE",
    "OFFSET_ROUTE",
    "Chunks",
    "FlatAlignment",
    "SharedCuts",
    "SpanLookup",
    "TokenPlaces",
    "align_flat",
    "chunks_from_cuts",
    "exact_partition_masks",
    "keep_chunks",
    "shared_cuts",
]


SpanSource = Callable[[IntArray], SpanLookup | None]


def align_flat(
    student: TokenizerAdapter,
    teacher: TokenizerAdapter,
    student_tokens: FlatTokens,
    teacher_tokens: FlatTokens,
    *,
    spans: SpanSource | None = None,
) -> FlatAlignment:
    """Chunks of D documents, each tokenized by both sides, ids as shown to the models (added specials included).

    spans: asked once, with the sorted int64 indices of the documents whose bytes do not verify; see `SpanLookup` for what it
    returns. Without it, such a document has role pairs only. Either side may be truncated. TokenizerError for an id that its
    tokenizer does not have, ValueError for sides with different numbers of documents.
    """
    if student_tokens.num_texts != teacher_tokens.num_texts:
        raise ValueError(
            f"student holds {student_tokens.num_texts} documents, teacher {teacher_tokens.num_texts}: align the same documents"
        )
    sides = pair_of_sides(student, teacher, student_tokens, teacher_tokens)
    fast = align_fast(*sides)
    if fast is None:
        return _align_general(sides, spans)
    if not fast.settled.all():
        return _completed(fast, sides, spans)
    return FlatAlignment.from_chunks(Chunks(fast.student_chunk_id, fast.teacher_chunk_id, fast.num_chunks))


def _completed(fast: FastAlignment, sides: tuple[Side, Side], spans: SpanSource | None) -> FlatAlignment:
    """The fast lane's documents, and the others aligned in the general way."""
    rest = np.flatnonzero(~fast.settled)
    (left, left_index), (right, right_index) = sides[0].select(rest), sides[1].select(rest)
    general = _align_general((left, right), None if spans is None else lambda documents: spans(rest[documents]))
    fast.student_chunk_id[left_index] = general.student_chunk_id
    fast.teacher_chunk_id[right_index] = general.teacher_chunk_id
    fast.num_chunks[rest] = general.num_chunks
    route = np.zeros(len(fast.settled), dtype=np.uint8)
    route[rest] = general.route
    merged = FlatAlignment.from_chunks(Chunks(fast.student_chunk_id, fast.teacher_chunk_id, fast.num_chunks), route=route)
    merged.pair_is_correct[np.repeat(~fast.settled, fast.num_chunks)] = general.pair_is_correct
    return merged


def _align_general(sides: tuple[Side, Side], spans: SpanSource | None) -> FlatAlignment:
    """Every reading of the bytes, then the offset route."""
    (student, student_tokens), (teacher, teacher_tokens) = ((side.adapter, side.tokens) for side in sides)
    check = verify(*sides)
    failing = np.flatnonzero(~check.is_verified)
    found = spans(failing) if spans is not None and len(failing) else None
    by_offset = offset_places(sides[0], sides[1], failing, found) if found is not None else (None, None)
    content = [
        _content_of(side, cuts, check.is_verified, places)
        for side, cuts, places in zip(sides, (check.student_cuts, check.teacher_cuts), by_offset, strict=True)
    ]
    pairs = pair_roles((student, student_tokens, content[0].outside), (teacher, teacher_tokens, content[1].outside))
    layout = _lay_out(content[0].extents, content[1].extents, pairs)
    chunks = chunks_on_line(
        _line_side(sides[0], content[0], layout, pairs.student),
        _line_side(sides[1], content[1], layout, pairs.teacher),
        layout.length,
    )
    alignment = FlatAlignment.from_chunks(chunks, route=np.where(check.is_verified, BYTE_ROUTE, OFFSET_ROUTE).astype(np.uint8))
    if by_offset[0] is None or by_offset[1] is None:
        return alignment
    correct = correct_chunks(alignment, failing, (sides[0], by_offset[0]), (sides[1], by_offset[1]))
    return replace(alignment, pair_is_correct=correct)


@dataclass(frozen=True, slots=True)
class _Content:
    """What of one side lies in the lattice.

    outside: special tokens outside. silent: bool [N], all tokens outside, role pairs included for now. cuts: int64 [N + 1], of byte-route
    documents. in_lattice: bool [D], byte-route documents. extents: int64 [D]. offset: places of offset-route documents.
    """

    outside: Specials
    silent: BoolArray
    cuts: IntArray
    in_lattice: BoolArray
    extents: IntArray
    offset: OffsetPlaces | None


def _content_of(side: Side, cuts: IntArray, is_verified: BoolArray, offset: OffsetPlaces | None) -> _Content:
    offsets, specials = side.tokens.offsets, side.specials
    silent = np.zeros(len(side.tokens.ids), dtype=bool)
    silent[specials.index[cuts[specials.index] == cuts[specials.index + 1]]] = True
    extents = np.diff(cuts[offsets])
    if not is_verified.all():
        extents = np.where(is_verified, extents, 0)
        silent[np.repeat(~is_verified, side.tokens.lengths)] = True
    if offset is not None:
        silent[offset.index] = ~offset.active
        extents[offset.documents] = offset.extents
    outside = specials.index[silent[specials.index]]
    found = specials if len(outside) == len(specials.index) else find_specials(outside, offsets)
    return _Content(found, silent, cuts, is_verified, extents, offset)


@dataclass(frozen=True, slots=True)
class _Layout:
    """content: int64 [D], where each document's content begins on the line. pair_start: int64 [R]. length: of the line."""

    content: IntArray
    pair_start: IntArray
    length: int


def _lay_out(student_extents: IntArray, teacher_extents: IntArray, pairs: RolePairs) -> _Layout:
    num_documents = len(student_extents)
    leading = np.bincount(pairs.document[pairs.leads], minlength=num_documents)
    trailing = np.bincount(pairs.document[~pairs.leads], minlength=num_documents)
    extents = np.maximum(student_extents, teacher_extents)
    bounds = np.zeros(num_documents + 1, dtype=np.int64)
    np.cumsum(2 * (leading + trailing) + extents + 1, out=bounds[1:])
    content = bounds[:-1] + 2 * leading
    end_of_run = np.where(pairs.leads, bounds[pairs.document], (content + extents + 1)[pairs.document])
    return _Layout(content, end_of_run + 2 * pairs.rank, int(bounds[-1]))


def _line_side(side: Side, content: _Content, layout: _Layout, paired: IntArray) -> LineSide:
    """One side on the line; paired: int64 [R], its token indices of the role pairs, ascending."""
    offsets, lengths = side.tokens.offsets, side.tokens.lengths
    ends = content.cuts[1:] + np.repeat(layout.content - content.cuts[offsets[:-1]], lengths)
    is_zero = content.cuts[1:] == content.cuts[:-1]
    first, start, end = _byte_islands(side, content, layout)
    if content.offset is not None:
        places = content.offset
        shift = layout.content[np.repeat(places.documents, places.counts)]
        ends[places.index] = places.ends + shift
        is_zero[places.index] = places.ends == places.starts
        begins = layout.content[places.documents] + places.begins
        has_content = places.first_active >= 0
        first = np.concatenate([first, places.first_active[has_content]])
        start = np.concatenate([start, begins[has_content]])
        end = np.concatenate([end, (layout.content[places.documents] + places.extents)[has_content]])
    is_zero |= content.silent
    is_zero[paired] = False
    silent = content.silent.copy()
    silent[paired] = False
    silent_index = np.flatnonzero(silent)
    ends[silent_index] = layout.length + 1
    ends[paired] = layout.pair_start + 1
    first = np.concatenate([first, paired])
    order = np.argsort(first)
    return LineSide(
        ends,
        offsets,
        np.flatnonzero(is_zero),
        silent_index,
        first[order],
        np.concatenate([start, layout.pair_start])[order],
        np.concatenate([end, layout.pair_start + 1])[order],
    )


def _byte_islands(side: Side, content: _Content, layout: _Layout) -> tuple[IntArray, IntArray, IntArray]:
    """(index of the first token, start, end) of the content of byte-route documents that have any."""
    first = side.tokens.offsets[:-1] + content.outside.num_leading
    documents = np.flatnonzero(content.in_lattice & (first < side.tokens.offsets[1:] - content.outside.num_trailing))
    start = layout.content[documents]
    return first[documents], start, start + content.extents[documents]
