"""The slow, independent reading of a rendered chat: token by token, in plain Python, found by text instead of by structure.

Good for renderings whose last occurrence of the content is the final turn, and for tokens that spell the rendering byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from xtok.tokenizers import TokenizerAdapter

__all__ = ["SlowTurn", "slow_chunks", "slow_turn", "token_texts"]


def token_texts(adapter: TokenizerAdapter, ids: list[int]) -> list[bytes]:
    """Bytes of each token, special tokens by their own text."""
    specials = adapter.table.special_content
    return [specials[token_id] if token_id in specials else adapter.table.values[token_id].as_py() for token_id in ids]


@dataclass(frozen=True)
class SlowTurn:
    """places: bytes (start, end) of each token, counted from the content's first visible byte. supervised: token indices, the end of
    turn left out. eot: its token, or None. length: bytes of the visible content. lead, tail: blank bytes the rendering holds before and
    after it, as the source has them.
    """

    places: list[tuple[int, int]]
    supervised: list[int]
    eot: int | None
    length: int
    lead: int
    tail: int


def slow_turn(adapter: TokenizerAdapter, text: str, shown: str, ids: list[int], end_mark: str) -> SlowTurn | None:
    """The final turn of `text`, before its last `end_mark`; None where the tokens do not spell the text.

    shown: the content with the outer blanks that the template keeps.
    """
    core = shown.strip()
    pieces = token_texts(adapter, ids)
    data = text.encode()
    if b"".join(pieces) != data:
        return None
    start = len(text[: text.rindex(core, 0, text.rindex(end_mark))].encode())
    end = start + len(core.encode())
    before, after = shown[: shown.index(core)], shown[shown.index(core) + len(core) :]
    lead, tail = len(before.encode()), len(after.encode())
    places, at = [], -start
    for piece in pieces:
        places.append((at, at + len(piece)))
        at += len(piece)
    low, high = -lead, end - start + tail
    supervised = [index for index, (begin, stop) in enumerate(places) if begin < high and stop > low]
    eot = None
    for index, (begin, _) in enumerate(places):
        if begin >= high and pieces[index].decode(errors="replace").strip():
            eot = index
            break
    return SlowTurn(places, supervised, eot, end - start, lead, tail)


def slow_chunks(student: SlowTurn, teacher: SlowTurn) -> tuple[dict[int, int], dict[int, int], int]:
    """(student token -> chunk, teacher token -> chunk, number of chunks): content chunks by place, the end-of-turn pair last."""
    low = -min(student.lead, teacher.lead)
    high = student.length + min(student.tail, teacher.tail)
    sides = []
    for turn in (student, teacher):
        held = {
            index: (max(begin, low), stop)
            for index, (begin, stop) in enumerate(turn.places)
            if begin < high and stop > low and stop <= high and begin < stop
        }
        sides.append(held)
    shared = sorted({cut for place in sides[0].values() for cut in place} & {cut for place in sides[1].values() for cut in place})
    numbers: tuple[dict[int, int], dict[int, int]] = ({}, {})
    count = 0
    for begin, stop in pairwise(shared):
        inside = [[i for i, place in held.items() if begin <= place[0] and place[1] <= stop] for held in sides]
        widths = [sum(held[i][1] - held[i][0] for i in chosen) for held, chosen in zip(sides, inside, strict=True)]
        if widths == [stop - begin] * 2:
            for number, chosen in zip(numbers, inside, strict=True):
                number.update(dict.fromkeys(chosen, count))
            count += 1
    if student.eot is not None and teacher.eot is not None:
        numbers[0][student.eot] = numbers[1][teacher.eot] = count
        count += 1
    return numbers[0], numbers[1], count
