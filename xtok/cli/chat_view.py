"""A chat as each model was shown it: its rendering, cut where regions begin and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xtok.cli.row_view import ChunkView

__all__ = ["ShownText", "final_turn", "shown_text"]


@dataclass(frozen=True, slots=True)
class ShownText:
    """One side's rendering. pieces: (text, region), in order; region None for what is not supervised. label: whose it is."""

    label: str
    pieces: tuple[tuple[str, str | None], ...]

    def shortened(self, max_context: int) -> ShownText:
        """With at most so many characters of the context before the final turn: the last ones."""
        text, region = self.pieces[0]
        if region is not None or len(text) <= max_context:
            return self
        return ShownText(self.label, ((f"… {len(text) - max_context} characters …{text[-max_context:]}", None), *self.pieces[1:]))


def shown_text(label: str, rendered: Mapping[str, Any]) -> ShownText | None:
    """From one row of the rendered table; None where the side refuses the row."""
    if rendered["text"] is None:
        return None
    data = rendered["text"].encode()
    pieces: list[tuple[str, str | None]] = []
    at = 0
    for region in rendered["regions"]:
        for start, end, name in ((at, region["start"], None), (region["start"], region["end"], region["name"])):
            if end > start:
                pieces.append((data[start:end].decode(), name))
        at = region["end"]
    if at < len(data):
        pieces.append((data[at:].decode(), None))
    return ShownText(label, tuple(pieces))


def final_turn(chunks: Sequence[ChunkView]) -> tuple[ChunkView, ...]:
    """The chunks that hold a supervised token: the context is in none, and would bury them."""
    return tuple(chunk for chunk in chunks if any(token.supervised for token in (*chunk.student, *chunk.teacher)))
