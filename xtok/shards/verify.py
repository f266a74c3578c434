"""Checking a published dataset from its files alone: digests, row counts, and what must hold between the sides.

Findings are data: a list, empty for a sound dataset. Nothing is repaired here; `xtok repair` rebuilds a part by its number.

Shape legend: N = tokens of all rows of one row group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.manifest import FileEntry, PartEntry
from schemas.tables import REJECT_SCHEMA, RENDERED_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA
from xtok import storage
from xtok.errors import DamagedPartError, StorageError, StoreUnavailableError
from xtok.shards.columns import flat_of
from xtok.shards.plan import read_plan
from xtok.shards.publish import build_manifest
from xtok.shards.read import Dataset, RowGroupRef, Side
from xtok.shards.records import read_record, record_path

__all__ = ["Finding", "damaged_parts", "verify_dataset", "verify_part"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. part: its number, None for plan.json and manifest.json. path: the file, relative to the dataset."""

    part: int | None
    path: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.path}: {self.message}"


def verify_dataset(dataset: Dataset, progress: Callable[[str, int, int], None] | None = None) -> list[Finding]:
    """Everything that is wrong with a dataset. progress: called with ("verify parts", done, total)."""
    findings = list(_verify_plan(dataset)) or list(_verify_manifest(dataset))
    findings += [found for file in dataset.manifest.projections if file for found in _verify_digest(dataset, None, file)]
    for part in dataset.manifest.parts:
        findings.extend(verify_part(dataset, part))
        if progress is not None:
            progress("verify parts", part.index + 1, len(dataset.manifest.parts))
    return findings


def damaged_parts(findings: list[Finding]) -> list[int]:
    """Numbers of the parts that the findings name, ascending."""
    return sorted({finding.part for finding in findings if finding.part is not None})


def verify_part(dataset: Dataset, part: PartEntry) -> list[Finding]:
    """Files, digests and schemas first; only where these hold, what must be true between the sides."""
    files = [(part.student_file, STUDENT_SCHEMA), (part.rejects_file, REJECT_SCHEMA)]
    files += [(file, TEACHER_SCHEMA) for file in part.teacher_files if file is not None]
    files += [(file, RENDERED_SCHEMA) for file in part.rendered_files if file is not None]
    findings = [found for file, schema in files for found in _verify_file(dataset, part.index, file, schema)]
    return findings or list(_verify_rows(dataset, part)) or list(_verify_record(dataset, part))


def _verify_plan(dataset: Dataset) -> Iterator[Finding]:
    try:
        digest = storage.sha256(storage.join(dataset.url, "plan.json"))
    except StoreUnavailableError:
        raise
    except StorageError as error:
        yield Finding(None, "plan.json", str(error))
        return
    if digest != dataset.manifest.plan_sha256:
        yield Finding(None, "plan.json", f"sha256 is {digest}, the manifest says {dataset.manifest.plan_sha256}")


def _verify_manifest(dataset: Dataset) -> Iterator[Finding]:
    """Nothing holds the manifest's own digest, but all of it follows from plan.json and its parts' entries."""
    plan = read_plan(dataset.url)
    assert plan is not None, "its digest holds"
    try:
        agrees = build_manifest(plan, dataset.manifest.parts, dataset.manifest.projections) == dataset.manifest
    except ValueError:
        agrees = False
    if not agrees:
        yield Finding(None, "manifest.json", "it is not what plan.json and the entries of its parts add up to")


def _verify_record(dataset: Dataset, part: PartEntry) -> Iterator[Finding]:
    """The entry of a part stands in its record too. A record of more teachers is of a run that has not published yet."""
    record = read_record(dataset.url, part.index)
    if record is not None and len(record.teacher_digests) == len(part.teacher_digests) and record != part:
        yield Finding(part.index, record_path(part.index), "it is not the entry of that part in manifest.json")


def _verify_digest(dataset: Dataset, part: int | None, file: FileEntry) -> Iterator[Finding]:
    """The file is there, of the size and digest that the manifest says."""
    url = storage.join(dataset.url, file.path)
    try:
        if not storage.exists(url):
            yield Finding(part, file.path, "the file is missing")
            return
        num_bytes = storage.size(url)
        if num_bytes != file.num_bytes:
            yield Finding(part, file.path, f"the file has {num_bytes} bytes, the manifest says {file.num_bytes}")
            return
        digest = storage.sha256(url)
        if digest != file.sha256:
            yield Finding(part, file.path, f"sha256 is {digest}, the manifest says {file.sha256}")
    except StoreUnavailableError:
        raise  # nothing is known of the file
    except StorageError as error:
        yield Finding(part, file.path, str(error))


def _verify_file(dataset: Dataset, part: int, file: FileEntry, schema: pa.Schema) -> Iterator[Finding]:
    damage = list(_verify_digest(dataset, part, file))
    if damage:
        yield from damage
        return
    try:
        with dataset.open_parquet(file) as parquet:
            groups = tuple(parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups))
            found = parquet.schema_arrow
    except StoreUnavailableError:
        raise  # nothing is known of the file
    except (StorageError, DamagedPartError, pa.ArrowException, OSError) as error:
        yield Finding(part, file.path, str(error))
        return
    if groups != file.row_group_rows or sum(groups) != file.num_rows:
        yield Finding(part, file.path, f"row groups of {groups} rows, the manifest says {file.row_group_rows}")
    if not found.equals(schema):
        yield Finding(part, file.path, f"the schema is not the one of this format version: {found}")


def _verify_rows(dataset: Dataset, part: PartEntry) -> Iterator[Finding]:
    for group, num_rows in enumerate(part.student_file.row_group_rows):
        ref = RowGroupRef(part.index, group, num_rows)
        student = dataset.read_row_group(ref, "student")
        problems = [(part.student_file.path, problem) for problem in _student_problems(student)]
        for index, file in enumerate(part.teacher_files):
            if file is not None:
                teacher = dataset.read_row_group(ref, index)
                problems += [(file.path, problem) for problem in _teacher_problems(student, teacher)]
                problems += _rendered_problems(dataset, ref, index, teacher)
        problems += _rendered_problems(dataset, ref, "student", student)
        yield from (Finding(part.index, path, f"row group {group}: {problem}") for path, problem in problems)


def _student_problems(student: pa.Table) -> Iterator[str]:
    ids, offsets = flat_of(student["input_ids"])
    _, mask_offsets = flat_of(student["token_mask"])
    if student["input_ids"].null_count or student["token_mask"].null_count:
        yield "a student row is null"
    if not np.array_equal(offsets, mask_offsets):
        yield "token_mask and input_ids differ in length"
    if not np.array_equal(np.diff(offsets), student["num_tokens"].to_numpy()):
        yield "num_tokens is not the length of input_ids"
    if len(ids) and int(ids.min()) < 0:
        yield "a token id is negative"


def _rendered_problems(dataset: Dataset, ref: RowGroupRef, side: Side, table: pa.Table) -> list[tuple[str, str]]:
    """A side is shown a text for exactly the rows that it has ids for."""
    if dataset.manifest.mode == "text":
        return []
    rendered = dataset.read_rendered(ref, side, ["sample_id", "idx", "text"])
    path = dataset.rendered_file(ref.part, side).path
    if any(not rendered[name].equals(table[name]) for name in ("sample_id", "idx")):
        return [(path, f"its rows are not those of {dataset.file(ref.part, side).path}")]
    if not rendered["text"].is_null().equals(table["input_ids"].is_null()):
        return [(path, "a row has a text and no ids, or ids and no text")]
    return []


def _teacher_problems(student: pa.Table, teacher: pa.Table) -> Iterator[str]:
    for name in ("sample_id", "idx"):
        if not teacher[name].equals(student[name]):
            yield f"{name} differs from the student's: the sides are not aligned row by row"
            return
    is_null = np.asarray(teacher["input_ids"].is_null())
    lists = ("token_mask", "student_chunk_id", "teacher_chunk_id", "pair_is_correct")
    if any(not np.array_equal(np.asarray(teacher[name].is_null()), is_null) for name in (*lists, "route", "coverage")):
        yield "a row is null in some columns only"
        return
    _, offsets = flat_of(teacher["input_ids"])
    for name in ("token_mask", "teacher_chunk_id"):
        if not np.array_equal(flat_of(teacher[name])[1], offsets):
            yield f"{name} and input_ids differ in length"
            return
    student_lengths = np.where(is_null, 0, np.diff(flat_of(student["input_ids"])[1]))
    student_ids, student_offsets = flat_of(teacher["student_chunk_id"])
    if not np.array_equal(np.diff(student_offsets), student_lengths):
        yield "student_chunk_id is not as long as the student's input_ids"
        return
    num_chunks = np.diff(flat_of(teacher["pair_is_correct"])[1])
    teacher_ids, _ = flat_of(teacher["teacher_chunk_id"])
    for name, ids, bounds in (("student_chunk_id", student_ids, student_offsets), ("teacher_chunk_id", teacher_ids, offsets)):
        row = _first_bad_row(ids, bounds, num_chunks)
        if row is not None:
            yield f"{name} of {teacher['sample_id'][row].as_py()!r} does not run from 0 to its last chunk without gaps"


def _first_bad_row(ids: npt.NDArray[Any], offsets: npt.NDArray[np.int64], num_chunks: npt.NDArray[np.int64]) -> int | None:
    """The first row whose chunk ids, -1 aside, do not ascend by steps of 0 or 1 from 0 to its number of chunks - 1."""
    row = np.repeat(np.arange(len(num_chunks)), np.diff(offsets))
    inside = ids >= 0
    row, ids = row[inside], ids[inside]
    is_first = np.append(True, row[1:] != row[:-1])[: len(row)]
    previous = np.append(-1, ids[:-1])[: len(ids)]
    step = np.where(is_first, ids, ids - previous)
    bad = [row[(step < 0) | (step > 1) | (is_first & (ids != 0))]]
    last = np.full(len(num_chunks), -1, dtype=np.int64)
    last[row] = ids  # of equal rows the last write stays
    bad.append(np.flatnonzero(last + 1 != num_chunks))
    rows = np.concatenate(bad)
    return int(rows.min()) if len(rows) else None
