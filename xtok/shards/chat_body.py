"""Chat mode: one block of conversations in, the columns of every side out, the rendered ones too.

Each side renders the whole conversation with its own template, encodes the texts of the block in one call, and finds the final turn
in the ids; each teacher is aligned on flat arrays. A row goes to the rejects with the side, stage and reason of its first refusal: the
student's takes it out of every table, a teacher's makes it null there.

Shape legend: R = rows of the block that the student accepts, N = tokens of one side of those rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.config import PreprocessConfig
from schemas.manifest import SideCounts
from schemas.plan import PlannedSide
from schemas.tables import reject_side
from xtok.align.flat import FlatAlignment
from xtok.chat import ChatAlignment, LocatedPart, RenderedChat, align_chats, keep_rows
from xtok.errors import RowRefused
from xtok.shards.alignments import AlignedSide, aligned_counts
from xtok.shards.chat_sides import LoadedChatSide
from xtok.shards.columns import row_sums
from xtok.shards.rendered_table import HeldRendering, regions_column, rendered_columns
from xtok.shards.rows import Reject, RowBlock
from xtok.shards.text_body import BlockTables
from xtok.shards.text_columns import by_reason, student_columns, teacher_columns
from xtok.shards.timing import stage

__all__ = ["ChatBody", "ChatRun"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChatRun:
    """How this attempt at a part goes about it. reference, by_jinja: sides whose fast tokenizer, or renderer, was found to differ.

    held: what an earlier run rendered and left whole, by side.
    """

    render_date: datetime.date
    reference: frozenset[int | None] = frozenset()
    by_jinja: frozenset[int | None] = frozenset()
    held: Mapping[int | None, HeldRendering] = field(default_factory=dict)


class ChatBody:
    """Turns blocks of rows into columns, for the student and the teachers in `teachers` (indices)."""

    def __init__(
        self,
        config: PreprocessConfig,
        student: PlannedSide,
        planned_teachers: tuple[PlannedSide, ...],
        teachers: Iterable[int],
        run: ChatRun,
    ) -> None:
        self._drop_first = config.drop_first_assistant_chunk_kl_by_teacher or (False,) * len(config.teachers)
        self._held = run.held

        def load(index: int | None) -> LoadedChatSide:
            side, planned = (config.student, student) if index is None else (config.teachers[index], planned_teachers[index])
            reference, by_jinja = index in run.reference, index in run.by_jinja
            return LoadedChatSide(config, side, planned, index, run.render_date, reference=reference, by_jinja=by_jinja)

        self._student = load(None)
        self._teachers = {index: load(index) for index in teachers}

    def tables(self, block: RowBlock) -> BlockTables:
        """All sides of one block. Raises BackendDiffers, RowRefused never."""
        everything = self._located(self._student, block, range(len(block.idx)))
        accepted = _is_accepted(everything.refusals)
        rows = np.flatnonzero(accepted)
        student = keep_rows(everything, accepted)
        rejects = _rejects(block, range(len(block.idx)), everything.refusals, None)
        columns = student_columns(
            block, rows, student.tokens, token_mask=student.token_mask, regions=regions_column(student.regions)
        )
        counts = _own_counts(student, everything.refusals, rejects).model_copy(update={"num_rows": len(rows), "num_null_rows": 0})
        tables = BlockTables(columns, student_rejects=rejects, student_counts=counts)
        names = {name: columns[name] for name in ("sample_id", "idx")}
        tables.rendered[None] = rendered_columns(names, student.chats)
        for index, side in self._teachers.items():
            teacher = self._located(side, block, rows.tolist())
            self._add_teacher(tables, index, block, rows, student, teacher)
        return tables

    def _located(self, side: LoadedChatSide, block: RowBlock, rows: Sequence[int]) -> LocatedPart:
        """These rows of the block on one side, refusals included."""
        held = self._held.get(side.index)
        if held is None:
            with stage("render"):
                part = side.render([block.conversation[row] for row in rows])
        else:
            part = held.part([block.idx[row] for row in rows], [(block.source[row], block.line[row]) for row in rows])
        with stage("locate"):
            return side.locate(part)

    def _add_teacher(
        self, tables: BlockTables, index: int, block: RowBlock, rows: IntArray, student: LocatedPart, teacher: LocatedPart
    ) -> None:
        with stage("align"):
            aligned = align_chats(student, teacher, drop_first_chunk=self._drop_first[index])
        refusals = [own or pair for own, pair in zip(teacher.refusals, aligned.refusals, strict=True)]
        valid = _is_accepted(refusals)
        chats: list[RenderedChat | None] = [
            chat if kept else None for chat, kept in zip(teacher.chats, valid.tolist(), strict=True)
        ]
        flat, left_out = _keep_aligned(aligned, student, teacher, valid)
        student, teacher = keep_rows(student, valid), keep_rows(teacher, valid)
        side = self._aligned_side(student, teacher, flat)
        rejects = _rejects(block, rows.tolist(), refusals, index)
        counts = _own_counts(teacher, refusals, rejects).model_dump(exclude_defaults=True)
        names = {name: tables.student[name] for name in ("sample_id", "idx")}
        tables.rendered[index] = rendered_columns(names, chats)
        tables.teachers[index] = names | teacher_columns(
            side, student.tokens.offsets, valid, token_mask=teacher.token_mask, regions=_regions_of(teacher, valid)
        )
        tables.teacher_rejects[index] = rejects
        tables.teacher_counts[index] = aligned_counts(side, student.tokens).model_copy(
            update=counts | {"num_left_out": int(self._counts(student, left_out).sum())}
        )

    def _aligned_side(self, student: LocatedPart, teacher: LocatedPart, flat: FlatAlignment) -> AlignedSide:
        supervised = self._counts(student, student.token_mask)
        return AlignedSide(teacher.tokens, flat, self._counts(student, flat.student_chunk_id >= 0), supervised)

    def _counts(self, student: LocatedPart, tokens: BoolArray) -> IntArray:
        """int64 [R]: how many of these tokens (bool [N]) count for coverage, that is, are supervised and no special ones."""
        is_special = self._student.adapter.table.is_special[student.tokens.ids]
        return row_sums(tokens & student.token_mask & ~is_special, student.tokens.offsets)


def _is_accepted(refusals: Sequence[RowRefused | None]) -> BoolArray:
    return np.array([refusal is None for refusal in refusals], dtype=bool)


def _keep_aligned(
    aligned: ChatAlignment, student: LocatedPart, teacher: LocatedPart, valid: BoolArray
) -> tuple[FlatAlignment, BoolArray]:
    """Alignment and left-out tokens of the rows that `valid` marks; the others have no chunks."""
    flat = aligned.flat
    if bool(valid.all()):
        return flat, aligned.left_out
    ours, theirs = (np.repeat(valid, side.tokens.lengths) for side in (student, teacher))
    num_chunks = flat.num_chunks[valid]
    kept = FlatAlignment(
        flat.student_chunk_id[ours],
        flat.teacher_chunk_id[theirs],
        num_chunks,
        flat.pair_is_correct,
        np.append(0, np.cumsum(num_chunks)),
        flat.route[valid],
    )
    return kept, aligned.left_out[ours]


def _regions_of(part: LocatedPart, valid: BoolArray) -> pa.Array:
    """The regions column of all R rows; part: the rows that `valid` marks."""
    kept = iter(part.regions)
    return regions_column([next(kept) if is_valid else None for is_valid in valid.tolist()])


def _rejects(block: RowBlock, rows: Sequence[int], refusals: Sequence[RowRefused | None], index: int | None) -> list[Reject]:
    found = []
    for row, refusal in zip(rows, refusals, strict=True):
        if refusal is not None:
            place = block.source[row], block.line[row], block.sample_id[row]
            found.append(Reject(*place, refusal.stage, reject_side(index), str(refusal.reason), refusal.message))
    return found


def _own_counts(part: LocatedPart, refusals: Sequence[RowRefused | None], rejects: list[Reject]) -> SideCounts:
    """What the manifest says about one side alone. part: accepted rows only; refusals: of all rows that it was given."""
    offsets, mask = part.tokens.offsets, part.token_mask
    control = mask & part.side.is_control[part.tokens.ids]
    ends = (offsets[:-1] + part.eot_index)[part.eot_index >= 0]
    reasoning = [chat.reasoning for chat in part.chats if chat is not None]
    return SideCounts(
        num_rows=len(refusals),
        num_null_rows=len(refusals) - len(part.chats),
        num_tokens=len(part.tokens.ids),
        num_special_in_text=int(control.sum() - control[ends].sum()),
        num_rendered=sum(refusal is None or refusal.stage != "render" for refusal in refusals),
        num_mask_tokens=int(mask.sum()),
        num_thinking_tokens=sum(_num_thinking(part, row) for row in range(len(part.chats))),
        num_thinking_rows=reasoning.count("shown"),
        num_dropped_reasoning=reasoning.count("dropped"),
        rejects=by_reason(rejects),
    )


def _num_thinking(part: LocatedPart, row: int) -> int:
    """Supervised tokens of a row from the beginning of its reasoning to the end of its closing mark."""
    spans = [span for span in part.regions[row] if span.name in ("reasoning", "close")]
    if not spans:
        return 0
    first = int(part.tokens.offsets[row])
    return int(part.token_mask[first + spans[0].start : first + spans[-1].end].sum())
