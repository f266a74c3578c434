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
from schemas.manifest import FileEntry, PartEntry
from schemas.plan import FORMAT_VERSION, PlannedPart, PlannedSide
from schemas.tables import reject_side
from xtok import storage
from xtok.shards.plan import RunPlan, portable_config
from xtok.shards.rows import SourceAt
from xtok.shards.write import file_holds

__all__ = [
    "HeldSides",
    "PartJob",
    "held_sides",
    "part_jobs",
    "part_path",
    "read_record",
    "record_path",
    "rendered_table",
    "side_digests",
    "write_record",
]

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


def rendered_table(side: int | None) -> str:
    """The table of what a side was shown: `rendered/student`, `rendered/teacher=0`."""
    return f"rendered/{reject_side(side)}"


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
    return side.model_dump(mode="json", exclude={"name", "route_reason", "backend_note", "renderer_note"})


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class HeldSides:
    """What of a part is there already. record: None when nothing is. teachers: indices of those whose files hold.

    rendered: sides (None: the student) whose renderings hold, whether or not their other file does.
    """

    record: PartEntry | None
    student: bool
    teachers: frozenset[int]
    complete: bool
    rendered: frozenset[int | None] = frozenset()


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
    fresh = [
        index
        for index, (digest, recorded) in enumerate(zip(teacher_digests, record.teacher_digests, strict=False))
        if digest == recorded
    ]
    sides: list[int | None] = [None, *fresh]
    rendered = frozenset(side for side in sides if _rendering_holds(output, record, side))
    is_chat = job.config.mode == "chat"
    teachers = frozenset(
        index
        for index in fresh
        if _file_holds(output, record.teacher_files[index])
        and (not is_chat or index in rendered or job.teachers[index].same_as_student)
    )
    student = file_holds(output, record.student_file) and (not is_chat or None in rendered)
    complete = student and len(teachers) == len(teacher_digests) == len(record.teacher_digests)
    return HeldSides(record, student, teachers, complete, rendered)


def _file_holds(output: str, file: FileEntry | None) -> bool:
    return file is None or file_holds(output, file)


def _rendering_holds(output: str, record: PartEntry, side: int | None) -> bool:
    place = 0 if side is None else side + 1
    file = record.rendered_files[place] if place < len(record.rendered_files) else None
    return file is not None and file_holds(output, file)


def read_record(output: str, index: int) -> PartEntry | None:
    """The record of a part, or None when there is none of this format version."""
    url = storage.join(output, record_path(index))
    if not storage.exists(url):
        return None
    try:
        return PartEntry.model_validate_json(storage.read_bytes(url))
    except ValidationError:
        return None


def write_record(output: str, entry: PartEntry) -> None:
    """Leaves the record of a finished part: the last thing that building it does."""
    data = (entry.model_dump_json(indent=1) + "\n").encode()
    storage.write_atomic(storage.join(output, record_path(entry.index)), data, storage.join(output, "runs", "staging"))


def record_path(index: int) -> str:
    """Place of a part's record, relative to the dataset."""
    return f"records/part-{index:05d}.json"
