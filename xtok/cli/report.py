"""The report of a preprocessing run in Markdown, and its table of parts: pure functions of the manifest.

Written to runs/<run>/report.md, and shown by the flow as artifacts.
"""

from __future__ import annotations

from typing import Any

from schemas.manifest import Manifest, PartEntry, SideCounts
from schemas.plan import PlannedSide

__all__ = ["parts_table", "report_markdown"]


def parts_table(manifest: Manifest) -> list[dict[str, Any]]:
    """One row for each part: rows, rejects, bytes and coverage."""
    return [
        {
            "part": part.index,
            "source rows": part.num_source_rows,
            "rows": part.num_rows,
            "rejects": _num_rejects(part),
            "bytes": sum(file.num_bytes for file in (part.student_file, *part.teacher_files) if file is not None),
            **{f"coverage {index}": round(side.coverage, 4) for index, side in enumerate(part.teachers)},
        }
        for part in manifest.parts
    ]


def report_markdown(manifest: Manifest, *, output: str, seconds: float) -> str:
    """The report: how much there is, each side's figures, every refusal by side and reason. seconds: of the whole run."""
    sides: list[tuple[str, PlannedSide, SideCounts]] = [("student", manifest.student, manifest.student_totals)]
    sides += [
        (f"teacher {index}", planned, counts)
        for index, (planned, counts) in enumerate(zip(manifest.teachers, manifest.teacher_totals, strict=True))
    ]
    num_tokens = sum(counts.num_tokens for _, _, counts in sides)
    lines = [
        "# Aligned dataset",
        "",
        f"`{output}`: {manifest.num_rows:,} rows from {manifest.num_source_rows:,} read, in {len(manifest.parts):,} parts. "
        f"{num_tokens:,} tokens in {seconds:.1f} s.",
        "",
        "| side | tokenizer | route | backend | rows | refused | truncated | tokens | coverage | one to one |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, planned, counts in sides:
        aligned = name != "student" and not planned.same_as_student
        share = f"{counts.num_one_to_one / counts.num_chunks:.1%}" if aligned and counts.num_chunks else ""
        note = "same as the student" if planned.same_as_student else planned.name
        lines.append(
            f"| {name} | {_cell(note)} | {planned.route} | {_cell(planned.backend)} | {counts.num_rows - counts.num_null_rows:,} "
            f"| {counts.num_rejects:,} | {counts.num_truncated:,} | {counts.num_tokens:,} "
            f"| {f'{counts.coverage:.4f}' if aligned else ''} | {share} |"
        )
    lines += ["", *_rejects(manifest, sides), *_notes(sides)]
    return "\n".join(lines) + "\n"


def _rejects(manifest: Manifest, sides: list[tuple[str, PlannedSide, SideCounts]]) -> list[str]:
    counted = [("source", reason, count) for reason, count in manifest.source_rejects.items()]
    counted += [(name, reason, count) for name, _, counts in sides for reason, count in counts.rejects.items()]
    counted = [entry for entry in counted if entry[2]]
    if not counted:
        return ["No row was refused.", ""]
    lines = ["| refused by | reason | rows |", "|---|---|--:|"]
    lines += [f"| {side} | {reason} | {count:,} |" for side, reason, count in sorted(counted, key=lambda entry: -entry[2])]
    return [*lines, "", "Each with file, line and message in `rejects/*.parquet`.", ""]


def _notes(sides: list[tuple[str, PlannedSide, SideCounts]]) -> list[str]:
    """What a careful reader should know: why not the fast backend, what fell back, what took the offset route."""
    notes = []
    for name, planned, counts in sides:
        if planned.backend_note:
            notes.append(f"- {name}: {planned.backend_note}")
        if counts.num_backend_fallbacks:
            notes.append(f"- {name}: {counts.num_backend_fallbacks} parts redone with the reference: {counts.backend_difference}")
        if counts.num_unverified_rows:
            notes.append(f"- {name}: {counts.num_unverified_rows:,} rows aligned by offsets (bytes could not be verified)")
    return notes


def _num_rejects(part: PartEntry) -> int:
    return sum(part.source_rejects.values()) + part.student.num_rejects + sum(side.num_rejects for side in part.teachers)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
