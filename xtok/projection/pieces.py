"""How the other tokenizer would write the bytes of a token: its own encoder where it can, longest match where no text has those bytes.

Shapes: N byte strings, E pieces of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xtok.tokenizers import FlatTokens, TokenizerAdapter

__all__ = ["LongestMatch", "ordinary_ids_by_bytes", "split_into_pieces"]

# A line end before the text keeps a dummy prefix and any merge away from it; the ids after it are those of the text inside a document.
GUARD = "\n"


def ordinary_ids_by_bytes(tokenizer: TokenizerAdapter) -> dict[bytes, int]:
    """Bytes -> id over the ordinary tokens. Of several ids with equal bytes a whole piece wins over a byte-fallback piece
    (`<0x41>` and `A`), then the lowest id."""
    table = tokenizer.table
    usable = (table.lengths > 0) & ~table.is_special
    ids = np.flatnonzero(usable)
    values = table.values.to_pylist()
    found: dict[bytes, int] = {}
    fallbacks: list[int] = []
    for token_id in ids.tolist():
        if table.lengths[token_id] == 1 and (tokenizer.token_text(token_id) or "").startswith("<0x"):
            fallbacks.append(token_id)
        else:
            found.setdefault(values[token_id], token_id)
    for token_id in fallbacks:
        found.setdefault(values[token_id], token_id)
    return found


class LongestMatch:
    """Splits bytes greedily into the longest tokens of a vocabulary, left to right."""

    def __init__(self, ids_by_bytes: dict[bytes, int]) -> None:
        self._ids = ids_by_bytes
        self._longest = max((len(key) for key in ids_by_bytes), default=0)

    def split(self, data: bytes) -> list[int]:
        """Ids of the pieces; empty when some byte is in no token."""
        pieces: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token_id = self._ids.get(data[at:end])
                if token_id is not None:
                    pieces.append(token_id)
                    at = end
                    break
            else:
                return []
        return pieces


def split_into_pieces(tokenizer: TokenizerAdapter, strings: Sequence[bytes], ids_by_bytes: dict[bytes, int]) -> FlatTokens:
    """Pieces of every byte string in `tokenizer`'s vocabulary: FlatTokens with one text a string.

    A string that is text is encoded as inside a document, and taken when its pieces have exactly its bytes; every other one (half a
    character, a normalizing tokenizer) is matched longest first. A string no piece fits has no pieces.
    """
    pieces: list[list[int]] = [[] for _ in strings]
    texts: list[str] = []
    places: list[int] = []
    for place, data in enumerate(strings):
        try:
            texts.append(GUARD + data.decode("utf-8"))
            places.append(place)
        except UnicodeDecodeError:
            continue
    tokens = tokenizer.encode_flat(texts)
    for number, place in enumerate(places):
        pieces[place] = _behind_guard(tokenizer, tokens.row(number), strings[place])
    greedy = LongestMatch(ids_by_bytes)
    for place, data in enumerate(strings):
        if not pieces[place]:
            pieces[place] = greedy.split(data)
    lengths = [len(found) for found in pieces]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    return FlatTokens(np.array([i for found in pieces for i in found], dtype=np.int32), offsets)


def _behind_guard(tokenizer: TokenizerAdapter, ids: npt.NDArray[np.int32], data: bytes) -> list[int]:
    """The ids whose bytes are exactly `data`, at the end of `GUARD + data`; empty when the cut or the bytes do not fit."""
    if bool(tokenizer.table.is_special[ids].any()):
        return []
    content, cuts = tokenizer.token_bytes(ids)
    start = int(cuts[-1]) - len(data)
    first = int(np.searchsorted(cuts, start))
    if start < 0 or cuts[first] != start or content[start:].tobytes() != data:
        return []
    return [int(i) for i in ids[first:]]
