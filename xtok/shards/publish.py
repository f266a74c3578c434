"""The last step: all parts there, the figures within the limits, then manifest.json in one move.

The manifest holds no threshold: a dataset that passes 0.05 and one that passes 0.5 are the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from schemas.config import PreprocessConfig
from schemas.manifest import FileEntry, Manifest, PartEntry, SideCounts
from schemas.plan import Plan, PlannedSide
from xtok import storage
from xtok.errors import PublicationRefusedError
from xtok.shards.chat_figures import chat_figures_table, refusals_table
from xtok.shards.freeze import agree, write_plan
from xtok.shards.plan import RunPlan, plan_bytes, read_plan
from xtok.shards.totals import sum_counts

__all__ = ["build_manifest", "check_limits", "figures_table", "manifest_bytes", "publish"]

_SHOWN_SOURCES = 5


def publish(
    run: RunPlan, entries: Sequence[PartEntry], config: PreprocessConfig, projections: Sequence[FileEntry | None] = ()
) -> Manifest:
    """Checks the figures and writes manifest.json. entries: of every part, each verified by whoever built or skipped it.

    Raises PublicationRefusedError with the table of figures beyond `max_reject_fraction` or below `min_coverage`, StorageError when a
    source is no longer the one that was planned, DatasetMismatchError when plan.json is no longer this run's.
    """
    manifest = build_manifest(run.plan, entries, projections)
    check_limits(manifest, config)
    run.check_sources()
    staging = storage.join(config.output, "runs", "staging")
    frozen = read_plan(config.output)
    if frozen != run.plan:  # teachers were added to a published dataset, or another run took the folder
        if frozen is not None:
            agree(frozen, run.plan, config.output)
        write_plan(run.plan, config.output)
    storage.write_atomic(storage.join(config.output, "runs", "config.json"), config.model_dump_json(indent=1).encode(), staging)
    storage.write_atomic(storage.join(config.output, "manifest.json"), manifest_bytes(manifest), staging)
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """manifest.json, the same bytes for the same dataset."""
    return (manifest.model_dump_json(indent=1) + "\n").encode()


def build_manifest(plan: Plan, entries: Sequence[PartEntry], projections: Sequence[FileEntry | None] = ()) -> Manifest:
    """The manifest of a whole dataset."""
    parts = tuple(sorted(entries, key=lambda entry: entry.index))
    if [entry.index for entry in parts] != [part.index for part in plan.parts]:
        raise ValueError(f"{len(parts)} entries for the {len(plan.parts)} parts of the plan: build every part before publishing")
    source_rejects: dict[str, int] = {}
    for entry in parts:
        for reason, count in entry.source_rejects.items():
            source_rejects[reason] = source_rejects.get(reason, 0) + count
    teacher_totals = tuple(sum_counts(entry.teachers[index] for entry in parts) for index in range(len(plan.teachers)))
    return Manifest(
        format_version=plan.format_version,
        mode=plan.mode,
        config=plan.config,
        environment=plan.environment,
        render_date=plan.render_date,
        sources=plan.sources,
        student=plan.student,
        teachers=plan.teachers,
        plan_sha256=hashlib.sha256(plan_bytes(plan)).hexdigest(),
        num_rows=sum(entry.num_rows for entry in parts),
        num_source_rows=sum(entry.num_source_rows for entry in parts),
        num_blank_lines=sum(source.num_lines - source.num_rows for source in plan.sources),
        source_rejects=dict(sorted(source_rejects.items())),
        student_totals=sum_counts(entry.student for entry in parts),
        teacher_totals=teacher_totals,
        coverage=tuple(
            None if side.same_as_student else totals.coverage for side, totals in zip(plan.teachers, teacher_totals, strict=True)
        ),
        parts=parts,
        projections=tuple(projections),
    )


def check_limits(manifest: Manifest, config: PreprocessConfig) -> None:
    """Raises PublicationRefusedError when a side refuses too many rows or a teacher covers too little."""
    broken = []
    for side, share in reject_fractions(manifest).items():
        if share > config.max_reject_fraction:
            broken.append(f"{side}: {share:.2%} of the rows are refused, max_reject_fraction is {config.max_reject_fraction:.2%}")
    for index, totals in enumerate(manifest.teacher_totals):
        # What the configuration itself keeps out of KD is no fault of the alignment.
        coverage = totals.reachable_coverage
        if manifest.coverage[index] is not None and coverage < config.min_coverage:
            broken.append(f"teacher={index}: coverage is {coverage:.2%}, min_coverage is {config.min_coverage:.2%}")
    if not manifest.num_rows:
        broken.append("no row is left")
    if broken:
        raise PublicationRefusedError(
            f"{config.output} is not published: {'; '.join(broken)}.\n{figures_table(manifest)}\n"
            f"{refusals_table(config.output, manifest.parts)}\n"
            f"Look at {config.output}/rejects/*.parquet (source, line, reason), mend the input, "
            "or set the limit in the configuration and run again: what is built is kept."
        )


def reject_fractions(manifest: Manifest) -> dict[str, float]:
    """Share of rows that each side refuses: of all rows for source and student together, of the student's rows for a teacher."""
    shares = {"source and student": manifest.num_rejects / max(1, manifest.num_source_rows)}
    for index, totals in enumerate(manifest.teacher_totals):
        shares[f"teacher={index}"] = totals.num_rejects / max(1, totals.num_rows)
    return shares


def figures_table(manifest: Manifest) -> str:
    """The figures of a dataset as a table for people."""
    reasons = [("source", reason, count) for reason, count in manifest.source_rejects.items()]
    reasons += [("student", reason, count) for reason, count in manifest.student_totals.rejects.items()]
    lines = [f"{'side':<12} {'rows':>10} {'refused':>10} {'tokens':>14} {'coverage':>9}  model"]
    totals: list[tuple[str, PlannedSide, SideCounts, float | None]] = [
        ("student", manifest.student, manifest.student_totals, None)
    ]
    for index, side in enumerate(manifest.teachers):
        totals.append((f"teacher={index}", side, manifest.teacher_totals[index], manifest.coverage[index]))
        refused = manifest.teacher_totals[index].rejects
        reasons += [(f"teacher={index}", reason, count) for reason, count in refused.items()]
    for name, side, counts, coverage in totals:
        share = "same ids" if side.same_as_student else "" if coverage is None else f"{coverage:.2%}"
        lines.append(f"{name:<12} {counts.num_rows:>10} {counts.num_rejects:>10} {counts.num_tokens:>14} {share:>9}  {side.name}")
    lines.append(f"rows read {manifest.num_source_rows}, blank lines {manifest.num_blank_lines}")
    if empty := [source.name for source in manifest.sources if not source.num_rows]:
        more = f" and {len(empty) - _SHOWN_SOURCES} more" if len(empty) > _SHOWN_SOURCES else ""
        lines.append(f"sources without a row: {', '.join(empty[:_SHOWN_SOURCES])}{more}")
    lines += [f"refused: {name:<12} {reason:<24} {count:>8}" for name, reason, count in reasons]
    if manifest.mode == "chat":
        lines.append(chat_figures_table(manifest))
    return "\n".join(lines)
