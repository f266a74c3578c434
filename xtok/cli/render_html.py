"""Rows as one HTML file that needs nothing else: no script, no font, no request. All text of the data is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from xtok.cli.chat_view import ShownText
from xtok.cli.row_view import ChunkView, RowView, TokenView
from xtok.cli.visible import visible

__all__ = ["html_page"]

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2rem 0 0; }
p { margin: .2rem 0 .8rem; opacity: .75; }
.row { display: flex; flex-wrap: wrap; gap: .35rem .25rem; font: 14px/1.5 ui-monospace, monospace; }
.chunk { border-radius: .25rem; border-bottom: 3px solid hsl(var(--hue) 70% 50%); background: hsl(var(--hue) 70% 50% / .15); }
.alone { border-bottom: 3px dotted #c33; background: #c333; }
.outside { border-bottom: 3px dotted #8888; }
.incorrect { border-bottom-style: dashed; }
.side { display: block; white-space: pre; min-height: 1.5em; padding: 0 .15rem; }
.side + .side { border-top: 1px solid #8886; }
.token + .token { border-left: 1px solid #888; margin-left: 1px; padding-left: 1px; }
.special { font-style: italic; } .unsupervised { opacity: .55; }
.shown { white-space: pre-wrap; border-left: 3px solid #8886; padding-left: .6rem; font: 13px/1.45 ui-monospace, monospace; }
.shown mark { color: inherit; border-radius: .2rem; background: hsl(var(--hue) 70% 50% / .25); }
.shown mark::before { content: attr(title) " "; font-size: .75em; opacity: .7; }
"""
HUES = (190, 130, 45, 300, 220)
REGION_HUES = {"reasoning": 300, "close": 45, "answer": 130, "eot": 190}


def html_page(rows: Sequence[RowView], *, title: str) -> str:
    """A whole page. Hovering over a token shows its id."""
    body = "\n".join(_row(row) for row in rows)
    legend = (
        "Student line over teacher line. One box is one chunk: the same bytes on both sides. Thin lines part its tokens. "
        "Dotted red: no counterpart; dotted grey, the same for a token that is not under the mask. Dashed: not correct. "
        "Italic: special token. Pale: not under the mask. "
        "A blank is drawn as ·, a line end as ↵."
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(legend)}</p>\n{body}\n</body>\n</html>\n"
    )


def _row(row: RowView) -> str:
    heading = visible(f"{row.sample_id} ({row.source}:{row.line})")
    names = f"student {row.student_name} over teacher {row.teacher_index} {row.teacher_name}"
    chunks = "".join(_chunk(chunk, position) for position, chunk in enumerate(row.chunks))
    shown = "".join(map(_shown, row.shown))
    return f'<h2>{escape(heading)}</h2>\n<p>{escape(names)} · {escape(row.summary)}</p>\n{shown}<div class="row">{chunks}</div>'


def _shown(shown: ShownText) -> str:
    """A chat as one side was shown it, regions marked."""
    pieces = [
        f'<bdi class="unsupervised">{escape(text)}</bdi>'
        if region is None
        else f'<mark title="{escape(region)}" style="--hue:{REGION_HUES.get(region, 220)}">{escape(text)}</mark>'
        for text, region in ((visible(piece), region) for piece, region in shown.pieces)
    ]
    return f'<p>{escape(shown.label)} is shown:</p>\n<div class="shown" dir="auto">{"".join(pieces)}</div>\n'


def _chunk(chunk: ChunkView, position: int) -> str:
    if chunk.chunk_id < 0:
        is_outside = not any(token.supervised for token in (*chunk.student, *chunk.teacher))
        opening = f'<span class="{"outside" if is_outside else "alone"}">'
    else:
        kind = "chunk" if chunk.is_correct else "chunk incorrect"
        opening = f'<span class="{kind}" style="--hue:{HUES[position % len(HUES)]}">'
    return f"{opening}{_side(chunk.student)}{_side(chunk.teacher)}</span>"


def _side(tokens: Sequence[TokenView]) -> str:
    # <bdi> keeps right-to-left text from reordering its neighbours.
    return '<span class="side">' + "".join(_token(token) for token in tokens) + "</span>"


def _token(token: TokenView) -> str:
    kinds = " ".join(["token", *["special"] * token.is_special, *["unsupervised"] * (not token.supervised)])
    return f'<bdi class="{kinds}" title="id {token.id}">{escape(token.text)}</bdi>'
