"""manifest.json: written last; its presence means that the dataset is published. Also the record that each finished part leaves.

Holds no time, host, absolute path, engine, number of workers or threshold.
"""

from __future__ import annotations

import datetime
import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from schemas.plan import PlannedSide, PlannedSource

__all__ = ["FileEntry", "Manifest", "PartEntry", "SideCounts"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Frozen):
    """One file of the dataset. path: relative to the dataset, with `/`. row_group_rows: rows of each row group, in order."""

    path: str
    num_rows: int
    num_bytes: int
    sha256: str
    row_group_rows: tuple[int, ...]

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        """A dataset may come from anywhere: no file of it lies outside its folder."""
        if not re.fullmatch(r"\w[\w=.-]*(/\w[\w=.-]*)*", path):
            raise ValueError(f"{path!r} is no place inside the dataset")
        return path


class SideCounts(_Frozen):
    """Figures of one side over a part or the dataset. Every count is of accepted rows, unless its name says otherwise.

    num_rows: rows of the table; num_null_rows: those that this teacher refuses. num_tokens: ids on disk, specials included.
    num_truncated: rows cut to the context. num_unverified_rows: rows aligned by offsets. Teachers only: num_supervised: student
    tokens under the mask, specials left out; num_covered: those of them in a chunk; num_chunks, num_correct_chunks, and
    num_one_to_one, chunks of one token on each side (role pairs included in all three).
    num_special_in_text: tokens of the content that are special ids (the text spells a special token out).
    num_backend_fallbacks: parts done again with the reference tokenizer; backend_difference: the first difference that made it so.
    Chat mode: num_rendered: rows that this side's template rendered, those refused later counted. num_mask_tokens: tokens under
    this side's own mask, specials counted; num_thinking_tokens: those of them from the reasoning's begin to its closing mark's end.
    num_thinking_rows, num_dropped_reasoning: rows whose final turn's reasoning this template shows, or drops. num_left_out
    (teachers): student tokens that are in a chunk but for kd_alignment_regions and drop_first_assistant_chunk_kl_by_teacher.
    num_renderer_fallbacks, renderer_difference: as for the backend, with Jinja as the reference.
    """

    num_rows: int = 0
    num_null_rows: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_special_in_text: int = 0
    num_unverified_rows: int = 0
    num_supervised: int = 0
    num_covered: int = 0
    num_chunks: int = 0
    num_correct_chunks: int = 0
    num_one_to_one: int = 0
    num_backend_fallbacks: int = 0
    backend_difference: str | None = None
    num_rendered: int = 0
    num_mask_tokens: int = 0
    num_thinking_tokens: int = 0
    num_thinking_rows: int = 0
    num_dropped_reasoning: int = 0
    num_left_out: int = 0
    num_renderer_fallbacks: int = 0
    renderer_difference: str | None = None
    rejects: dict[str, int] = {}

    @property
    def coverage(self) -> float:
        """Supervised, non-special student tokens in a chunk, over all such; 1.0 when there are none."""
        return self.num_covered / self.num_supervised if self.num_supervised else 1.0

    @property
    def reachable_coverage(self) -> float:
        """The same, with tokens that the configuration itself keeps out of KD counted as covered: what `min_coverage` bounds."""
        return (self.num_covered + self.num_left_out) / self.num_supervised if self.num_supervised else 1.0

    @property
    def num_rejects(self) -> int:
        """Rows refused by this side."""
        return sum(self.rejects.values())


class PartEntry(_Frozen):
    """One finished part: its record on disk, and its entry in the manifest.

    student_digest, teacher_digests: what each side was made from (input, configuration, tokenizers, format version); a relaunch
    skips a side whose digest and files hold. teacher_files: None for a same-tokenizer teacher. rendered_files: chat mode, the
    student's and then each teacher's. num_rows: rows of the student's table; num_source_rows: rows read, rejects counted.
    source_rejects: rows refused before any side saw them, by reason.
    """

    index: int
    num_source_rows: int
    num_rows: int
    student_digest: str
    teacher_digests: tuple[str, ...]
    student_file: FileEntry
    teacher_files: tuple[FileEntry | None, ...]
    rejects_file: FileEntry
    rendered_files: tuple[FileEntry | None, ...] = ()
    source_rejects: dict[str, int]
    student: SideCounts
    teachers: tuple[SideCounts, ...]

    @model_validator(mode="after")
    def _speaks_of_the_same_teachers(self) -> Self:
        num_teachers = len(self.teachers)
        if not len(self.teacher_digests) == len(self.teacher_files) == num_teachers:
            raise ValueError(f"part {self.index} has figures of {num_teachers} teachers, and not as many digests and files")
        if len(self.rendered_files) not in (0, num_teachers + 1):
            raise ValueError(f"part {self.index} has {len(self.rendered_files)} rendered files for {num_teachers} teachers")
        return self


class Manifest(_Frozen):
    """The published dataset. student, teachers, sources: as in the plan. totals and teacher_totals: sums over the parts.

    projections: one entry a teacher, None for a same-tokenizer one; empty when the configuration leaves them out.
    """

    format_version: int
    mode: Literal["text", "chat"]
    config: dict[str, Any]
    environment: dict[str, str]
    render_date: datetime.date | None = None
    sources: tuple[PlannedSource, ...]
    student: PlannedSide
    teachers: tuple[PlannedSide, ...]
    plan_sha256: str
    num_rows: int
    num_source_rows: int
    num_blank_lines: int
    source_rejects: dict[str, int]
    student_totals: SideCounts
    teacher_totals: tuple[SideCounts, ...]
    coverage: tuple[float | None, ...]
    parts: tuple[PartEntry, ...]
    projections: tuple[FileEntry | None, ...] = ()

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        """Whoever reads a manifest may go by the numbers of its parts and teachers."""
        num_teachers = len(self.teachers)
        if [part.index for part in self.parts] != list(range(len(self.parts))):
            raise ValueError("its parts are not numbered from 0 on without gaps")
        lengths = {len(self.teacher_totals), len(self.coverage), *(len(part.teachers) for part in self.parts)}
        if lengths - {num_teachers} or len(self.projections) not in (0, num_teachers):
            raise ValueError(f"it names {num_teachers} teachers, and has figures or projections of another number")
        return self

    @property
    def num_rejects(self) -> int:
        """Rows in no table but `rejects`: refused when read, or by the student's side."""
        return sum(self.source_rejects.values()) + self.student_totals.num_rejects
