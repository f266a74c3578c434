"""Which bytes of the final turn two sides share, piece by piece, checked before anything is aligned.

Every segment (the whole content, or each native region) must hold the same text on both sides. What may differ, and is left out: outer
blanks of the content that only one template shows, blanks before the tool calls, and a bare true / false / null that one template
spells True / False / None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

from schemas.tables import RejectReason
from xtok.chat.rendered import RegionSpan, RenderedChat
from xtok.errors import RowRefused

__all__ = ["Piece", "shared_pieces"]

_LITERALS: Final = {b"true": b"True", b"false": b"False", b"null": b"None"}
_WORD: Final = re.compile(rb"\b(?:true|True|false|False|null|None)\b")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text both sides hold. name: its region. student, teacher: its bytes (start, end) in each rendering, equally long.

    left_out: bytes, from the piece's start, of literals that the sides spell differently.
    """

    name: str
    student: tuple[int, int]
    teacher: tuple[int, int]
    left_out: tuple[tuple[int, int], ...] = ()


def shared_pieces(ours: bytes, student: RenderedChat, theirs: bytes, teacher: RenderedChat, side: str) -> Iterator[Piece]:
    """The pieces of one row, in order. RowRefused (region_mismatch) where the two sides do not hold the same text."""
    names = [[span.name for span in chat.segments] for chat in (student, teacher)]
    if names[0] != names[1]:
        _refuse(side, f"the student's final turn has the regions {names[0]}, the {side} one {names[1]}")
    for left, right in zip(student.segments, teacher.segments, strict=True):
        texts = ours[left.start : left.end], theirs[right.start : right.end]
        if texts[0] == texts[1]:
            yield Piece(left.name, left[1:], right[1:])
        elif student.separate:
            yield from _answer_pieces(left, right, ours, theirs, (student.calls_start, teacher.calls_start), side)
        else:
            yield _common_core(left, right, texts, side)


def _common_core(left: RegionSpan, right: RegionSpan, texts: tuple[bytes, bytes], side: str) -> Piece:
    """Both sides hold the same content but not the same outer blanks: the text without those only one of them shows."""
    decoded = [text.decode() for text in texts]
    core = decoded[0].strip()
    heads = [text[: len(text) - len(text.lstrip())] for text in decoded]
    tails = [text[len(text.rstrip()) :] for text in decoded]
    head, tail = min(heads, key=len), min(tails, key=len)
    if core != decoded[1].strip() or not all(h.endswith(head) for h in heads) or not all(t.startswith(tail) for t in tails):
        _refuse(side, f"the {side} template shows another final content than the student's")
    length = len((head + core + tail).encode())
    starts = [span.start + len(h[: len(h) - len(head)].encode()) for span, h in zip((left, right), heads, strict=True)]
    return Piece(left.name, (starts[0], starts[0] + length), (starts[1], starts[1] + length))


def _answer_pieces(
    left: RegionSpan, right: RegionSpan, ours: bytes, theirs: bytes, calls: tuple[int, int], side: str
) -> Iterator[Piece]:
    """Answers that differ: in the blanks before the tool calls, in bare literals, or in what must not differ."""
    if calls[0] < 0 or calls[1] < 0:
        _refuse(side, f"the {side} template shows another {left.name} than the student's")
    heads = (ours[left.start : calls[0]], theirs[right.start : calls[1]])
    contents = [head.rstrip() for head in heads]
    if contents[0] != contents[1]:
        _refuse(side, f"the {side} template shows another content before the tool calls than the student's")
    texts = (ours[calls[0] : left.end], theirs[calls[1] : right.end])
    differing = _differing_literals(*texts)
    if differing is None:
        _refuse(side, f"the {side} template writes tool calls otherwise than the student's: {texts[1][:60]!r}, {texts[0][:60]!r}")
    if heads[0] == heads[1]:
        shift = len(heads[0])
        moved = tuple((start + shift, end + shift) for start, end in differing)
        yield Piece(left.name, left[1:], right[1:], moved)
        return
    if contents[0]:
        length = len(contents[0])
        yield Piece(left.name, (left.start, left.start + length), (right.start, right.start + length))
    yield Piece(left.name, (calls[0], left.end), (calls[1], right.end), differing)


def _differing_literals(ours: bytes, theirs: bytes) -> tuple[tuple[int, int], ...] | None:
    """Places of bare literals that the two texts spell differently; None where they differ in anything else.

    JSON's and Python's spelling of a literal are equally long, so everything else stands at the same place.
    """
    if len(ours) != len(theirs):
        return None
    found, rest = [], bytearray(ours)
    for word in _WORD.finditer(ours):
        start, end = word.span()
        other = theirs[start:end]
        if other != word[0] and (_LITERALS.get(word[0]) == other or _LITERALS.get(other) == word[0]):
            found.append((start, end))
            rest[start:end] = other
    return tuple(found) if bytes(rest) == theirs else None


def _refuse(side: str, message: str) -> NoReturn:
    raise RowRefused(RejectReason.REGION_MISMATCH, message, stage="align", side=side)
