"""From a configuration to the frozen plan: sources digested, parts balanced by bytes, duplicates found, tokenizers described.

1. One pass over each source finds its digest and checkpoints between lines.
2. The stream of all sources is cut at the checkpoints nearest to equal shares: a part may end inside a file or span many.
3. The ids of all rows are scanned, part by part, in the workers; of equal ids the first in plan order stays.
4. Each tokenizer is loaded in a worker, and its fast backend proven on rows from all over the data.

Nothing here depends on the number of workers or on the day, so a relaunch plans again and must come to the same plan.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import jinja2
import pyarrow as pa

from schemas.config import PreprocessConfig
from schemas.plan import Plan, PlannedPart, PlannedSide
from xtok import storage
from xtok.errors import ConfigError, StorageError
from xtok.shards.chat_sides import ChatSideJob, chat_fields, describe_chat_side, same_chat_side
from xtok.shards.cutting import balanced_parts
from xtok.shards.duplicates import ScanJob, duplicate_rows
from xtok.shards.parse import RowFields
from xtok.shards.pool import Runner
from xtok.shards.rows import SourceAt, read_blocks
from xtok.shards.scan import SourceScan, scan_source
from xtok.shards.sides import SideJob, describe_side, same_side
from xtok.shards.sources import SourceFile, find_sources

__all__ = ["Progress", "RunPlan", "make_plan", "plan_bytes", "portable_config", "read_plan", "row_fields"]

Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]
_CHECKPOINTS_PER_PART = 256
_SAMPLE_PARTS = 16
_SAMPLE_ROWS = 128
_SAMPLE_CHARACTERS = 250_000
_NOT_PORTABLE = frozenset(
    ["sources", "student", "teachers", "output", "engine", "workers", "max_reject_fraction", "min_coverage", "render_date"]
)
# What a teacher alone is subject to stands with the teacher (`PlannedSide.chat`), so that one more teacher changes nothing else.
_NOT_SHARED_IN_CHATS = frozenset(["text_field", "overlength", "drop_first_assistant_chunk_kl_by_teacher"])
_CHAT_ONLY = frozenset(
    [
        "messages_field",
        "conversations_field",
        "prompt_field",
        "completion_field",
        "system_field",
        "tools_field",
        "chat_template_kwargs_field",
        "include_thinking_in_loss",
        "native_thinking_alignment",
        "kd_alignment_regions",
        "drop_first_assistant_chunk_kl_by_teacher",
    ]
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The frozen plan, and where this run finds its sources: URLs in the order of `plan.sources`, and what marks each as the one
    that was digested (`storage.version`)."""

    plan: Plan
    source_urls: tuple[str, ...]
    source_versions: tuple[str, ...]

    def with_plan(self, plan: Plan) -> RunPlan:
        """The same sources under another plan of them."""
        return replace(self, plan=plan)

    def check_sources(self) -> None:
        """Raises StorageError when a source was written anew since it was digested: what was built may be of either content."""
        for url, planned in zip(self.source_urls, self.source_versions, strict=True):
            if storage.version(url) != planned:
                raise StorageError(
                    f"{url} changed while this run read it: nothing is published, for what is built may be of either content. "
                    "Remove the output folder, and run again when the file stays as it is."
                )

    def sources_of(self, part: PlannedPart) -> dict[int, SourceAt]:
        """The sources that a part reads."""
        used = {segment.source for segment in part.segments}
        return {index: SourceAt(self.plan.sources[index], self.source_urls[index]) for index in sorted(used)}


def make_plan(config: PreprocessConfig, runner: Runner, progress: Progress | None = None) -> RunPlan:
    """The plan of a configuration. Raises ConfigError, StorageError or TokenizerError before anything is written."""
    files = find_sources(config.sources)
    versions = tuple(storage.version(file.url) for file in files)
    fields = row_fields(config)
    spacing = max(1, config.part_bytes // _CHECKPOINTS_PER_PART)
    jobs = [(file, spacing) for file in files]
    scanned = runner.map(_scan_source, jobs, lambda job: f"the scan of source {job[0].name}")
    scans = list(_watched("scan sources", scanned, len(jobs), progress))
    sources = tuple(scan.planned for scan in scans)
    if not any(source.num_rows for source in sources):
        named = (f"{file.url} ({source.num_lines} lines)" for file, source in zip(files, sources, strict=True))
        raise ConfigError("sources hold no rows: " + ", ".join(named))
    urls = [file.url for file in files]
    parts = balanced_parts(scans, config.part_bytes)
    scan_jobs = [_scan_job(part, scans, urls, fields) for part in parts]
    duplicates = duplicate_rows(scan_jobs, runner, lambda found, total: _watched("find duplicate ids", found, total, progress))
    parts = [part.model_copy(update={"duplicates": found}) for part, found in zip(parts, duplicates, strict=True)]
    render_date = _render_date(config)
    sample = _sample(scan_jobs, runner)
    student, teachers = _describe_sides(config, sample, render_date, runner)
    plan = Plan(
        mode=config.mode,
        config=portable_config(config),
        environment=_environment(config),
        render_date=render_date,
        sources=sources,
        student=student,
        teachers=teachers,
        parts=tuple(parts),
    )
    return RunPlan(plan, tuple(urls), versions)


def row_fields(config: PreprocessConfig) -> RowFields:
    """The fields that rows are read by."""
    chat = chat_fields(config) if config.mode == "chat" else None
    return RowFields(config.text_field, config.id_field, config.loss_multiplier_field, config.max_document_bytes, chat)


def portable_config(config: PreprocessConfig) -> dict[str, Any]:
    """The part of the configuration that shapes the output and holds no place, time, engine or threshold."""
    left_out = _NOT_PORTABLE | (_CHAT_ONLY if config.mode == "text" else _NOT_SHARED_IN_CHATS)
    return {name: value for name, value in config.model_dump(mode="json").items() if name not in left_out}


def _scan_source(job: tuple[SourceFile, int]) -> SourceScan:
    return scan_source(*job)


def _scan_job(part: PlannedPart, scans: Sequence[SourceScan], urls: Sequence[str], fields: RowFields) -> ScanJob:
    used = {segment.source for segment in part.segments}
    return ScanJob(part.segments, {index: SourceAt(scans[index].planned, urls[index]) for index in used}, fields)


def _sample(jobs: Sequence[ScanJob], runner: Runner) -> tuple[Any, ...]:
    """Texts, or conversations, from all over the data: the first rows of at most sixteen parts, spread evenly."""
    chosen = jobs[:: max(1, -(-len(jobs) // _SAMPLE_PARTS))]
    sample_jobs = [(job, _SAMPLE_ROWS // len(chosen), _SAMPLE_CHARACTERS // len(chosen)) for job in chosen]
    texts = runner.map(_first_texts, sample_jobs, lambda job: "the sample of texts")
    return tuple(text for part in texts for text in part)


def _first_texts(sample_job: tuple[ScanJob, int, int]) -> tuple[Any, ...]:
    """Up to so many rows and characters of one part, at least one row."""
    job, max_rows, max_characters = sample_job
    texts: list[Any] = []
    sizes: list[int] = []
    for block in read_blocks(job.segments, job.sources, job.fields, frozenset(), block_bytes=max_characters):
        texts.extend(block.text if job.fields.chat is None else block.conversation)
        sizes.extend(block.size)
        if len(texts) >= max_rows or sum(sizes) >= max_characters:
            break
    ends = list(accumulate(sizes))
    return tuple(text for row, text in enumerate(texts[:max_rows]) if row == 0 or ends[row] <= max_characters)


def _describe_sides(
    config: PreprocessConfig, sample: tuple[Any, ...], render_date: datetime.date | None, runner: Runner
) -> tuple[PlannedSide, tuple[PlannedSide, ...]]:
    sides = [("student", config.student), *((f"teacher {index}", side) for index, side in enumerate(config.teachers))]
    if render_date is None:
        jobs = [SideJob(label, side, config.backend, sample) for label, side in sides]
        described, same = runner.map(describe_side, jobs, _label_of_side), same_side
    else:
        drop_first = (False, *(config.drop_first_assistant_chunk_kl_by_teacher or [False] * len(config.teachers)))
        chat_jobs = [
            ChatSideJob.of(label, side, config, render_date, sample, drop_first_chunk=drop)
            for (label, side), drop in zip(sides, drop_first, strict=True)
        ]
        described, same = runner.map(describe_chat_side, chat_jobs, _label_of_side), same_chat_side
    student, *teachers = described
    return student, tuple(teacher.model_copy(update={"same_as_student": same(student, teacher)}) for teacher in teachers)


def _label_of_side(job: SideJob | ChatSideJob) -> str:
    return f"the tokenizer of the {job.label}"


def _environment(config: PreprocessConfig) -> dict[str, str]:
    """Versions of the libraries that decide the tables' bytes, tokenizers aside."""
    renderer = {} if config.mode == "text" else {"jinja2": jinja2.__version__}
    return renderer | {"pyarrow": pa.__version__}


def _render_date(config: PreprocessConfig) -> datetime.date | None:
    if config.mode == "text":
        return None  # nothing is rendered: the same bytes on any day
    return config.render_date or datetime.datetime.now(datetime.UTC).date()


def _watched(stage: str, results: Iterator[Result], total: int, progress: Progress | None) -> Iterator[Result]:
    for done, result in enumerate(results, start=1):
        if progress is not None:
            progress(stage, done, total)
        yield result


def plan_bytes(plan: Plan) -> bytes:
    """plan.json, the same bytes for the same plan."""
    return (plan.model_dump_json(indent=1) + "\n").encode()


def read_plan(output: str) -> Plan | None:
    """The plan that a dataset's folder holds, or None."""
    url = storage.join(output, "plan.json")
    return Plan.model_validate_json(storage.read_bytes(url)) if storage.exists(url) else None
