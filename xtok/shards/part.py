"""The work unit: one part of the plan, from its source rows to verified files and a record. A plain function for any worker.

Every needed side is written under a temporary name in one pass over the part's rows, block by block; all files are closed and
read back before the first one gets its name, and the record comes last. Sides that an earlier run left whole are not touched.
"""

from __future__ import annotations

import datetime
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.manifest import FileEntry, PartEntry, SideCounts
from schemas.tables import REJECT_SCHEMA, RENDERED_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA, reject_side
from xtok import storage
from xtok.shards.chat_body import ChatBody, ChatRun
from xtok.shards.chat_sides import RendererDiffers
from xtok.shards.columns import reject_columns
from xtok.shards.plan import row_fields
from xtok.shards.records import HeldSides, PartJob, held_sides, part_path, rendered_table, side_digests, write_record
from xtok.shards.rendered_table import held_renderings
from xtok.shards.rows import Reject, RowBlock, read_blocks
from xtok.shards.sides import BackendDiffers
from xtok.shards.text_body import BlockTables, TextBody
from xtok.shards.timing import measured, stage, staged_items, write_timings
from xtok.shards.totals import add_counts, add_reasons
from xtok.shards.window_check import WindowCheck
from xtok.shards.write import TableWriter, check_file

__all__ = ["part_is_done", "run_part"]


def part_is_done(job: PartJob) -> PartEntry | None:
    """The entry of a part that an earlier run finished, every file checked against its digest; None when work is left."""
    held = held_sides(job)
    return held.record if held.complete else None


def run_part(job: PartJob) -> PartEntry:
    """Builds what is missing of one part; returns its entry. Raises StorageError, TokenizerError, DatasetMismatchError."""
    held = held_sides(job)
    if held.complete and held.record is not None:
        return held.record
    with measured() as seconds:
        entry = _build(job, held)
    write_timings(job.config.output, entry.index, seconds)
    write_record(job.config.output, entry)
    return entry


def _build(job: PartJob, held: HeldSides) -> PartEntry:
    """The files of what is missing, committed; their entry."""
    differences = _Differences()
    while True:
        try:
            with ExitStack() as stack:
                return _PartBuild(job, held, differences, stack).run()
        except BackendDiffers as found:
            # The rows already written may be wrong too: the whole part is done again with the reference.
            differences.of(found)[found.side] = found.difference


@dataclass(slots=True)
class _Differences:
    """What was found to differ from its reference in this part, by side: tokenizer backends, and renderers."""

    backend: dict[int | None, str] = field(default_factory=dict)
    renderer: dict[int | None, str] = field(default_factory=dict)

    def of(self, found: BackendDiffers) -> dict[int | None, str]:
        """Where such a difference is noted."""
        return self.renderer if isinstance(found, RendererDiffers) else self.backend


@dataclass(slots=True)
class _Figures:
    """What the blocks of a part add up to."""

    source_rejects: dict[str, int] = field(default_factory=dict)
    student: SideCounts = field(default_factory=SideCounts)
    teachers: dict[int, SideCounts] = field(default_factory=dict)
    num_source_rows: int = 0

    def add(self, block: RowBlock, tables: BlockTables) -> None:
        """Counts a block in."""
        self.num_source_rows += block.num_rows
        add_reasons(self.source_rejects, (reject.reason for reject in block.rejects))
        self.student = add_counts(self.student, tables.student_counts)
        for index, counts in tables.teacher_counts.items():
            self.teachers[index] = add_counts(self.teachers.get(index, SideCounts()), counts)


class _PartBuild:
    """One attempt at building the missing sides of a part. Files are committed when `stack` closes without an error."""

    def __init__(self, job: PartJob, held: HeldSides, differences: _Differences, stack: ExitStack) -> None:
        self._job, self._held, self._differences, self._stack = job, held, differences, stack
        with_files = [index for index, teacher in enumerate(job.teachers) if not teacher.same_as_student]
        self._missing = [index for index in with_files if index not in held.teachers]
        # Windows are cut where all sides agree, so a split part needs all of them even to build one.
        encoded = with_files if job.config.overlength == "split" else self._missing
        with stage("load tokenizers"):
            self._body = self._make_body(encoded)
        self._paths: dict[str, Path] = {}
        self._writers: dict[str, TableWriter] = {}
        missing: list[int | None] = [*([] if held.student else [None]), *self._missing]
        for side in missing:
            self._open(reject_side(side), STUDENT_SCHEMA if side is None else TEACHER_SCHEMA)
            if job.config.mode == "chat":
                self._open(rendered_table(side), RENDERED_SCHEMA)
        self._open("rejects", REJECT_SCHEMA)
        self._figures = _Figures()
        self._teacher_rejects: dict[int, list[Reject]] = {index: [] for index in self._missing}
        self._window_check = WindowCheck(job, held)

    def _make_body(self, encoded: list[int]) -> TextBody | ChatBody:
        job, held = self._job, self._held
        backend, renderer = frozenset(self._differences.backend), frozenset(self._differences.renderer)
        if job.config.mode == "text":
            return TextBody(job.config, job.student, job.teachers, encoded, backend)
        assert job.render_date is not None, "a plan of chats has a date"
        run = ChatRun(datetime.date.fromisoformat(job.render_date), backend, renderer, held_renderings(job, held, encoded))
        return ChatBody(job.config, job.student, job.teachers, encoded, run)

    def _open(self, table: str, schema: pa.Schema) -> None:
        output, index = self._job.config.output, self._job.part.index
        final = storage.join(output, part_path(table, index))
        path = self._stack.enter_context(storage.staged(final, storage.join(output, "runs", "staging")))
        writer = TableWriter(path, final, schema, self._job.config.row_group_rows)
        self._stack.callback(writer.abandon)
        self._paths[table], self._writers[table] = path, writer

    def run(self) -> PartEntry:
        """Reads, builds and writes everything; the files wait under temporary names, checked."""
        part = self._job.part
        blocks = read_blocks(part.segments, self._job.sources, row_fields(self._job.config), frozenset(part.duplicates))
        for block in staged_items("read", blocks):
            self._add(block)
        for index in range(len(self._job.teachers)):
            self._append_teacher_rejects(index)
        files = {table: self._finish(table) for table in self._writers}
        return self._entry(files)

    def _add(self, block: RowBlock) -> None:
        tables = self._body.tables(block) if block.idx else BlockTables({})
        self._figures.add(block, tables)
        self._append_rejects(_in_plan_order(block, tables.student_rejects))
        if not block.idx:
            return
        self._window_check.add(tables.student)
        for side, columns in [(None, tables.student), *tables.teachers.items()]:
            if reject_side(side) in self._writers:
                self._writers[reject_side(side)].append(columns)
            if rendered_table(side) in self._writers:
                self._writers[rendered_table(side)].append(tables.rendered[side])
        for index in self._missing:
            self._teacher_rejects[index].extend(tables.teacher_rejects[index])

    def _append_rejects(self, rejects: list[Reject]) -> None:
        if rejects:
            self._writers["rejects"].append(reject_columns(rejects))

    def _append_teacher_rejects(self, index: int) -> None:
        """After the student's: teacher by teacher, so that adding a teacher appends. Those of held teachers are carried over."""
        if index in self._teacher_rejects:
            self._append_rejects(self._teacher_rejects[index])
        elif self._held.record is not None and self._held.record.teachers[index].rejects:
            url = storage.join(self._job.config.output, self._held.record.rejects_file.path)
            with storage.open_arrow(url) as handle:
                table = pq.read_table(handle)
            carried = table.filter(pc.equal(table["side"], reject_side(index))).combine_chunks()
            self._writers["rejects"].append(dict(zip(table.schema.names, carried.columns, strict=True)))

    def _finish(self, table: str) -> FileEntry:
        writer = self._writers[table]
        with stage("write"):
            writer.close()
        with stage("check"):
            return check_file(self._paths[table], part_path(table, self._job.part.index), writer.num_rows)

    def _entry(self, files: dict[str, FileEntry]) -> PartEntry:
        record, figures = self._held.record, self._figures
        student_digest, teacher_digests = side_digests(self._job)
        student_file = files["student"] if "student" in files else record.student_file if record is not None else None
        assert student_file is not None, "a student that is not held is built"
        self._window_check.finish(student_file)
        indices = range(len(self._job.teachers))
        return PartEntry(
            index=self._job.part.index,
            num_source_rows=figures.num_source_rows,
            num_rows=student_file.num_rows,
            student_digest=student_digest,
            teacher_digests=teacher_digests,
            student_file=student_file,
            teacher_files=tuple(self._teacher_file(index, files) for index in indices),
            rejects_file=files["rejects"],
            rendered_files=self._rendered_files(files),
            source_rejects=dict(sorted(figures.source_rejects.items())),
            student=self._noted(None, figures.student),
            teachers=tuple(self._teacher_counts(index) for index in indices),
        )

    def _teacher_file(self, index: int, files: dict[str, FileEntry]) -> FileEntry | None:
        if reject_side(index) in files:
            return files[reject_side(index)]
        return self._held.record.teacher_files[index] if self._held.record is not None and index in self._held.teachers else None

    def _teacher_counts(self, index: int) -> SideCounts:
        if index in self._held.teachers and self._held.record is not None:
            return self._held.record.teachers[index]
        return self._noted(index, self._figures.teachers.get(index, SideCounts()))

    def _rendered_files(self, files: dict[str, FileEntry]) -> tuple[FileEntry | None, ...]:
        if self._job.config.mode == "text":
            return ()
        record = self._held.record
        sides: list[int | None] = [None, *range(len(self._job.teachers))]
        kept = dict(zip(sides, record.rendered_files, strict=False)) if record is not None else {}
        return tuple(files.get(rendered_table(side), kept.get(side)) for side in sides)

    def _noted(self, side: int | None, counts: SideCounts) -> SideCounts:
        notes: dict[str, object] = {}
        if side in self._differences.backend:
            notes |= {"num_backend_fallbacks": 1, "backend_difference": self._differences.backend[side]}
        if side in self._differences.renderer:
            notes |= {"num_renderer_fallbacks": 1, "renderer_difference": self._differences.renderer[side]}
        elif side in self._held.rendered and self._held.record is not None:
            record = self._held.record.student if side is None else self._held.record.teachers[side]
            notes |= {name: getattr(record, name) for name in ("num_renderer_fallbacks", "renderer_difference")}
        return counts.model_copy(update=notes)


def _in_plan_order(block: RowBlock, student_rejects: list[Reject]) -> list[Reject]:
    """A block's rejects, source and student merged; both come in row order, and a block's sources stand in plan order."""
    order = {name: place for place, name in enumerate(block.sources)}
    return sorted([*block.rejects, *student_rejects], key=lambda reject: (order[reject.source], reject.line))
