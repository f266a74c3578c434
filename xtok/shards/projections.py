"""The vocabulary projections of a dataset: `projection/teacher=<i>.parquet`, one for each teacher of another tokenizer.

Built in the workers beside the parts, kept when the file at hand is of the same two tokenizers, and recorded in the manifest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from schemas.config import ModelSide, PreprocessConfig
from schemas.manifest import FileEntry
from xtok import storage
from xtok.errors import ProjectionError, StorageError
from xtok.projection.build import ProjectionTable, build_projection
from xtok.projection.store import projection_bytes, read_projection
from xtok.shards.plan import RunPlan
from xtok.shards.pool import Runner
from xtok.shards.sides import load_side

__all__ = ["ProjectionJob", "build_projections", "projection_path"]


@dataclass(frozen=True, slots=True)
class ProjectionJob:
    """What a worker needs. fingerprints: content fingerprints of student and teacher, as planned."""

    output: str
    teacher_index: int
    student: ModelSide
    teacher: ModelSide
    fingerprints: tuple[str, str]
    entries: int


def projection_path(teacher_index: int) -> str:
    """Where a teacher's projection lies, relative to the dataset."""
    return f"projection/teacher={teacher_index}.parquet"


def build_projections(run: RunPlan, config: PreprocessConfig, runner: Runner) -> tuple[FileEntry | None, ...]:
    """The projections of all teachers, built where they are missing; None for a same-tokenizer teacher. () when not wanted."""
    if not config.projection:
        return ()
    student = run.plan.student.content_fingerprint
    jobs = [
        ProjectionJob(
            config.output,
            index,
            config.student,
            config.teachers[index],
            (student, side.content_fingerprint),
            config.projection_entries,
        )
        for index, side in enumerate(run.plan.teachers)
        if side.content_fingerprint != student
    ]
    built = dict(
        zip(
            [job.teacher_index for job in jobs],
            runner.map(build_projection_file, jobs, lambda job: f"projection of teacher {job.teacher_index}"),
            strict=True,
        )
    )
    return tuple(built.get(index) for index in range(len(run.plan.teachers)))


def build_projection_file(job: ProjectionJob) -> FileEntry:
    """Write one projection, unless the same one is there; the same bytes either way."""
    url = storage.join(job.output, projection_path(job.teacher_index))
    table = _at_hand(url, job)
    if table is None:
        table = build_projection(load_side(job.student), load_side(job.teacher), k=job.entries)
        storage.write_atomic(url, projection_bytes(table), storage.join(job.output, "runs", "staging"))
    data = projection_bytes(table)
    return FileEntry(
        path=projection_path(job.teacher_index),
        num_rows=len(table.indices),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        row_group_rows=(len(table.indices),),
    )


def _at_hand(url: str, job: ProjectionJob) -> ProjectionTable | None:
    """What an earlier run left, if it is whole and of these tokenizers."""
    try:
        if not storage.exists(url):
            return None
        table = read_projection(url, student_fingerprint=job.fingerprints[0], teacher_fingerprint=job.fingerprints[1])
    except (ProjectionError, StorageError):
        return None
    same = table.indices.shape[1] == job.entries and not table.reverse
    return table if same and hashlib.sha256(projection_bytes(table)).hexdigest() == storage.sha256(url) else None
