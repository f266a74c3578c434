"""What the report of a preprocessing run says: sections of text, tables and charts, the same for Markdown and HTML.

Pure functions of the manifest, the figures of the parts and the times of the run; nothing is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schemas.manifest import Manifest, SideCounts
from schemas.plan import PlannedSide
from xtok.shards.figures import MAX_SIZE, Figures, PairFigures
from xtok.shards.timing import OTHER

__all__ = ["Chart", "RunReport", "Section", "Table", "report_sections"]

# Of more sources, those with the lowest coverage are shown.
MAX_SOURCES = 40
MAX_MESSAGE_CHARACTERS = 300
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished run. output: folder or URL of the dataset. seconds: wall clock of each step of the run, in order."""

    manifest: Manifest
    figures: Figures
    output: str
    seconds: dict[str, float]

    @property
    def sides(self) -> list[tuple[str, PlannedSide, SideCounts]]:
        """(name, side, figures) of the student and of each teacher."""
        manifest = self.manifest
        teachers = enumerate(zip(manifest.teachers, manifest.teacher_totals, strict=True))
        return [
            ("student", manifest.student, manifest.student_totals),
            *((f"teacher {index}", planned, counts) for index, (planned, counts) in teachers),
        ]


@dataclass(frozen=True, slots=True)
class Table:
    """headers, and rows of as many cells; the first `num_text` columns hold text, the others numbers."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    num_text: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """Groups of bars: `series` holds (name, value of each category), `unit` what stands behind a value."""

    categories: list[str]
    series: list[tuple[str, list[float]]]
    unit: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, its sentences, and what stands below them."""

    title: str
    sentences: list[str] = field(default_factory=list)
    blocks: list[Table | Chart] = field(default_factory=list)


def report_sections(report: RunReport) -> list[Section]:
    """All sections in reading order; the first one's title is the report's."""
    sections = [_overview(report), _chunk_sizes(report), _sources(report), _lengths(report), _rejects(report), _time(report)]
    return [section for section in sections if section is not None]


def _overview(report: RunReport) -> Section:
    manifest = report.manifest
    num_tokens = sum(counts.num_tokens for _, _, counts in report.sides)
    told = (
        f"{manifest.num_rows:,} rows from {manifest.num_source_rows:,} read, in {len(manifest.parts):,} parts. "
        f"{num_tokens:,} tokens in {sum(report.seconds.values()):.1f} s."
    )
    headers = ("side", "tokenizer", "route", "backend", "rows", "refused", "truncated", "tokens", "coverage", "one to one")
    blocks: list[Table | Chart] = [Table(headers, [_side_row(*side) for side in report.sides], num_text=4)]
    if manifest.mode == "chat":
        blocks.append(_chat_table(report))
    return Section("Aligned dataset", [f"{report.output}: {told}", *_notes(report)], blocks)


def _side_row(name: str, planned: PlannedSide, counts: SideCounts) -> tuple[str, ...]:
    if planned.same_as_student:
        return (name, "same as the student", *[""] * 8)
    is_aligned = name != "student"
    return (
        name,
        planned.name,
        planned.route,
        planned.backend,
        f"{counts.num_rows - counts.num_null_rows:,}",
        f"{counts.num_rejects:,}",
        f"{counts.num_truncated:,}",
        f"{counts.num_tokens:,}",
        f"{counts.coverage:.4f}" if is_aligned else "",
        _share(counts.num_one_to_one, counts.num_chunks) if is_aligned else "",
    )


def _chat_table(report: RunReport) -> Table:
    headers = (
        "side",
        "rendered",
        "tokens under the mask",
        "of them thinking",
        "rows with thinking",
        "reasoning dropped",
        "left out",
    )
    rows = []
    for name, _, counts in report.sides:
        numbers = (counts.num_rendered, counts.num_mask_tokens, counts.num_thinking_tokens, counts.num_thinking_rows)
        rows.append((name, *(f"{number:,}" for number in (*numbers, counts.num_dropped_reasoning, counts.num_left_out))))
    return Table(headers, rows)


def _notes(report: RunReport) -> Iterator[str]:
    """What a careful reader should know: why not the fast backend, what fell back, what took the offset route."""
    for name, planned, counts in report.sides:
        if planned.backend_note:
            yield f"{name}: {planned.backend_note}"
        if counts.num_backend_fallbacks:
            yield f"{name}: {counts.num_backend_fallbacks} parts redone with the reference: {counts.backend_difference}"
        if planned.renderer_note:
            yield f"{name}: rendered by {planned.renderer}: {planned.renderer_note}"
        if counts.num_renderer_fallbacks:
            yield f"{name}: {counts.num_renderer_fallbacks} parts rendered again with Jinja: {counts.renderer_difference}"
        if counts.num_unverified_rows:
            yield f"{name}: {counts.num_unverified_rows:,} rows aligned by offsets (bytes could not be verified)"


def _chunk_sizes(report: RunReport) -> Section | None:
    section = Section(
        "Chunks by their size", ["A chunk is the shortest run of tokens that stands for the same bytes on both sides."]
    )
    for index, teacher in sorted(report.figures.teachers.items()):
        sizes, total = teacher.chunk_sizes, int(teacher.chunk_sizes.sum())
        if not total:
            continue
        many = sizes[2:, 2:].sum()
        section.sentences.append(
            f"Teacher {index}, {total:,} chunks: one to one {_share(int(sizes[1, 1]), total)}, one student token to several "
            f"{_share(int(sizes[1, 2:].sum()), total)}, several to one {_share(int(sizes[2:, 1].sum()), total)}, several to several "
            f"{_share(int(many), total)}."
        )
        by_side = (("student", sizes.sum(axis=1)), ("teacher", sizes.sum(axis=0)))
        section.blocks.append(
            Chart(
                [*(str(size) for size in range(1, MAX_SIZE)), f"{MAX_SIZE} or more"],
                [(f"{side} tokens in a chunk", _percent(counts[1:], total)) for side, counts in by_side],
                "% of chunks",
                f"Teacher {index}: {report.manifest.teachers[index].name}",
            )
        )
    return section if section.blocks else None


def _sources(report: RunReport) -> Section:
    figures, teachers = report.figures, sorted(report.figures.teachers.items())
    nothing = PairFigures()

    def coverage(pairs: PairFigures) -> float:
        return pairs.num_covered / pairs.num_supervised if pairs.num_supervised else 1.0

    def worst(name: str) -> float:
        return min((coverage(teacher.sources.get(name, nothing)) for _, teacher in teachers), default=1.0)

    shown = sorted(figures.source_rows, key=lambda name: (worst(name), name))[:MAX_SOURCES]
    rows = []
    for name in shown:
        pairs = [teacher.sources.get(name, nothing) for _, teacher in teachers]
        cells = [(f"{coverage(pair):.4f}", _share(pair.num_one_to_one, pair.num_chunks)) for pair in pairs]
        rows.append((name, f"{figures.source_rows[name]:,}", *(cell for pair in cells for cell in pair)))
    headers = ("source", "rows", *(f"{what} {index}" for index, _ in teachers for what in ("coverage", "one to one")))
    left_out = len(figures.source_rows) - len(shown)
    sentences = [f"The {len(shown)} sources with the lowest coverage, of {len(figures.source_rows):,}."] if left_out else []
    return Section("Coverage by source", sentences, [Table(headers, rows)] if rows else [])


def _lengths(report: RunReport) -> Section | None:
    counted = [("student", report.figures.lengths)]
    counted += [(f"teacher {index}", teacher.lengths) for index, teacher in sorted(report.figures.teachers.items())]
    counted = [(name, lengths) for name, lengths in counted if lengths.sum()]
    if not counted:
        return None
    longest = max(len(lengths) for _, lengths in counted)
    bounds = [0, 16]
    while bounds[-1] < longest:
        bounds.append(2 * bounds[-1])
    pairs = list(pairwise(bounds))
    series = []
    for name, lengths in counted:
        series.append((name, _percent([int(lengths[low:high].sum()) for low, high in pairs], int(lengths.sum()))))
    headers = ("side", "shortest", "median", "mean", "90 %", "99 %", "longest")
    rows = [(name, *_quantiles(lengths)) for name, lengths in counted]
    chart = Chart([f"{low:,} to {high - 1:,}" if low else f"up to {high - 1}" for low, high in pairs], series, "% of rows")
    return Section("Tokens in a row", [], [chart, Table(headers, rows)])


def _quantiles(lengths: IntArray) -> tuple[str, ...]:
    below = np.cumsum(lengths)
    at = [int(np.searchsorted(below, share * below[-1])) for share in (0.5, 0.9, 0.99)]
    present = np.flatnonzero(lengths)
    mean = float(np.arange(len(lengths)) @ lengths) / float(below[-1])
    return (f"{present[0]:,}", f"{at[0]:,}", f"{mean:,.1f}", f"{at[1]:,}", f"{at[2]:,}", f"{present[-1]:,}")


def _rejects(report: RunReport) -> Section:
    refusals = sorted(report.figures.refusals.items(), key=lambda item: (-item[1].num_rows, item[0]))
    if not refusals:
        return Section("Refused rows", ["No row was refused."])
    num_read = max(1, report.manifest.num_source_rows)
    counts = [(side, reason, f"{found.num_rows:,}", _share(found.num_rows, num_read)) for (side, reason), found in refusals]
    examples = []
    for (side, reason), found in refusals:
        for source, line, sample_id, message in found.examples:
            examples.append((side, reason, f"{source}:{line}", sample_id or "", _shortened(message)))
    return Section(
        "Refused rows",
        ["Each with file, line and message in rejects/*.parquet; the first of each kind:"],
        [
            Table(("refused by", "reason", "rows", "of all read"), counts, num_text=2),
            Table(("refused by", "reason", "where", "id", "message"), examples, num_text=5),
        ],
    )


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "…"


def _time(report: RunReport) -> Section:
    wall = Table(("step", "seconds"), [(name, f"{seconds:.1f}") for name, seconds in report.seconds.items()])
    section = Section("Time", [], [wall])
    stages = sorted(report.figures.seconds.items(), key=lambda item: (item[0] == OTHER, -item[1]))
    total = sum(seconds for _, seconds in stages)
    if total > 0:
        section.sentences.append(
            f"{total:,.1f} s of the workers' time went into the parts (a part found done counts as in the run that built it)."
        )
        shares = [100 * seconds / total for _, seconds in stages]
        section.blocks.append(Chart([name for name, _ in stages], [("share of the workers' time", shares)], "% of the time"))
    return section


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _percent(counts: Sequence[int] | IntArray, total: int) -> list[float]:
    return [100 * int(count) / total for count in counts]
