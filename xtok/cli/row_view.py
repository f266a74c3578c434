"""One row of a dataset as a person reads it: the student's and a teacher's tokens side by side, chunk by chunk.

Pure data, no terminal and no HTML: `render_terminal` and `render_html` draw it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from xtok.tokenizers import TokenizerAdapter

if TYPE_CHECKING:
    from xtok.cli.chat_view import ShownText

__all__ = ["ChunkView", "RowView", "TokenView", "pair_chunks", "spell", "token_views"]

# Blanks and line ends carry meaning in tokens, so they are drawn.
VISIBLE = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token. text: its bytes made visible. supervised: it counts for the loss (`token_mask`)."""

    id: int
    text: str
    is_special: bool
    supervised: bool


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Tokens of both sides that stand for the same bytes; chunk_id -1 and one side empty where a side has no counterpart."""

    chunk_id: int
    is_correct: bool
    student: tuple[TokenView, ...]
    teacher: tuple[TokenView, ...]


@dataclass(frozen=True, slots=True)
class RowView:
    """One row against one teacher. route, coverage: None for a same-tokenizer teacher; note: what is special about this pair.

    shown: of a chat, what each side was shown; its chunks are then those of the final turn alone.
    """

    sample_id: str
    source: str
    line: int
    teacher_index: int
    student_name: str
    teacher_name: str
    route: str | None
    coverage: float | None
    note: str | None
    chunks: tuple[ChunkView, ...]
    shown: tuple[ShownText, ...] = ()

    @property
    def summary(self) -> str:
        """What the row shows, in one line."""
        paired = [chunk for chunk in self.chunks if chunk.chunk_id >= 0]
        one_to_one = sum(len(chunk.student) == len(chunk.teacher) == 1 for chunk in paired)
        tokens = [sum(len(getattr(chunk, side)) for chunk in self.chunks) for side in ("student", "teacher")]
        parts = [f"{tokens[0]} student tokens", f"{tokens[1]} teacher tokens", f"{len(paired)} chunks, {one_to_one} one to one"]
        if self.shown:
            parts[0] = f"final turn: {parts[0]}"
        incorrect = sum(not chunk.is_correct for chunk in paired)
        if incorrect:
            parts.append(f"{incorrect} not correct")
        if self.coverage is not None:
            parts.append(f"coverage {self.coverage:.4f}")
        if self.route is not None:
            parts.append(f"{self.route} route")
        if self.note is not None:
            parts.append(self.note)
        return " · ".join(parts)


def token_views(tokenizer: TokenizerAdapter, ids: Sequence[int], mask: Sequence[bool]) -> tuple[TokenView, ...]:
    """Views of `ids`; a special token shows its own spelling, any other its bytes."""
    table = tokenizer.table
    views = []
    for token_id, supervised in zip(ids, mask, strict=True):
        is_special = bool(table.is_special[token_id])
        content = table.special_content.get(token_id) if is_special else None
        data = content if content is not None else bytes(table.values[token_id].as_py())
        views.append(TokenView(token_id, spell(data), is_special, supervised))
    return tuple(views)


def spell(data: bytes) -> str:
    """Bytes as visible text: blanks drawn, control characters escaped, bytes of half a character as `<E2 82>`."""
    # Surrogates stand for the bytes that belong to no whole character.
    text = data.decode("utf-8", errors="surrogateescape")
    pieces = []
    for is_stray, run in groupby(text, key=lambda char: "\udc80" <= char <= "\udcff"):
        if is_stray:
            pieces.append("<" + " ".join(f"{ord(char) - 0xDC00:02X}" for char in run) + ">")
        else:
            pieces += [VISIBLE.get(char) or (char if char.isprintable() else f"\\u{ord(char):04x}") for char in run]
    return "".join(pieces)


def pair_chunks(
    student: Sequence[TokenView],
    teacher: Sequence[TokenView],
    student_chunk_id: Sequence[int],
    teacher_chunk_id: Sequence[int],
    pair_is_correct: Sequence[bool],
) -> tuple[ChunkView, ...]:
    """Walk both sides at once, in reading order. Chunk ids: one a token, -1 for none; pair_is_correct: one a chunk."""
    teacher_runs = list(_runs(teacher, teacher_chunk_id))
    place = {chunk: at for at, (chunk, _) in enumerate(teacher_runs) if chunk >= 0}
    chunks: list[ChunkView] = []
    waiting = dict(enumerate(teacher_runs))
    for chunk, tokens in _runs(student, student_chunk_id):
        partner = place.get(chunk)
        if partner is None or partner not in waiting:
            chunks.append(ChunkView(-1, False, tokens, ()))
            continue
        # What stands before the partner without a counterpart comes first; chunks out of order wait for their own turn.
        for at in list(takewhile(partner.__gt__, waiting)):
            if waiting[at][0] < 0:
                chunks.append(ChunkView(-1, False, (), waiting.pop(at)[1]))
        chunks.append(ChunkView(chunk, bool(pair_is_correct[chunk]), tokens, waiting.pop(partner)[1]))
    return (*chunks, *(ChunkView(-1, False, (), alone) for _, alone in waiting.values()))


def _runs(tokens: Sequence[TokenView], chunk_ids: Sequence[int]) -> Iterator[tuple[int, tuple[TokenView, ...]]]:
    """(chunk id, its tokens), in order; every token without a chunk stands alone."""
    numbered = enumerate(zip(chunk_ids, tokens, strict=True))
    for (chunk, _), group in groupby(numbered, key=lambda item: (item[1][0], item[0] if item[1][0] < 0 else -1)):
        yield chunk, tuple(token for _, (_, token) in group)
