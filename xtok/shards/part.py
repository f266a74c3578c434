"""The work unit: one part of the plan, from its source rows to verified files and a record. A plain function for any worker.

Every needed side is written under a temporary name in one pass over the part's rows, block by block; all files are closed and
read back before the first one gets its name, and the record comes last. Sides that an earlier run left whole are not touched.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.manifest import FileEntry, PartEntry, SideCounts
from schemas.tables import REJECT_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA, reject_side
from xtok import storage
from xtok.errors import DatasetMismatchError
from xtok.shards.columns import reject_columns
from xtok.shards.plan import row_fields
from xtok.shards.records import HeldSides, PartJob, held_sides, part_path, side_digests, write_record
from xtok.shards.rows import Reject, RowBlock, read_blocks
from xtok.shards.sides import BackendDiffers
from xtok.shards.text_body import BlockTables, TextBody
from xtok.shards.timing import measured, stage, staged_items, write_timings
from xtok.shards.totals import add_counts, add_reasons
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
    differences: dict[int | None, str] = {}
    while True:
        try:
            with ExitStack() as stack:
                return _PartBuild(job, held, differences, stack).run()
        except BackendDiffers as found:
            # The rows already written may be wrong too: the whole part is done again with the reference.
            differences[found.side] = found.difference


@dataclass(slots=True)
class _Figures:
    """What the blocks of a part add up to."""

    source_rejects: dict[str, int] = field(default_factory=dict)
    student: SideCounts = field(default_factory=SideCounts)
    teachers: dict[int, SideCounts] = field(default_factory=dict)
    num_source_rows: int = 0


class _PartBuild:
    """One attempt at building the missing sides of a part. Files are committed when `stack` closes without an error."""

    def __init__(self, job: PartJob, held: HeldSides, differences: dict[int | None, str], stack: ExitStack) -> None:
        self._job, self._held, self._differences, self._stack = job, held, differences, stack
        with_files = [index for index, teacher in enumerate(job.teachers) if not teacher.same_as_student]
        self._missing = [index for index in with_files if index not in held.teachers]
        # Windows are cut where all sides agree, so a split part needs all of them even to build one.
        encoded = with_files if job.config.overlength == "split" else self._missing
        self._body = TextBody(job.config, job.student, job.teachers, encoded, frozenset(differences))
        self._paths: dict[str, Path] = {}
        self._writers: dict[str, TableWriter] = {}
        if not held.student:
            self._open("student", STUDENT_SCHEMA)
        for index in self._missing:
            self._open(reject_side(index), TEACHER_SCHEMA)
        self._open("rejects", REJECT_SCHEMA)
        self._figures = _Figures()
        self._teacher_rejects: dict[int, list[Reject]] = {index: [] for index in self._missing}
        self._window_check = _WindowCheck(job, held)

    def _open(self, table: str, schema: pa.Schema) -> None:
        output, index = self._job.config.output, self._job.part.index
        final = storage.join(output, part_path(table, index))
        path = self._stack.enter_context(storage.staged(final, storage.join(output, "runs", "staging")))
        writer = TableWriter(path, schema, self._job.config.row_group_rows)
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
        figures = self._figures
        figures.num_source_rows += block.num_rows
        add_reasons(figures.source_rejects, (reject.reason for reject in block.rejects))
        tables = self._body.tables(block) if block.text else BlockTables({})
        figures.student = add_counts(figures.student, tables.student_counts)
        self._append_rejects(_in_plan_order(block, tables.student_rejects))
        if not block.text:
            return
        if "student" in self._writers:
            self._writers["student"].append(tables.student)
        self._window_check.add(tables.student)
        for index in self._missing:
            self._writers[reject_side(index)].append(tables.teachers[index])
            self._teacher_rejects[index].extend(tables.teacher_rejects[index])
            figures.teachers[index] = add_counts(figures.teachers.get(index, SideCounts()), tables.teacher_counts[index])

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

    def _noted(self, side: int | None, counts: SideCounts) -> SideCounts:
        if side not in self._differences:
            return counts
        return counts.model_copy(update={"num_backend_fallbacks": 1, "backend_difference": self._differences[side]})


class _WindowCheck:
    """A teacher added to a dataset of windows must fit the windows that are there."""

    def __init__(self, job: PartJob, held: HeldSides) -> None:
        self._job = job
        self._active = job.config.overlength == "split" and held.student
        self._found: list[tuple[pa.Array, pa.Array]] = []

    def add(self, student: dict[str, pa.Array]) -> None:
        """Takes note of the windows of one block."""
        if self._active:
            self._found.append((student["sample_id"], student["num_tokens"]))

    def finish(self, file: FileEntry) -> None:
        """Raises DatasetMismatchError when the windows found are not those of the student's file."""
        if not self._active:
            return
        with storage.open_arrow(storage.join(self._job.config.output, file.path)) as handle:
            existing = pq.read_table(handle, columns=["sample_id", "num_tokens"])
        columns = [pa.chunked_array([pair[side] for pair in self._found], existing.schema.types[side]) for side in (0, 1)]
        if not all(column.equals(existing.column(side)) for side, column in enumerate(columns)):
            raise DatasetMismatchError(
                f"{self._job.config.output}, part {self._job.part.index}: the added teacher does not fit the windows that are "
                f"there ({existing.num_rows} windows, {len(columns[0])} with it): its cuts or its context ask for others. "
                "Give it a larger context_length, or build a new dataset with all teachers."
            )


def _in_plan_order(block: RowBlock, student_rejects: list[Reject]) -> list[Reject]:
    """A block's rejects, source and student merged; both come in row order, and a block's sources stand in plan order."""
    order = {name: place for place, name in enumerate(block.sources)}
    return sorted([*block.rejects, *student_rejects], key=lambda reject: (order[reject.source], reject.line))
