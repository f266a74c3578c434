"""Aligning the final turns of two located sides.

The pieces of text both sides share (`xtok.chat.pieces`) lie one after the other on one line per row, apart from one another, the
end-of-turn pair last, and `xtok.align` cuts them. What takes no part in KD here and stays in the CE mask:
- a token that crosses the end of a piece; one that crosses its start, unless the piece is a whole content, where it counts as
  beginning at the border (a SentencePiece "▁answer");
- tokens on what the two templates spell differently; special tokens inside the content, where a side allows them.

Shape legend: D = rows, N = tokens of one side over all rows, K = pieces of all rows, M = tokens of one side in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from xtok.align.lattice import BYTE_ROUTE, OFFSET_ROUTE, Chunks, FlatAlignment, TokenPlaces, chunks_from_cuts, keep_chunks
from xtok.chat.changed import ChangedPieces, align_changed
from xtok.chat.locate import LocatedPart
from xtok.chat.pieces import Piece, shared_pieces
from xtok.chat.places import IntArray, PieceTokens, token_ranges
from xtok.errors import RowRefused

__all__ = ["ChatAlignment", "align_chats"]

_REGION_CODES: Final = {"reasoning": 0, "close": 1, "answer": 2, "eot": 3}


@dataclass(frozen=True, slots=True)
class ChatAlignment:
    """Alignment of D rows (`FlatAlignment`, over all tokens of each side) and the teacher's refusals that only the pair shows.

    A row that either side or the pair refuses has no chunks. left_out: bool [Ns], student tokens that stand in a chunk but for
    `drop_first_chunk` and `kd_alignment_regions`.
    """

    flat: FlatAlignment
    refusals: list[RowRefused | None]
    left_out: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Layout:
    """Columns of all K pieces: row, region code, place on the row's line, length in bytes; and per side the first byte."""

    rows: list[int] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    student_starts: list[int] = field(default_factory=list)
    teacher_starts: list[int] = field(default_factory=list)
    left_out: list[tuple[int, int, int]] = field(default_factory=list)  # piece, start, end
    eot_base: dict[int, int] = field(default_factory=dict)

    def add(self, row: int, pieces: list[Piece], *, is_changed: bool) -> None:
        """A row's pieces, at least one place apart, so that no chunk reaches over. A changed row's chunks need twice the room."""
        base = 0
        for piece in pieces:
            self.left_out += [(len(self.rows), start, end) for start, end in piece.left_out]
            self.rows.append(row)
            self.regions.append(_REGION_CODES[piece.name])
            self.bases.append(base)
            self.lengths.append(piece.student[1] - piece.student[0])
            self.student_starts.append(piece.student[0])
            self.teacher_starts.append(piece.teacher[0])
            base += self.lengths[-1] * (2 if is_changed else 1) + 2
        self.eot_base[row] = base


def align_chats(student: LocatedPart, teacher: LocatedPart, *, drop_first_chunk: bool = False) -> ChatAlignment:
    """Align the rows both sides accept. The parts hold the same rows in the same order (ValueError otherwise).

    drop_first_chunk: leave out the first content pair of each final message. `kd_alignment_regions` of the student's options keep
    KD to a subset of regions. What is left is numbered afresh.
    """
    if len(student.chats) != len(teacher.chats):
        raise ValueError(f"the student's part has {len(student.chats)} rows, the teacher's {len(teacher.chats)}")
    if not student.chats:
        none = np.empty(0, dtype=np.int32)
        nothing = Chunks(none, none, np.empty(0, dtype=np.int64))
        return ChatAlignment(FlatAlignment.from_chunks(nothing), [], np.empty(0, dtype=bool))
    layout = _Layout()
    refusals: list[RowRefused | None] = [None] * len(student.chats)
    is_changed = ~(student.text.by_bytes & teacher.text.by_bytes)
    for row, (ours, theirs) in enumerate(zip(student.chats, teacher.chats, strict=True)):
        if student.refusals[row] is not None or teacher.refusals[row] is not None or ours is None or theirs is None:
            continue
        try:
            pieces = list(shared_pieces(student.text.data[row], ours, teacher.text.data[row], theirs, teacher.side.name))
        except RowRefused as error:
            refusals[row] = error.with_traceback(None)
        else:
            layout.add(row, pieces, is_changed=bool(is_changed[row]))
    ended = [row for row in layout.eot_base if student.eot_index[row] >= 0 and teacher.eot_index[row] >= 0]
    sides = [_Placed(student, layout, layout.student_starts, ended), _Placed(teacher, layout, layout.teacher_starts, ended)]
    route = np.full(len(student.chats), BYTE_ROUTE, dtype=np.uint8)
    changed = _place_changed(layout, is_changed, sides, (student, teacher))
    flat = FlatAlignment.from_chunks(chunks_from_cuts(sides[0].places(), sides[1].places()), route=route)
    if changed is not None:
        flat = _with_changed(flat, layout, changed)
    kept = _kept(flat, student, teacher, sides[0].regions, drop_first_chunk)
    left_out: npt.NDArray[np.bool_] = (flat.student_chunk_id >= 0) & (kept.student_chunk_id < 0)
    return ChatAlignment(kept, refusals, left_out)


class _Placed:
    """One side's tokens on their row's line. pieces: the M tokens that lie in pieces and take part. regions: int8 [N], -1 for none."""

    def __init__(self, part: LocatedPart, layout: _Layout, piece_starts: list[int], ended: list[int]) -> None:
        self.offsets = part.tokens.offsets
        num_tokens = len(part.tokens.ids)
        self.starts, self.ends = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
        self.active, self.regions = np.zeros(num_tokens, dtype=bool), np.full(num_tokens, -1, dtype=np.int8)
        self.pieces = _piece_tokens(part, layout, np.array(piece_starts, dtype=np.int64))
        index, owner = self.pieces.index, self.pieces.piece
        bases = np.array(layout.bases, dtype=np.int64)[owner]
        self.starts[index], self.ends[index] = bases + self.pieces.starts, bases + self.pieces.ends
        self.active[index] = True
        self.regions[index] = np.array(layout.regions, dtype=np.int8)[owner]
        rows = np.array(ended, dtype=np.int64)
        eot = self.offsets[rows] + part.eot_index[rows]
        self.starts[eot] = [layout.eot_base[row] for row in ended]
        self.ends[eot], self.active[eot], self.regions[eot] = self.starts[eot] + 1, True, _REGION_CODES["eot"]

    def places(self) -> TokenPlaces:
        """What `chunks_from_cuts` takes."""
        return TokenPlaces(self.starts, self.ends, self.offsets, self.active)


def _piece_tokens(part: LocatedPart, layout: _Layout, begin: IntArray) -> PieceTokens:
    """The tokens of one side that take part, each with its piece and its bytes from the piece's start."""
    rows, lengths = np.array(layout.rows, dtype=np.int64), np.array(layout.lengths, dtype=np.int64)
    index, piece = token_ranges(*part.line().overlapping(rows, begin, begin + lengths))
    low, high = part.text.starts[index] - begin[piece], part.text.ends[index] - begin[piece]
    may_cross = np.array([not _is_separate(part, row) for row in layout.rows], dtype=bool)[piece]
    takes_part = (high <= lengths[piece]) & (may_cross | (low >= 0)) & ~part.side.is_control[part.tokens.ids[index]]
    for number, start, end in layout.left_out:
        takes_part &= ~((piece == number) & (low < end) & (high > start))
    return PieceTokens(index[takes_part], piece[takes_part], np.maximum(low[takes_part], 0), high[takes_part])


def _is_separate(part: LocatedPart, row: int) -> bool:
    chat = part.chats[row]
    return chat is not None and chat.separate


def _place_changed(
    layout: _Layout, is_changed: npt.NDArray[np.bool_], sides: list[_Placed], parts: tuple[LocatedPart, LocatedPart]
) -> ChangedPieces | None:
    """Give tokens of rows that a tokenizer changed the places of the chunks `xtok.align` finds for them; None without such rows."""
    wanted = np.flatnonzero(is_changed[np.array(layout.rows, dtype=np.int64)])
    if not len(wanted):
        return None
    texts = [parts[0].text.data[layout.rows[k]][layout.student_starts[k] :][: layout.lengths[k]] for k in wanted.tolist()]
    changed = align_changed(wanted, texts, (parts[0], sides[0].pieces), (parts[1], sides[1].pieces))
    bases = np.array(layout.bases, dtype=np.int64)
    for side, places in zip(sides, (changed.student, changed.teacher), strict=True):
        side.active[places.index] = places.chunk >= 0
        # Chunk k stands at place 2k: its last token covers the place, those before stand at its beginning.
        side.starts[places.index] = side.ends[places.index] = bases[places.piece] + 2 * places.chunk
        is_last = np.append((places.chunk[1:] != places.chunk[:-1]) | (places.piece[1:] != places.piece[:-1]), True)
        side.ends[places.index[is_last[: len(places.index)]]] += 1
    return changed


def _with_changed(flat: FlatAlignment, layout: _Layout, changed: ChangedPieces) -> FlatAlignment:
    """Route and correctness of the changed rows' chunks, taken over piece by piece."""
    correct, route = flat.pair_is_correct.copy(), flat.route.copy()
    next_chunk = flat.pair_offsets[:-1].copy()
    for piece, by_offset, judged in zip(changed.pieces.tolist(), changed.by_offset.tolist(), changed.correct, strict=True):
        row = layout.rows[piece]
        correct[next_chunk[row] : next_chunk[row] + len(judged)] = judged
        next_chunk[row] += len(judged)
        if by_offset:
            route[row] = OFFSET_ROUTE
    return replace(flat, pair_is_correct=correct, route=route)


def _kept(
    flat: FlatAlignment, student: LocatedPart, teacher: LocatedPart, regions: npt.NDArray[np.int8], drop_first_chunk: bool
) -> FlatAlignment:
    """The alignment without the first content pairs and without regions that KD is not asked for."""
    wanted = student.side.options.kd_alignment_regions
    if wanted is None and not drop_first_chunk:
        return flat
    offsets = student.tokens.offsets
    in_chunk = np.flatnonzero(flat.student_chunk_id >= 0)
    chunk = flat.student_chunk_id[in_chunk] + np.repeat(flat.pair_offsets[:-1], student.tokens.lengths)[in_chunk]
    region_of_chunk = np.full(len(flat.pair_is_correct), -1, dtype=np.int8)
    region_of_chunk[chunk] = regions[in_chunk]
    keep = np.ones(len(region_of_chunk), dtype=bool)
    if wanted is not None:
        keep = np.isin(region_of_chunk, [_REGION_CODES[name] for name in wanted])
    if drop_first_chunk:
        first = flat.pair_offsets[:-1][flat.num_chunks > 0]
        keep[first[region_of_chunk[first] != _REGION_CODES["eot"]]] = False
    return keep_chunks(flat, keep, offsets, teacher.tokens.offsets)
