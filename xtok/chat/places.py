"""Where each token of a rendered text stands: byte places from the ids alone, character offsets only where ids do not tell.

A text's tokens are verified: their bytes, special tokens by their own text, must spell the rendering exactly. A SentencePiece-style
tokenizer puts a dummy blank before the text, or before each piece between added tokens; that declared edit is taken off first. A
text that fails (a normalizing tokenizer changed it) is encoded once more by the reference tokenizer, whose character spans become bytes.

Shape legend: D = texts, N = tokens of all texts together, B = bytes of all texts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from xtok.tokenizers import FlatTokens, TokenizerAdapter

__all__ = ["IdsDiffer", "IntArray", "PieceTokens", "TextTokens", "TokenLine", "place_tokens", "token_ranges"]

IntArray = npt.NDArray[np.int64]


class IdsDiffer(Exception):
    """Ids handed in are not the reference tokenizer's: the backend that made them was wrong about a text."""


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Tokens of D texts with their places.

    tokens: ids and row offsets. starts, ends: int64 [N], half-open bytes of the token's own text. by_bytes: bool [D], False where the
    places come from character spans. data: the D texts in UTF-8.
    """

    tokens: FlatTokens
    starts: IntArray
    ends: IntArray
    by_bytes: npt.NDArray[np.bool_]
    data: list[bytes]


@dataclass(frozen=True, slots=True)
class PieceTokens:
    """Tokens that lie in pieces of text. index: int64 [M], sorted by piece. piece: int64 [M]. starts, ends: int64 [M], bytes from the
    piece's start."""

    index: IntArray
    piece: IntArray
    starts: IntArray
    ends: IntArray


class TokenLine:
    """All rows on one line of bytes, so that one sorted search serves them all."""

    def __init__(self, text: TextTokens) -> None:
        lengths = np.fromiter(map(len, text.data), dtype=np.int64, count=len(text.data))
        self.base = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=self.base[1:])
        shift = np.repeat(self.base[:-1], text.tokens.lengths)
        self.starts, self.ends = text.starts + shift, text.ends + shift
        if not bool(text.by_bytes.all()):
            # Character spans may step back; a running maximum keeps the search sorted and changes no ordinary span.
            self.starts, self.ends = np.maximum.accumulate(self.starts), np.maximum.accumulate(self.ends)

    def overlapping(self, rows: IntArray, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """Tokens [first, last) that overlap bytes starts:ends of `rows`; int64 [K] each."""
        first = np.searchsorted(self.ends, starts + self.base[rows], side="right")
        last = np.searchsorted(self.starts, ends + self.base[rows], side="left")
        return first, np.maximum(first, last)


def place_tokens(adapter: TokenizerAdapter, texts: Sequence[str], tokens: FlatTokens) -> TextTokens:
    """Places of `tokens`, the content ids (no specials added) of `texts`. Raises IdsDiffer where they are found to be others'."""
    data = [text.encode() for text in texts]
    table = _spelled_table(adapter)
    taken = table.take(pa.array(tokens.ids))
    _, cut_buffer, byte_buffer = taken.buffers()
    cuts = np.frombuffer(cut_buffer, dtype=np.int64, count=len(taken) + 1)
    spelled = np.frombuffer(byte_buffer, dtype=np.uint8) if byte_buffer is not None else np.empty(0, dtype=np.uint8)
    row_base = np.repeat(cuts[tokens.offsets[:-1]], tokens.lengths)
    starts, ends = cuts[:-1] - row_base, cuts[1:] - row_base
    by_bytes = _verified(data, spelled[: int(cuts[-1])], cuts[tokens.offsets])
    for row in np.flatnonzero(~by_bytes).tolist():
        own = slice(int(tokens.offsets[row]), int(tokens.offsets[row + 1]))
        edited = _without_dummy_blanks(adapter, tokens.ids[own], spelled, cuts[own.start : own.stop + 1], data[row])
        if edited is None:
            starts[own], ends[own] = _places_by_spans(adapter, texts[row], tokens.ids[own])
        else:
            starts[own], ends[own] = edited
            by_bytes[row] = True
    return TextTokens(tokens, starts, ends, by_bytes, data)


@lru_cache(maxsize=64)
def _spelled_table(adapter: TokenizerAdapter) -> pa.LargeBinaryArray:
    """large_binary [V]: bytes of every id with special tokens spelled by their own text, as they stand in a rendering."""
    content = adapter.table.special_content
    if not content:
        return adapter.table.values
    mask = np.zeros(adapter.table.vocab_size, dtype=bool)
    mask[list(content)] = True
    replacement = pa.array([content[token_id] for token_id in sorted(content)], type=pa.large_binary())
    return pc.replace_with_mask(adapter.table.values, pa.array(mask), replacement)


def _verified(data: list[bytes], spelled: npt.NDArray[np.uint8], row_cuts: IntArray) -> npt.NDArray[np.bool_]:
    """bool [D]: texts whose token bytes are the text's."""
    whole = b"".join(data)
    lengths = np.fromiter(map(len, data), dtype=np.int64, count=len(data))
    same_length = lengths == np.diff(row_cuts)
    if bool(same_length.all()) and np.array_equal(np.frombuffer(whole, dtype=np.uint8), spelled):
        return np.ones(len(data), dtype=bool)
    return np.array(
        [
            bool(same) and spelled[row_cuts[row] : row_cuts[row + 1]].tobytes() == data[row]
            for row, same in enumerate(same_length)
        ],
        dtype=bool,
    )


def _without_dummy_blanks(
    adapter: TokenizerAdapter, ids: npt.NDArray[np.int32], spelled: npt.NDArray[np.uint8], cuts: IntArray, text: bytes
) -> tuple[IntArray, IntArray] | None:
    """Places once the dummy blanks are taken off: before the text alone, or before every piece that follows an added token."""
    if adapter.prefix_space == "never" or len(ids) == 0:
        return None
    own = spelled[cuts[0] : cuts[-1]]
    local = cuts - cuts[0]
    follows_added = np.append(True, adapter.table.is_special[ids[:-1]]) & ~adapter.table.is_special[ids]
    first_only = np.zeros(len(ids), dtype=bool)
    first_only[0] = follows_added[0]
    has_width = local[1:] > local[:-1]
    begins_blank = np.zeros(len(ids), dtype=bool)
    begins_blank[has_width] = own[local[:-1][has_width]] == 0x20
    for dummy in (follows_added & begins_blank, first_only & begins_blank):
        keep = np.ones(len(own), dtype=bool)
        keep[local[:-1][dummy]] = False
        if own[keep].tobytes() == text:
            places = np.concatenate(([0], np.cumsum(np.diff(local) - dummy)))
            return places[:-1], places[1:]
    return None


def _places_by_spans(adapter: TokenizerAdapter, text: str, ids: npt.NDArray[np.int32]) -> tuple[IntArray, IntArray]:
    """Places of one text from the reference tokenizer's character spans, in bytes."""
    again, spans = adapter.encode_with_spans([text])
    if not np.array_equal(again.ids, ids):
        raise IdsDiffer(f"{adapter.name} gives {text[:60]!r} other ids than those at hand")
    to_byte = np.zeros(len(text) + 1, dtype=np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    np.cumsum(1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000), out=to_byte[1:])
    return to_byte[spans[:, 0]], to_byte[spans[:, 1]]


def token_ranges(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """(index, owner): all integers of the ranges first:last, and which range each belongs to."""
    counts = last - first
    owner = np.repeat(np.arange(len(first)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return first[owner] + within, owner
