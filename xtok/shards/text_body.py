"""Text mode: one block of accepted rows in, the columns of every side out.

Student and teachers encode the whole block; the overlength policy decides each row; each teacher is aligned on flat arrays. The
`reference` sides encode without the fast backend, after it differed somewhere in the part.

Shape legend: R = rows of the block that the student accepts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.config import PreprocessConfig
from schemas.manifest import SideCounts
from schemas.plan import PlannedSide
from xtok.align.flat import FlatAlignment, shared_cuts
from xtok.align.lattice import align_flat
from xtok.shards.alignments import AlignedSide, align_rows, aligned_counts, covered_tokens, slice_alignment
from xtok.shards.rows import Reject, RowBlock
from xtok.shards.sides import LoadedSide
from xtok.shards.text_columns import (
    by_reason,
    no_cut,
    no_tokens,
    no_tokens_on,
    overlong,
    rows_of,
    student_columns,
    teacher_columns,
)
from xtok.shards.windows import Windows, slice_rows, truncate, windows_of
from xtok.tokenizers import FlatTokens

__all__ = ["BlockTables", "TextBody"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class BlockTables:
    """The columns of one block, by side, its rejects in row order, and its counts. rendered: chat mode, None for the student."""

    student: dict[str, pa.Array]
    teachers: dict[int, dict[str, pa.Array]] = field(default_factory=dict)
    student_rejects: list[Reject] = field(default_factory=list)
    teacher_rejects: dict[int, list[Reject]] = field(default_factory=dict)
    student_counts: SideCounts = field(default_factory=SideCounts)
    teacher_counts: dict[int, SideCounts] = field(default_factory=dict)
    rendered: dict[int | None, dict[str, pa.Array]] = field(default_factory=dict)


class TextBody:
    """Turns blocks of rows into columns, for the student and the teachers in `teachers` (indices)."""

    def __init__(
        self,
        config: PreprocessConfig,
        student: PlannedSide,
        planned_teachers: tuple[PlannedSide, ...],
        teachers: Iterable[int],
        reference: frozenset[int | None] = frozenset(),
    ) -> None:
        self._overlength = config.overlength
        self._student = LoadedSide(config.student, student, None, config.proof_every, reference=None in reference)
        self._teachers = {
            index: LoadedSide(
                config.teachers[index], planned_teachers[index], index, config.proof_every, reference=index in reference
            )
            for index in teachers
        }

    def tables(self, block: RowBlock) -> BlockTables:
        """All sides of one block. Raises BackendDiffers, RowRefused never."""
        content = self._student.encode(block.text)
        teacher_content = {index: side.encode(block.text) for index, side in self._teachers.items()}
        if self._overlength == "split":
            return self._split(block, content, teacher_content)
        return self._one_row_each(block, content, teacher_content)

    def _one_row_each(self, block: RowBlock, content: FlatTokens, teacher_content: dict[int, FlatTokens]) -> BlockTables:
        keep, rejects = self._accepted(block, content)
        rows = np.flatnonzero(keep)
        kept, was_cut = truncate(rows_of(content, rows, keep), self._student.capacity)
        student_tokens = self._student.wrapped(kept)
        counts = SideCounts(
            num_rows=len(rows),
            num_tokens=len(student_tokens.ids),
            num_truncated=int(was_cut.sum()),
            num_special_in_text=self._student.num_special_in(kept),
            rejects=by_reason(rejects),
        )
        tables = BlockTables(student_columns(block, rows, student_tokens), student_rejects=rejects, student_counts=counts)
        for index, side in self._teachers.items():
            self._add_teacher(tables, side, block, rows, student_tokens, rows_of(teacher_content[index], rows, keep))
        return tables

    def _accepted(self, block: RowBlock, content: FlatTokens) -> tuple[BoolArray, list[Reject]]:
        """bool [rows of the block]: what the student accepts; and a reject for each other row."""
        lengths = content.lengths
        keep = lengths > 0
        rejects = {int(row): no_tokens(block, int(row), self._student) for row in np.flatnonzero(~keep)}
        if self._overlength == "reject":
            for row in np.flatnonzero(lengths > self._student.capacity):
                rejects[int(row)] = overlong(block, int(row), self._student, int(lengths[row]))
                keep[row] = False
        return keep, [rejects[row] for row in sorted(rejects)]

    def _add_teacher(
        self,
        tables: BlockTables,
        side: LoadedSide,
        block: RowBlock,
        rows: IntArray,
        student_tokens: FlatTokens,
        content: FlatTokens,
    ) -> None:
        lengths = content.lengths
        valid = lengths > 0
        rejects = {int(row): no_tokens(block, int(rows[row]), side) for row in np.flatnonzero(~valid)}
        if self._overlength == "reject":
            for row in np.flatnonzero(lengths > side.capacity):
                rejects[int(row)] = overlong(block, int(rows[row]), side, int(lengths[row]))
                valid[row] = False
        kept_rows = np.flatnonzero(valid)
        kept, was_cut = truncate(rows_of(content, kept_rows, valid), side.capacity)
        tokens = side.wrapped(kept)
        student_side = rows_of(student_tokens, kept_rows, valid)
        text_rows = rows[kept_rows]
        alignment = align_rows(self._student, side, student_side, tokens, block.text, text_rows, with_specials=True)
        aligned = self._aligned(tokens, alignment, student_side)
        found = [rejects[row] for row in sorted(rejects)]
        counts = aligned_counts(aligned, student_side).model_copy(
            update={
                "num_rows": len(rows),
                "num_null_rows": len(rows) - len(kept_rows),
                "num_truncated": int(was_cut.sum()),
                "num_special_in_text": side.num_special_in(kept),
                "rejects": by_reason(found),
            }
        )
        names = {name: tables.student[name] for name in ("sample_id", "idx")}
        assert side.index is not None, "the student is no teacher"
        tables.teachers[side.index] = names | teacher_columns(aligned, student_side.offsets, valid)
        tables.teacher_rejects[side.index] = found
        tables.teacher_counts[side.index] = counts

    def _aligned(self, tokens: FlatTokens, alignment: FlatAlignment, student_tokens: FlatTokens) -> AlignedSide:
        covered, supervised = covered_tokens(alignment, student_tokens, self._student.adapter.table.is_special)
        return AlignedSide(tokens, alignment, covered, supervised)

    def _split(self, block: RowBlock, content: FlatTokens, teacher_content: dict[int, FlatTokens]) -> BlockTables:
        """Every row a window of a document: all sides are needed to find where all may be cut."""
        contents = [content, *teacher_content.values()]
        sides = [self._student, *self._teachers.values()]
        has_tokens = np.all([tokens.lengths > 0 for tokens in contents], axis=0)
        rejects = {int(row): no_tokens_on(block, int(row), sides, contents) for row in np.flatnonzero(~has_tokens)}
        rows = np.flatnonzero(has_tokens)
        documents = [rows_of(tokens, rows, has_tokens) for tokens in contents]
        alignments = [
            align_rows(self._student, side, documents[0], tokens, block.text, rows, with_specials=False)
            for side, tokens in zip(sides[1:], documents[1:], strict=True)
        ]
        cuts = shared_cuts(alignments, documents[0].offsets, [tokens.offsets for tokens in documents[1:]])
        windows = windows_of(cuts, documents, [side.capacity for side in sides])
        rejects |= {int(rows[document]): no_cut(block, int(rows[document]), sides) for document in windows.refused}
        found = [rejects[row] for row in sorted(rejects)]
        shown = [
            side.wrapped(slice_rows(tokens, tokens.offsets[windows.document] + bounds[:, 0], np.diff(bounds, axis=1)[:, 0]))
            for side, tokens, bounds in zip(sides, documents, windows.bounds, strict=True)
        ]
        counts = [self._window_counts(side, tokens, windows) for side, tokens in zip(sides, shown, strict=True)]
        tables = BlockTables(
            student_columns(block, rows[windows.document], shown[0], windows),
            student_rejects=found,
            student_counts=counts[0].model_copy(update={"rejects": by_reason(found)}),
        )
        names = {name: tables.student[name] for name in ("sample_id", "idx")}
        every = np.ones(len(windows.document), dtype=bool)
        for position, (index, side) in enumerate(self._teachers.items(), start=1):
            sliced = slice_alignment(
                alignments[position - 1],
                (documents[0].offsets, documents[position].offsets),
                windows.document,
                (windows.bounds[0], windows.bounds[position]),
                self._specials_alignment(side),
                (len(self._student.prefix), len(side.prefix)),
            )
            aligned = self._aligned(shown[position], sliced, shown[0])
            tables.teachers[index] = names | teacher_columns(aligned, shown[0].offsets, every)
            tables.teacher_rejects[index] = []
            update = aligned_counts(aligned, shown[0]).model_dump(exclude_defaults=True)
            tables.teacher_counts[index] = counts[position].model_copy(update=update)
        return tables

    def _window_counts(self, side: LoadedSide, tokens: FlatTokens, windows: Windows) -> SideCounts:
        num_added = len(windows.document) * (len(side.prefix) + len(side.suffix))
        return SideCounts(
            num_rows=len(windows.document),
            num_tokens=len(tokens.ids),
            num_special_in_text=side.num_special_in(tokens) - num_added,
        )

    def _specials_alignment(self, side: LoadedSide) -> FlatAlignment:
        """The alignment of nothing but both sides' added specials."""
        nothing = FlatTokens(np.empty(0, dtype=np.int32), np.zeros(2, dtype=np.int64))
        return align_flat(self._student.adapter, side.adapter, self._student.wrapped(nothing), side.wrapped(nothing))
