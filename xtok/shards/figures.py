"""What a report shows beyond the manifest, computed from the files of the parts: sizes of chunks, lengths of rows, figures of each
source, examples of what was refused.

Part by part, in the workers, one row group in memory at a time. The sums over sources agree with the manifest's totals.

Shape legend: R = rows of a row group, C = chunks of all its rows, Ns = student tokens of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.config import ModelSide
from schemas.manifest import FileEntry, Manifest, PartEntry
from xtok import storage
from xtok.shards.columns import flat_of, row_sums
from xtok.shards.pool import Runner
from xtok.shards.sides import load_side
from xtok.shards.timing import read_timings

__all__ = ["MAX_SIZE", "Figures", "PairFigures", "Refusals", "TeacherFigures", "dataset_figures", "part_figures"]

# Chunks of this many tokens and more are counted together.
MAX_SIZE = 8
NUM_EXAMPLES = 3
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class PairFigures:
    """One teacher over the rows of one source. Fields as in schemas.manifest.SideCounts."""

    num_rows: int = 0
    num_supervised: int = 0
    num_covered: int = 0
    num_chunks: int = 0
    num_one_to_one: int = 0

    def add(self, other: PairFigures) -> None:
        """Counts those of another part in."""
        for name in PairFigures.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class TeacherFigures:
    """chunk_sizes: int64 [MAX_SIZE + 1, MAX_SIZE + 1], chunks by (student tokens, teacher tokens), both capped at MAX_SIZE.
    lengths: int64 [longest + 1], rows by number of tokens. sources: by the source's name."""

    chunk_sizes: IntArray = field(default_factory=lambda: np.zeros((MAX_SIZE + 1, MAX_SIZE + 1), dtype=np.int64))
    lengths: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    sources: dict[str, PairFigures] = field(default_factory=dict)

    def add(self, other: TeacherFigures) -> None:
        """Counts those of another part in."""
        self.chunk_sizes = self.chunk_sizes + other.chunk_sizes
        self.lengths = _added(self.lengths, other.lengths)
        for name, pairs in other.sources.items():
            self.sources.setdefault(name, PairFigures()).add(pairs)


@dataclass(slots=True)
class Refusals:
    """How many rows one side refused for one reason, and the first few: (source, line, sample id, message)."""

    num_rows: int = 0
    examples: list[tuple[str, int, str | None, str]] = field(default_factory=list)


@dataclass(slots=True)
class Figures:
    """Figures of parts. teachers: by index, those with files. source_rows: rows of the student's table by source. lengths: as in
    TeacherFigures, of the student. refusals: by (side, reason). seconds: by stage, summed over the workers that built the parts."""

    teachers: dict[int, TeacherFigures] = field(default_factory=dict)
    source_rows: dict[str, int] = field(default_factory=dict)
    lengths: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    refusals: dict[tuple[str, str], Refusals] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: Figures) -> None:
        """Counts those of another part in; examples of the earlier part stay first."""
        for index, teacher in other.teachers.items():
            self.teachers.setdefault(index, TeacherFigures()).add(teacher)
        for name, num_rows in other.source_rows.items():
            self.source_rows[name] = self.source_rows.get(name, 0) + num_rows
        self.lengths = _added(self.lengths, other.lengths)
        for key, refusals in other.refusals.items():
            own = self.refusals.setdefault(key, Refusals())
            own.num_rows += refusals.num_rows
            own.examples = [*own.examples, *refusals.examples][:NUM_EXAMPLES]
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class FiguresJob:
    """What `part_figures` needs; picklable. url: the dataset's. student: tells which ids are special."""

    url: str
    part: PartEntry
    student: ModelSide


def dataset_figures(manifest: Manifest, url: str, student: ModelSide, runner: Runner) -> Figures:
    """Figures of all parts, which need not be published yet. Raises StorageError, and TokenizerError without the tokenizer."""
    total = Figures()
    jobs = [FiguresJob(url, part, student) for part in manifest.parts]
    for figures in runner.map(part_figures, jobs, lambda job: f"figures of part {job.part.index}"):
        total.add(figures)
    return total


def part_figures(job: FiguresJob) -> Figures:
    """Figures of one part, from its files."""
    figures = Figures(seconds=read_timings(job.url, job.part.index))
    is_special = load_side(job.student).table.is_special
    with_files = [(index, file) for index, file in enumerate(job.part.teacher_files) if file is not None]
    students = _row_groups(job.url, job.part.student_file, ["source", "input_ids", "token_mask"])
    teachers = [_row_groups(job.url, file, _TEACHER_COLUMNS) for _, file in with_files]
    for student, *tables in zip(students, *teachers, strict=True):
        rows = _StudentRows(student, is_special)
        figures.add(
            Figures(source_rows=rows.per_source(np.ones(rows.num_rows, dtype=np.int64)), lengths=np.bincount(rows.lengths))
        )
        for (index, _), table in zip(with_files, tables, strict=True):
            figures.add(Figures(teachers={index: _teacher_figures(rows, table)}))
    if job.part.rejects_file.num_rows:
        for table in _row_groups(job.url, job.part.rejects_file, None):
            figures.add(Figures(refusals=_refusals(table)))
    return figures


_TEACHER_COLUMNS = ["input_ids", "student_chunk_id", "teacher_chunk_id", "pair_is_correct", "coverage"]


def _row_groups(url: str, file: FileEntry, columns: Sequence[str] | None) -> Iterable[pa.Table]:
    with storage.open_arrow(storage.join(url, file.path)) as handle:
        parquet = pq.ParquetFile(handle)
        for group in range(parquet.metadata.num_row_groups):
            yield parquet.read_row_group(group, columns=columns, use_threads=False)


class _StudentRows:
    """The student's rows of one row group. lengths, supervised: int64 [R]; source: int64 [R], indices into `names`."""

    def __init__(self, table: pa.Table, is_special: BoolArray) -> None:
        ids, self.offsets = flat_of(table["input_ids"])
        mask, _ = flat_of(table["token_mask"])
        self.num_rows = table.num_rows
        self.lengths: IntArray = np.diff(self.offsets)
        self.supervised = row_sums(mask & ~is_special[ids], self.offsets)
        encoded = table["source"].combine_chunks().dictionary_encode()
        self.names: list[str] = encoded.dictionary.to_pylist()
        self.source: IntArray = encoded.indices.to_numpy().astype(np.int64)

    def per_source(self, values: IntArray) -> dict[str, int]:
        """Sums of int64 [R] by source."""
        sums = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(sums, self.source, values)
        return dict(zip(self.names, sums.tolist(), strict=True))


def _teacher_figures(rows: _StudentRows, table: pa.Table) -> TeacherFigures:
    """One row group of one teacher. A row that the teacher refuses is null and counts nowhere."""
    correct, chunk_offsets = flat_of(table["pair_is_correct"])
    sizes = []
    for column in ("student_chunk_id", "teacher_chunk_id"):
        chunk_id, offsets = flat_of(table[column])
        chunk = chunk_id + np.repeat(chunk_offsets[:-1], np.diff(offsets))
        sizes.append(np.bincount(chunk[chunk_id >= 0], minlength=len(correct)))
    student_size, teacher_size = sizes
    capped = np.minimum(student_size, MAX_SIZE) * (MAX_SIZE + 1) + np.minimum(teacher_size, MAX_SIZE)
    is_valid = table["input_ids"].is_valid().to_numpy()
    _, token_offsets = flat_of(table["input_ids"])
    supervised = np.where(is_valid, rows.supervised, 0)
    # A row's coverage is this very quotient, so its count comes back whole.
    covered = np.rint(table["coverage"].fill_null(0.0).to_numpy().astype(np.float64) * supervised).astype(np.int64)
    one_to_one = row_sums((student_size == 1) & (teacher_size == 1) & correct, chunk_offsets)
    columns = (is_valid.astype(np.int64), supervised, covered, np.diff(chunk_offsets), one_to_one)
    by_source = [rows.per_source(values) for values in columns]
    return TeacherFigures(
        np.bincount(capped, minlength=(MAX_SIZE + 1) ** 2).reshape(MAX_SIZE + 1, MAX_SIZE + 1),
        np.bincount(np.diff(token_offsets)[is_valid], minlength=1),
        {name: PairFigures(*(values[name] for values in by_source)) for name in rows.names},
    )


def _refusals(table: pa.Table) -> dict[tuple[str, str], Refusals]:
    found: dict[tuple[str, str], Refusals] = {}
    for row in table.to_pylist():
        refusals = found.setdefault((row["side"], row["reason"]), Refusals())
        refusals.num_rows += 1
        if len(refusals.examples) < NUM_EXAMPLES:
            refusals.examples.append((row["source"], row["line"], row["sample_id"], row["message"]))
    return found


def _added(left: IntArray, right: IntArray) -> IntArray:
    """The sum of two count arrays, the shorter one padded."""
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total
