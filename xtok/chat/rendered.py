"""What one model is shown for one chat, as text: `RenderedChat`, and the helpers every way of placing the final turn shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from xtok.errors import RowRefused

__all__ = ["ANSWER", "RegionSpan", "RenderedChat", "RenderedPart", "first_visible"]

ANSWER = "answer"


class RegionSpan(NamedTuple):
    """A named part of the final turn: half-open places start:end, in the unit the holder states."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Rendered text and where the final turn's supervised parts stand in it. All places are bytes of the text in UTF-8.

    text: the whole conversation by this side's template. spans: supervised parts but the end of turn, in order, disjoint.
    eot: where the end-of-turn mark begins, -1 when the template writes none. separate: each span is aligned alone (native regions);
    else the run from the first span's start to the last one's end is one content. calls_start: where the tool calls of the answer
    begin, -1 without any. reasoning: "none" (the row has none), "shown" or "dropped" by this template.
    """

    text: str
    spans: tuple[RegionSpan, ...]
    eot: int
    separate: bool = False
    calls_start: int = -1
    reasoning: str = "none"

    @staticmethod
    def of_characters(
        text: str,
        spans: Iterable[tuple[str, int, int]],
        eot: int,
        *,
        separate: bool = False,
        calls_start: int = -1,
        reasoning: str = "none",
    ) -> RenderedChat:
        """The same from character places. UnicodeEncodeError where the text holds a lone surrogate."""
        named = [RegionSpan(*span) for span in spans]
        if not text.isascii():
            inner = {place for span in named for place in span[1:]} | {place for place in (eot, calls_start) if place >= 0}
            to_byte, total = {-1: -1, 0: 0}, 0
            for start, end in pairwise(sorted({0, len(text), *inner})):
                total += len(text[start:end].encode())
                to_byte[end] = total
            named = [RegionSpan(name, to_byte[start], to_byte[end]) for name, start, end in named]
            eot, calls_start = to_byte[eot], to_byte[calls_start]
        return RenderedChat(text, tuple(named), eot, separate, calls_start, reasoning)

    @property
    def content(self) -> tuple[int, int]:
        """Bytes (start, end) of all that is supervised before the end of turn."""
        return self.spans[0].start, self.spans[-1].end

    @property
    def segments(self) -> tuple[RegionSpan, ...]:
        """The spans as they are aligned: each alone, or all as one."""
        return self.spans if self.separate else (RegionSpan(ANSWER, *self.content),)

    @property
    def eot_span(self) -> RegionSpan | None:
        """The end-of-turn mark up to the next blank, for display."""
        if self.eot < 0:
            return None
        mark = self.text.encode()[self.eot :].split(maxsplit=1)[0]
        return RegionSpan("eot", self.eot, self.eot + len(mark))


@dataclass(frozen=True, slots=True)
class RenderedPart:
    """One side of a part. chats, refusals: one entry a row, at most one of them not None; both are None for a row refused before."""

    side: str
    chats: list[RenderedChat | None]
    refusals: list[RowRefused | None]


def first_visible(text: str, start: int) -> int:
    """Index of the first non-blank character at or after `start`, -1 when there is none."""
    for index in range(start, len(text)):
        if not text[index].isspace():
            return index
    return -1
