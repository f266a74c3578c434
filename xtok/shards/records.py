"""What a finished part leaves: its record, by which a relaunch knows what it may skip.

A side is skipped when its digest (what it was made from) and the digest of its file both hold. The teachers' digests rest on the
student's, so that a new student makes everything new and a new teacher only its own files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from schemas.config import PreprocessConfig
from schemas.manifest import PartEntry
from schemas.plan import FORMAT_VERSION, PlannedPart, PlannedSide
from xtok import storage
from xtok.shards.plan import RunPlan, portable_config
from xtok.shards.rows import SourceAt
from xtok.shards.write import file_holds

__all__ = ["HeldSides", "PartJob", "held_sides", "part_jobs", "part_path", "read_record", "side_digests", "write_record"]

# They shape the dataset, not the rows of one part.
_NOT_IN_A_PART = frozenset(["part_bytes"])


@dataclass(frozen=True, slots=True)
class PartJob:
    """Everything that building one part needs; picklable. sources: those the part reads, by their index in the plan."""

    part: PlannedPart
    sources: dict[int, SourceAt]
    config: PreprocessConfig
    environment: dict[str, str]
    render_date: str | None
    student: PlannedSide
    teachers: tuple[PlannedSide, ...]

    @property
    def label(self) -> str:
        """What the part is called in an error."""
        return f"part {self.part.index}"


def part_jobs(run: RunPlan, config: PreprocessConfig) -> list[PartJob]:
    """One job for each part of the plan."""
    plan = run.plan
    date = plan.render_date.isoformat() if plan.render_date is not None else None
    return [
        PartJob(part, run.sources_of(part), config, plan.environment, date, plan.student, plan.teachers) for part in plan.parts
    ]


def part_path(table: str, index: int) -> str:
    """Place of a part's file of a table (`student`, `teacher=0`, `rejects`), relative to the dataset."""
    return f"{table}/part-{index:05d}.parquet"


def side_digests(job: PartJob) -> tuple[str, tuple[str, ...]]:
    """(the student's digest, one for each teacher): sha256 over all that shapes their rows."""
    part = job.part.model_dump(mode="json", exclude={"index"})
    for segment in part["segments"]:
        source = job.sources[segment.pop("source")].planned
        segment |= {"name": source.name, "sha256": source.sha256}
    config = {name: value for name, value in portable_config(job.config).items() if name not in _NOT_IN_A_PART}
    shared = {"format_version": FORMAT_VERSION, "environment": job.environment, "render_date": job.render_date}
    student = _digest(shared | {"part": part, "config": config, "student": _side(job.student)})
    return student, tuple(_digest({"student": student, "teacher": _side(teacher)}) for teacher in job.teachers)


def _side(side: PlannedSide) -> dict[str, Any]:
    return side.model_dump(mode="json", exclude={"name", "route_reason", "backend_note"})


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class HeldSides:
    """What of a part is there already. record: None when nothing is. teachers: indices of those whose files hold."""

    record: PartEntry | None
    student: bool
    teachers: frozenset[int]
    complete: bool


def held_sides(job: PartJob) -> HeldSides:
    """What of the part need not be built. Reads and digests the files."""
    record = read_record(job.config.output, job.part.index)
    nothing = HeldSides(None, False, frozenset(), False)
    if record is None:
        return nothing
    output = job.config.output
    student_digest, teacher_digests = side_digests(job)
    if record.student_digest != student_digest or not file_holds(output, record.rejects_file):
        return nothing
    teachers = frozenset(
        index
        for index, (digest, recorded) in enumerate(zip(teacher_digests, record.teacher_digests, strict=False))
        if digest == recorded and _teacher_holds(output, record, index)
    )
    student = file_holds(output, record.student_file)
    complete = student and len(teachers) == len(teacher_digests) == len(record.teacher_digests)
    return HeldSides(record, student, teachers, complete)


def _teacher_holds(output: str, record: PartEntry, index: int) -> bool:
    file = record.teacher_files[index]
    return file is None or file_holds(output, file)


def read_record(output: str, index: int) -> PartEntry | None:
    """The record of a part, or None when there is none of this format version."""
    url = _record_url(output, index)
    if not storage.exists(url):
        return None
    try:
        return PartEntry.model_validate_json(storage.read_bytes(url))
    except ValidationError:
        return None


def write_record(output: str, entry: PartEntry) -> None:
    """Leaves the record of a finished part: the last thing that building it does."""
    data = (entry.model_dump_json(indent=1) + "\n").encode()
    storage.write_atomic(_record_url(output, entry.index), data, storage.join(output, "runs", "staging"))


def _record_url(output: str, index: int) -> str:
    return storage.join(output, "records", f"part-{index:05d}.json")
