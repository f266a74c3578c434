"""Checking a published dataset from its files alone: digests, row counts, and what must hold between the sides.

Findings are data: a list, empty for a sound dataset. Nothing is repaired here; `xtok repair` rebuilds a part by its number. Of a
remote dataset each file is read once: a part's files stay on the local disk while it is looked at.

Shape legend: N = tokens of all rows of one row group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from schemas.manifest import FileEntry, PartEntry
from schemas.tables import REJECT_SCHEMA, RENDERED_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA
from xtok import storage
from xtok.errors import DamagedPartError, StorageError
from xtok.shards.columns import flat_of
from xtok.shards.plan import plan_bytes, read_plan
from xtok.shards.publish import build_manifest
from xtok.shards.read import Dataset, RowGroupRef, Side
from xtok.shards.records import read_record, record_path
from xtok.shards.write import file_holds

__all__ = ["Finding", "damaged_parts", "verify_dataset", "verify_part"]

# Folders that are read whole, as by `scan_parquet("teacher=*/*.parquet")`; elsewhere a user may keep what they like.
_READ_WHOLE = ("student/", "teacher=", "rendered/", "rejects/")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. part: its number, None for what is no file of a part. path: the file, relative to the dataset."""

    part: int | None
    path: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.path}: {self.message}"


def verify_dataset(dataset: Dataset, progress: Callable[[str, int, int], None] | None = None) -> list[Finding]:
    """Everything that is wrong with a dataset. progress: called with ("verify parts", done, total).

    Raises StorageError where nothing can be known of a file: the store does not answer, or there is no permission.
    """
    findings = list(_verify_plan(dataset))
    findings += [found for file in dataset.manifest.projections if file for found in _verify_digest(dataset, None, file)]
    for part in dataset.manifest.parts:
        findings.extend(verify_part(dataset, part))
        if progress is not None:
            progress("verify parts", part.index + 1, len(dataset.manifest.parts))
    return findings + list(_verify_names(dataset))


def damaged_parts(findings: list[Finding]) -> list[int]:
    """Numbers of the parts that the findings name, ascending."""
    return sorted({finding.part for finding in findings if finding.part is not None})


def verify_part(dataset: Dataset, part: PartEntry) -> list[Finding]:
    """Files, digests and schemas first; only where these hold, what must be true between the sides."""
    record = read_record(dataset.url, part.index)
    if record is not None and record != part and _is_of_the_record(dataset, part, record):
        message = f"its entry of part {part.index} is not what the part's record and files say"
        return [Finding(None, "manifest.json", message)]
    files = [(part.student_file, STUDENT_SCHEMA), (part.rejects_file, REJECT_SCHEMA)]
    files += [(file, TEACHER_SCHEMA) for file in part.teacher_files if file is not None]
    files += [(file, RENDERED_SCHEMA) for file in part.rendered_files if file is not None]
    with storage.scratch_folder() as folder:
        held = dataset if storage.local_path(dataset.url) is not None else Dataset(dataset.manifest, str(folder))
        findings = [found for file, schema in files for found in _verify_file(dataset, held, part.index, file, schema)]
        findings = findings or list(_verify_rows(held, part))
        findings = [replace(finding, message=finding.message.replace(held.url, dataset.url)) for finding in findings]
    return findings or list(_verify_record(part, record))


def _verify_plan(dataset: Dataset) -> Iterator[Finding]:
    """plan.json is the one that the manifest names. Nothing holds the manifest's own digest, but all of it follows from plan.json
    and its parts' entries."""
    try:
        plan = read_plan(dataset.url)
        digest = storage.sha256(storage.join(dataset.url, "plan.json"))
    except ValidationError:
        yield Finding(None, "plan.json", "it is no plan of this format version")
        return
    except StorageError as error:
        if storage.is_no_damage(error):
            raise
        yield Finding(None, "plan.json", str(error))
        return
    assert plan is not None, "it was just read"
    manifest = dataset.manifest
    try:
        expected = build_manifest(plan, manifest.parts, manifest.projections)
    except (ValueError, IndexError):  # of another number of parts, or of teachers
        expected = None
    if digest != manifest.plan_sha256:
        is_whole = hashlib.sha256(plan_bytes(plan)).hexdigest() == digest
        same_else = expected is not None and expected.model_copy(update={"plan_sha256": manifest.plan_sha256}) == manifest
        path = "manifest.json" if is_whole and same_else else "plan.json"
        yield Finding(None, path, f"sha256 of plan.json is {digest}, the manifest says {manifest.plan_sha256}")
    elif expected != manifest:
        yield Finding(None, "manifest.json", "it is not what plan.json and the entries of its parts add up to")


def _is_of_the_record(dataset: Dataset, part: PartEntry, record: PartEntry) -> bool:
    """Whether the part's files are those of its record where the manifest names others: then the manifest was changed."""
    if len(record.teacher_digests) != len(part.teacher_digests):
        return False
    changed = [file for file, entry in zip(_files(record), _files(part), strict=False) if file is not None and file != entry]
    return bool(changed) and all(file_holds(dataset.url, file) and _fits(dataset, file) for file in changed)


def _fits(dataset: Dataset, file: FileEntry) -> bool:
    try:
        return _row_groups(dataset, file) == file.row_group_rows and sum(file.row_group_rows) == file.num_rows
    except (StorageError, pa.ArrowException, OSError) as error:
        if storage.is_no_damage(error):
            raise
        return False


def _row_groups(dataset: Dataset, file: FileEntry) -> tuple[int, ...]:
    with dataset.open_parquet(file) as parquet:
        return tuple(parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups))


def _files(part: PartEntry) -> tuple[FileEntry | None, ...]:
    return (part.student_file, part.rejects_file, *part.teacher_files, *part.rendered_files)


def _verify_record(part: PartEntry, record: PartEntry | None) -> Iterator[Finding]:
    """The entry of a part stands in its record too. A record of more teachers is of a run that has not published yet."""
    if record is None:
        yield Finding(part.index, record_path(part.index), "the record of the part is missing, or cannot be read")
    elif len(record.teacher_digests) == len(part.teacher_digests) and record != part:
        yield Finding(part.index, record_path(part.index), "it is not the entry of that part in manifest.json")


def _verify_names(dataset: Dataset) -> Iterator[Finding]:
    """No file that is not the dataset's stands where readers of whole folders would take it for one."""
    expected = {file.path for part in dataset.manifest.parts for file in _files(part) if file is not None}
    for path in storage.tree(dataset.url):
        *folders, name = path.split("/")
        is_seen = path.startswith(_READ_WHOLE) and not name.startswith((".", "_"))
        teacher = folders[-1].removeprefix("teacher=") if folders else ""
        is_being_added = teacher.isdecimal() and int(teacher) >= len(dataset.manifest.teachers)
        if is_seen and path not in expected and not is_being_added:
            yield Finding(None, path, "it is no file of this dataset: move it away, or readers of the whole folder take it in")


def _verify_digest(dataset: Dataset, part: int | None, file: FileEntry, copy: Path | None = None) -> Iterator[Finding]:
    """The file is there, of the size and digest that the manifest says. copy: where to put what was read."""
    url = storage.join(dataset.url, file.path)
    try:
        if not storage.exists(url):
            yield Finding(part, file.path, "the file is missing")
            return
        num_bytes = storage.size(url)
        if num_bytes != file.num_bytes:
            yield Finding(part, file.path, f"the file has {num_bytes} bytes, the manifest says {file.num_bytes}")
            return
        digest = storage.sha256(url) if copy is None else storage.fetch(url, copy)
        if digest != file.sha256:
            yield Finding(part, file.path, f"sha256 is {digest}, the manifest says {file.sha256}")
    except StorageError as error:
        if storage.is_no_damage(error):
            raise
        yield Finding(part, file.path, str(error))


def _verify_file(dataset: Dataset, held: Dataset, part: int, file: FileEntry, schema: pa.Schema) -> Iterator[Finding]:
    """held: the dataset, or where its files are put when they come from far."""
    copy = None if held is dataset else Path(storage.join(held.url, file.path))
    if copy is not None:
        storage.make_folder(str(copy.parent))
    damage = list(_verify_digest(dataset, part, file, copy))
    if damage:
        yield from damage
        return
    try:
        groups = _row_groups(held, file)
        with held.open_parquet(file) as parquet:
            found = parquet.schema_arrow
    except (StorageError, pa.ArrowException, OSError) as error:
        if storage.is_no_damage(error):
            raise
        yield Finding(part, file.path, str(error))
        return
    if groups != file.row_group_rows or sum(groups) != file.num_rows:
        yield Finding(part, file.path, f"row groups of {groups} rows, the manifest says {file.row_group_rows}")
    if not found.equals(schema):
        yield Finding(part, file.path, f"the schema is not the one of this format version: {found}")


def _verify_rows(dataset: Dataset, part: PartEntry) -> Iterator[Finding]:
    try:
        yield from _row_findings(dataset, part)
    except DamagedPartError as error:  # its bytes are as published, and were wrong then
        yield Finding(part.index, part.student_file.path, str(error))


def _row_findings(dataset: Dataset, part: PartEntry) -> Iterator[Finding]:
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
