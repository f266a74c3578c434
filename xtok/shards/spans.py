"""Character spans for the rows that need the offset route: the reference's, without asking it where the ids already tell.

The reference tokenizes again to find spans, which costs more than all else that happens to such a row. But where a side's token
bytes are those of the text, or of the text in NFC, cuts in bytes are cuts in characters. A tokenizer may still report spans in
its own way (some trim blanks), so this is used only for one whose spans it gives on probes.

Shape legend: N = tokens of one text.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from xtok.shards.nfc import nfc_places
from xtok.tokenizers import TokenizerAdapter

__all__ = ["SpanFinder", "spans_from_bytes"]

Spans = npt.NDArray[np.int32]
_PROBES = (
    " leading and  double blanks\n\n\tand a tab at the end\t ",
    "def f(x):\n    return [x ** 2, -x]  # 1234567890\r\n",
    "Žluťoučký kůň úpěl ďábelské ódy — «naïve» café",
    "日本語の文章、한국어 문장, नमस्ते दुनिया, สวัสดี, العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇿 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u00ad\u200b\ufeff e\u0301",
    "a\u0301 q\u0307\u0323o\u0302\u0301x\u0323\u0301\u0302 \u0915\u093c\u0958 \u1100\u1161\u11a8 \u212b\u2126 \u0301x",
)
_REPORTS_PLAIN_SPANS: WeakKeyDictionary[TokenizerAdapter, bool] = WeakKeyDictionary()


class SpanFinder:
    """Spans of one side's rows, remembered for the block at hand, so that many teachers ask for the student's once."""

    def __init__(self, adapter: TokenizerAdapter) -> None:
        self._adapter = adapter
        self._found: dict[int, tuple[npt.NDArray[np.int32], Spans]] = {}

    def new_block(self) -> None:
        """Forgets the rows of the block before."""
        self._found.clear()

    def spans(self, row: int, text: str, content: npt.NDArray[np.int32]) -> Spans | None:
        """int32 [N, 2], half-open character spans of `content`, the row's first N content ids.

        None when the reference gives the text other ids than these.
        """
        if row not in self._found:
            derived = spans_from_bytes(self._adapter, text, content) if self._plain() else None
            if derived is None:
                tokens, spans = self._adapter.encode_with_spans([text])
                self._found[row] = tokens.ids, spans
            else:
                self._found[row] = content, derived
        ids, spans = self._found[row]
        return spans[: len(content)] if np.array_equal(ids[: len(content)], content) else None

    def _plain(self) -> bool:
        if self._adapter not in _REPORTS_PLAIN_SPANS:
            _REPORTS_PLAIN_SPANS[self._adapter] = all(self._agrees(text) for text in _PROBES)
        return _REPORTS_PLAIN_SPANS[self._adapter]

    def _agrees(self, text: str) -> bool:
        tokens, spans = self._adapter.encode_with_spans([text])
        derived = spans_from_bytes(self._adapter, text, tokens.ids)
        return derived is None or np.array_equal(derived, spans)


def spans_from_bytes(adapter: TokenizerAdapter, text: str, content: npt.NDArray[np.int32]) -> Spans | None:
    """int32 [N, 2] character spans of ids whose bytes are the beginning of the text's own, or of its NFC; else None.

    Tokens that share a character each span it whole.
    """
    data, cuts = adapter.token_bytes(content)
    if bool((np.diff(cuts) == 0).any()):
        return None  # a special token spelled out, say
    place = _character_of_byte(data, text)
    if place is None:
        normalized, places = nfc_places(text)
        place = _character_of_byte(data, normalized) if normalized != text else None
        if place is None:
            return None
        place = places[place]
    return np.stack([place[cuts[:-1]], place[cuts[1:] - 1] + 1], axis=1).astype(np.int32)


def _character_of_byte(data: npt.NDArray[np.uint8], text: str) -> Spans | None:
    """int32 [bytes of `data`]: the character of `text` that each byte belongs to; None when they are not its first bytes."""
    encoded = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)[: len(data)]
    if not np.array_equal(data, encoded):
        return None
    return np.cumsum((encoded & 0xC0) != 0x80, dtype=np.int32) - 1
