"""The one shape in which ids of many texts travel: two flat arrays, no Python object a token.

Shape legend: N = tokens of all texts together, num_texts = texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.errors import TokenizerError

__all__ = ["FlatTokens", "check_encodable", "first_unencodable"]


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """Token ids of several texts, one after the other.

    ids: int32 [N]. offsets: int64 [num_texts + 1]; text i owns ids[offsets[i]:offsets[i + 1]] (half-open).
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    @property
    def num_texts(self) -> int:
        """How many texts the arrays hold."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [num_texts]: tokens of each text."""
        return np.diff(self.offsets)

    def row(self, index: int) -> npt.NDArray[np.int32]:
        """int32 [tokens of text `index`], a view."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def with_specials(self, prefix: npt.NDArray[np.int32], suffix: npt.NDArray[np.int32]) -> FlatTokens:
        """The same texts, each wrapped in `prefix` and `suffix` (int32 arrays, possibly empty)."""
        extra = len(prefix) + len(suffix)
        if extra == 0:
            return self
        lengths = self.lengths
        offsets = self.offsets + extra * np.arange(len(self.offsets), dtype=np.int64)
        ids = np.empty(int(offsets[-1] - offsets[0]), dtype=np.int32)
        offsets = offsets - offsets[0]
        is_content = np.ones(len(ids), dtype=bool)
        starts, ends = offsets[:-1], offsets[1:]
        for position, special in enumerate(prefix):
            ids[starts + position] = special
            is_content[starts + position] = False
        for position, special in enumerate(suffix):
            ids[ends - len(suffix) + position] = special
            is_content[ends - len(suffix) + position] = False
        ids[is_content] = self.ids[self.offsets[0] : self.offsets[0] + int(lengths.sum())]
        return FlatTokens(ids, offsets)

    @staticmethod
    def concatenate(parts: Sequence[FlatTokens]) -> FlatTokens:
        """Several batches as one, in order."""
        if not parts:
            return FlatTokens(np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return FlatTokens(np.concatenate([part.ids[part.offsets[0] : part.offsets[-1]] for part in parts]), offsets)


def first_unencodable(texts: Sequence[str]) -> tuple[int, int] | None:
    """(text index, character position) of the first lone surrogate, which no UTF-8 and so no tokenizer can hold; or None."""
    for index, text in enumerate(texts):
        if text.isascii():  # a flag of the string, no scan
            continue
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return index, error.start
    return None


def check_encodable(texts: Sequence[str]) -> None:
    """TypeError for what is no string, TokenizerError for a lone surrogate, naming the text and the position."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{index}] is a {type(text).__name__}, not a string")
    found = first_unencodable(texts)
    if found is not None:
        index, position = found
        raise TokenizerError(
            f"texts[{index}] holds the lone surrogate U+{ord(texts[index][position]):04X} at character {position}: "
            "it has no UTF-8 form, so no tokenizer can encode it; remove or replace it"
        )
