"""Texts longer than a context: cut each side, refuse, or slice all sides at the same places.

`truncate` cuts a side's content to what its context leaves beside the added specials, as Hugging Face does. `reject` refuses the
row for each side that it is too long for. `split` slices the document's ids into windows that end at a cut which all sides share
and all contexts hold, taking the furthest such cut each time: no byte is lost or seen twice.

Shape legend: D = documents, W = windows, M = shared cuts of all documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.align.flat import SharedCuts
from xtok.shards.columns import select_rows
from xtok.tokenizers import FlatTokens

__all__ = ["Windows", "slice_rows", "truncate", "windows_of"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Windows:
    """W windows of D documents, in order.

    document, number: int64 [W]; number counts from 0 in each document. bounds: one int64 [W, 2] a side (student first), half-open
    token places in the document's own content ids. refused: documents (indices) with a run that has no legal cut.
    """

    document: IntArray
    number: IntArray
    bounds: tuple[IntArray, ...]
    refused: tuple[int, ...]


def truncate(tokens: FlatTokens, max_tokens: int) -> tuple[FlatTokens, npt.NDArray[np.bool_]]:
    """The first `max_tokens` ids of each text, and bool [D]: which texts were cut."""
    lengths = tokens.lengths
    cut = lengths > max_tokens
    if not cut.any():
        return tokens, cut
    return slice_rows(tokens, tokens.offsets[:-1], np.minimum(lengths, max_tokens)), cut


def slice_rows(tokens: FlatTokens, starts: IntArray, lengths: IntArray) -> FlatTokens:
    """Rows ids[starts[r]:starts[r] + lengths[r]]; int64 [R] each, places in the flat array."""
    ids, offsets = select_rows(tokens.ids, tokens.offsets, starts, lengths)
    return FlatTokens(ids, offsets)


def windows_of(cuts: SharedCuts, sides: Sequence[FlatTokens], capacity: Sequence[int]) -> Windows:
    """Windows of documents whose content ids on all sides are `sides` (student first), at most `capacity` content ids each.

    A document that fits every capacity is one window, whatever its cuts.
    """
    lengths = np.stack([side.lengths for side in sides], axis=1)
    limits = np.array(capacity, dtype=np.int64)
    document: list[int] = []
    number: list[int] = []
    bounds: list[npt.NDArray[np.int64]] = []
    refused: list[int] = []
    for index in range(len(lengths)):
        places = _cut_places(cuts, index, lengths[index])
        chosen = _greedy(places, limits)
        if chosen is None:
            refused.append(index)
            continue
        document.extend([index] * (len(chosen) - 1))
        number.extend(range(len(chosen) - 1))
        bounds.append(np.stack([places[chosen[:-1]], places[chosen[1:]]], axis=2))
    table = np.concatenate(bounds) if bounds else np.zeros((0, len(sides), 2), dtype=np.int64)
    return Windows(
        np.array(document, dtype=np.int64),
        np.array(number, dtype=np.int64),
        tuple(table[:, side] for side in range(len(sides))),
        tuple(refused),
    )


def _cut_places(cuts: SharedCuts, document: int, lengths: IntArray) -> IntArray:
    """int64 [M + 2, sides]: the start, the document's shared cuts, and its end."""
    owned = slice(int(cuts.offsets[document]), int(cuts.offsets[document + 1]))
    places = np.stack([cuts.student[owned], *(teacher[owned] for teacher in cuts.teachers)], axis=1)
    before_end = places[(places < lengths).any(axis=1)]
    return np.concatenate([np.zeros((1, len(lengths)), dtype=np.int64), before_end, lengths[None]])


def _greedy(places: IntArray, limits: IntArray) -> IntArray | None:
    """Indices into `places` of the window borders, first and last included; None when two neighbouring cuts lie too far apart."""
    chosen = [0]
    while chosen[-1] < len(places) - 1:
        start = chosen[-1]
        # Places ascend on every side, so the furthest cut within all limits is the smallest over the sides.
        furthest = places[start] + limits
        within = [int(np.searchsorted(column, most, side="right")) for column, most in zip(places.T, furthest, strict=True)]
        if min(within) - 1 <= start:
            return None
        chosen.append(min(within) - 1)
    return np.array(chosen, dtype=np.int64)
