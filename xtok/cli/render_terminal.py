"""A row in the terminal: the student's line over the teacher's, chunks in alternating colours, columns in step.

Colour is never the only sign: `|` parts the tokens of a chunk, `[ ]` encloses tokens without a counterpart, `!` opens a chunk
that is not correct, and ⟦name⟧ opens a region of a chat, ⟦/⟧ closes it. So the same text can be read in a log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from xtok.cli.chat_view import ShownText
from xtok.cli.row_view import ChunkView, RowView, TokenView
from xtok.cli.visible import visible

__all__ = ["print_row"]

COLOURS = ("cyan", "green", "yellow", "magenta", "blue")
REGION_COLOURS = {"reasoning": "magenta", "close": "yellow", "answer": "green", "eot": "cyan"}
GAP = 1
MAX_CONTEXT = 400  # characters of a chat before its final turn, where not all is asked for


def print_row(row: RowView, console: Console, *, max_lines: int | None = None) -> None:
    """Print one row, wrapped at the console's width. max_lines: at most so many pairs of lines, then how many chunks are left."""
    console.print(Text.assemble((visible(row.sample_id), "bold"), f"  {visible(row.source)}:{row.line}"), soft_wrap=True)
    console.print(Text(row.summary, style="dim"), soft_wrap=True)
    for side in row.shown:
        _print_shown(side if max_lines is None else side.shortened(MAX_CONTEXT), console)
    labels = (f"student {row.student_name}", f"teacher {row.teacher_index} {row.teacher_name}")
    margin = max(map(cell_len, labels)) + 2
    shown = 0
    blocks = list(_blocks(row.chunks, max(console.width - margin, 20)))
    for block in blocks[:max_lines]:
        top, bottom = Text(labels[0].ljust(margin), style="dim"), Text(labels[1].ljust(margin), style="dim")
        for position, chunk in enumerate(block, start=shown):
            _append(top, bottom, chunk, COLOURS[position % len(COLOURS)])
        shown += len(block)
        for line in (top, bottom):
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
        console.print()
    if shown < len(row.chunks):
        console.print(Text(f"… {len(row.chunks) - shown} more chunks (--full shows all)", style="dim"))


def _print_shown(shown: ShownText, console: Console) -> None:
    """A side's rendering: context dim, what is supervised in the colour and the marks of its region."""
    text = Text(f"{shown.label} is shown:\n", style="bold")
    for piece, region in ((visible(piece), region) for piece, region in shown.pieces):
        if region is None:
            text.append(piece, style=Style(dim=True, bold=False))
        else:
            text.append(f"⟦{region}⟧{piece}⟦/⟧", style=Style(color=REGION_COLOURS.get(region), bold=False))
    console.print(text)
    console.print()


def _blocks(chunks: Sequence[ChunkView], width: int) -> Iterator[list[ChunkView]]:
    """Chunks that fit into one line of `width` cells, at least one a line."""
    block: list[ChunkView] = []
    used = 0
    for chunk in chunks:
        size = max(cell_len(_spelling(chunk, chunk.student)), cell_len(_spelling(chunk, chunk.teacher))) + GAP
        if block and used + size > width:
            yield block
            block, used = [], 0
        block.append(chunk)
        used += size
    if block:
        yield block


def _spelling(chunk: ChunkView, tokens: Sequence[TokenView]) -> str:
    text = "|".join(token.text for token in tokens)
    if chunk.chunk_id < 0:
        return f"[{text}]" if tokens else ""
    return text if chunk.is_correct else f"!{text}"


def _append(top: Text, bottom: Text, chunk: ChunkView, colour: str) -> None:
    spellings = [_spelling(chunk, chunk.student), _spelling(chunk, chunk.teacher)]
    width = max(map(cell_len, spellings))
    if chunk.chunk_id < 0:
        style = Style(color="red", dim=True)
    else:
        style = Style(color=colour, underline=not chunk.is_correct)
    for line, spelling in zip((top, bottom), spellings, strict=True):
        line.append(spelling, style=style)
        line.append(" " * (width - cell_len(spelling) + GAP))
