"""Rendered chats and their ids to masks: which tokens are supervised, which token ends the turn, where regions lie in tokens.

One vectorized pass over a whole part; only tokens that cross a border are looked at one by one. The rules:
- a token is supervised when it overlaps a supervised span; the end-of-turn token is the first token at or after the content's end,
  blanks skipped;
- a token that crosses the outer border of what is supervised must have nothing but blanks outside, else the row is refused;
- a special token inside the content is refused unless the side allows it; a chat longer than the context is refused, never cut.

Shape legend: D = rows, N = tokens of all rows together, K = spans of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.tables import RejectReason
from xtok.chat.places import IntArray, TextTokens, TokenLine, place_tokens
from xtok.chat.rendered import RegionSpan, RenderedChat, RenderedPart
from xtok.chat.side import ChatSide
from xtok.errors import RowRefused
from xtok.tokenizers import FlatTokens

__all__ = ["LocatedPart", "locate_tokens", "texts_of"]

END_MARK = b"<|im_end|>"  # native ChatML


@dataclass(frozen=True, slots=True)
class LocatedPart:
    """One side of a part, in tokens. A row without a chat has no tokens.

    side; chats: what was rendered. text: ids, row offsets and byte places. token_mask: bool [N], supervised tokens. eot_index: int64 [D],
    the end-of-turn token within its row, -1 for none. regions: per row its token spans (half-open, within the row), the end of turn last.
    refusals: RowRefused of every refused row, rendering included.
    """

    side: ChatSide
    chats: list[RenderedChat | None]
    text: TextTokens
    token_mask: npt.NDArray[np.bool_]
    eot_index: IntArray
    regions: list[tuple[RegionSpan, ...]]
    refusals: list[RowRefused | None]

    @property
    def tokens(self) -> FlatTokens:
        """Ids and row offsets."""
        return self.text.tokens

    def line(self) -> TokenLine:
        """All tokens on one line of bytes, for looking up spans."""
        return TokenLine(self.text)


def texts_of(part: RenderedPart) -> list[str]:
    """What is to be encoded, one text a row; "" where there is no chat."""
    return ["" if chat is None else chat.text for chat in part.chats]


def locate_tokens(side: ChatSide, part: RenderedPart, tokens: FlatTokens) -> LocatedPart:
    """Masks and regions of a rendered part whose texts (`texts_of`) were encoded to `tokens`, no specials added."""
    text = place_tokens(side.adapter, texts_of(part), tokens)
    refusals = list(part.refusals)
    line = TokenLine(text)
    rows = [row for row, chat in enumerate(part.chats) if chat is not None]
    spans = [(row, span) for row in rows for span in _chat(part, row).spans]
    span_rows = np.array([row for row, _ in spans], dtype=np.int64)
    first, last = line.overlapping(
        span_rows, np.array([s.start for _, s in spans], dtype=np.int64), np.array([s.end for _, s in spans], dtype=np.int64)
    )
    eot = _end_of_turn(line, part, rows, tokens.offsets)
    runs = _joined(part, span_rows, first, last)
    mask = _mask(*runs, eot[eot >= 0], len(tokens.ids))
    regions: list[list[RegionSpan]] = [[] for _ in part.chats]
    for (row, span), low, high in zip(spans, first - tokens.offsets[span_rows], last - tokens.offsets[span_rows], strict=True):
        regions[row].append(RegionSpan(span.name, int(low), int(high)))
    eot_index = np.where(eot >= 0, eot - tokens.offsets[:-1], -1)
    for row in np.flatnonzero(eot_index >= 0).tolist():
        regions[row].append(RegionSpan("eot", int(eot_index[row]), int(eot_index[row]) + 1))
    located = LocatedPart(side, part.chats, text, mask, eot_index, [tuple(r) for r in regions], refusals)
    _refuse_overlong(located)
    _refuse_borders(located, rows)
    _refuse_specials(located, span_rows, first, last)
    return located


def _chat(part: RenderedPart, row: int) -> RenderedChat:
    chat = part.chats[row]
    assert chat is not None
    return chat


def _end_of_turn(line: TokenLine, part: RenderedPart, rows: list[int], offsets: IntArray) -> IntArray:
    """int64 [D]: each row's end-of-turn token on the whole line, -1 for none. offsets: int64 [D + 1], where each row's tokens begin."""
    eot = np.full(len(part.chats), -1, dtype=np.int64)
    with_eot = np.array([row for row in rows if _chat(part, row).eot >= 0], dtype=np.int64)
    places = np.array([_chat(part, int(row)).eot for row in with_eot], dtype=np.int64)
    # The token that holds the mark's first byte: blanks before it end earlier.
    found = np.searchsorted(line.ends, places + line.base[with_eot], side="right")
    # A tokenizer may drop the mark (WordPiece drops what it takes for no character): then the row has no such token.
    eot[with_eot] = np.where(found < offsets[with_eot + 1], found, -1)
    return eot


def _joined(part: RenderedPart, span_rows: IntArray, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """Token runs that are supervised: every span, and from the first to the last where they are one content."""
    joins = np.array([not _chat(part, int(row)).separate for row in span_rows], dtype=bool)
    same_row = np.append(span_rows[1:] == span_rows[:-1], False) if len(span_rows) else joins
    reaches = np.append(first[1:], 0) if len(first) else first
    return first, np.where(joins & same_row, np.maximum(last, reaches), last)


def _mask(first: IntArray, last: IntArray, eot: IntArray, num_tokens: int) -> npt.NDArray[np.bool_]:
    change = np.zeros(num_tokens + 1, dtype=np.int32)
    np.add.at(change, first, 1)
    np.add.at(change, last, -1)
    mask = np.cumsum(change[:-1]) > 0
    mask[eot] = True
    return mask


def _refuse_overlong(located: LocatedPart) -> None:
    limit = located.side.context_length
    if limit is None:
        return
    for row in np.flatnonzero(located.tokens.lengths > limit).tolist():
        length = int(located.tokens.lengths[row])
        _refuse(located, row, RejectReason.OVERLENGTH, f"the chat has {length} tokens, the context {limit}; chats are never cut")


def _refuse_borders(located: LocatedPart, rows: list[int]) -> None:
    """Every supervised token must lie in supervised spans and blanks."""
    for row in rows:
        problem = _border_problem(located, row)
        if problem is not None:
            _refuse(located, row, *problem)


def _border_problem(located: LocatedPart, row: int) -> tuple[RejectReason, str] | None:
    chat, named, base = located.chats[row], located.regions[row], int(located.tokens.offsets[row])
    assert chat is not None
    for span, region in zip(chat.spans, named, strict=False):
        if region.start == region.end:
            return RejectReason.BORDER_TOKEN, f"no token stands for the {span.name} of the final turn"
    starts, ends = located.text.starts, located.text.ends
    for token, inner in _outer_tokens(chat, named, base):
        start, end = int(starts[token]), int(ends[token])
        if start < inner[0] or end > inner[1]:
            outside = _outside(located.text.data[row], start, end, chat.spans).decode(errors="replace")
            if outside.strip():
                return (
                    RejectReason.BORDER_TOKEN,
                    f"{_show(located, row, token)} reaches over the content's border into {outside!r}",
                )
    if chat.separate:
        token = base + int(located.eot_index[row])
        if (int(starts[token]), int(ends[token])) != (chat.eot, chat.eot + len(END_MARK)):
            return RejectReason.UNKNOWN_LAYOUT, f"{END_MARK.decode()} is not one token of this side's tokenizer"
    return None


def _outer_tokens(chat: RenderedChat, regions: Sequence[RegionSpan], base: int) -> list[tuple[int, tuple[int, int]]]:
    """(token, bytes of the span it must lie in) of the first and last token of every span."""
    found = []
    for span, region in zip(chat.spans, regions, strict=False):
        if region.end > region.start:
            found += [(base + region.start, (span.start, span.end)), (base + region.end - 1, (span.start, span.end))]
    return found


def _outside(data: bytes, start: int, end: int, spans: Sequence[RegionSpan]) -> bytes:
    """Bytes start:end that no span covers."""
    rest, at = b"", start
    for span in spans:
        rest += data[at : max(at, min(span.start, end))]
        at = max(at, min(span.end, end))
    return rest + data[at:end]


def _refuse_specials(located: LocatedPart, span_rows: IntArray, first: IntArray, last: IntArray) -> None:
    if located.side.allow_special_tokens_in_content or not len(located.tokens.ids):
        return
    before = np.concatenate(([0], np.cumsum(located.side.is_control[located.tokens.ids])))
    for index in np.flatnonzero(before[last] > before[first]).tolist():
        row = int(span_rows[index])
        _refuse(located, row, RejectReason.EMBEDDED_SPECIAL_TOKEN, "the final turn's text was tokenized into a special token")


def _show(located: LocatedPart, row: int, token: int) -> str:
    data = located.text.data[row][int(located.text.starts[token]) : int(located.text.ends[token])]
    return f"the token {data.decode(errors='replace')!r}"


def _refuse(located: LocatedPart, row: int, reason: RejectReason, message: str) -> None:
    """Record the first refusal of a row."""
    if located.refusals[row] is None:
        located.refusals[row] = RowRefused(reason, message, stage="tokenize", side=located.side.name)
