"""Preprocessing text end to end against Hugging Face's tokenization alone, disk and memory.

Both sides use the same two worker processes, texts and tokenizers; start-up (processes, loading, the first build) is left out on
both. Ours: plan, scan for duplicates, read, encode, prove, align, write, verify, publish. The baseline: `encode_batch_fast` of
texts that are already in memory. Runs are interleaved; medians count.

Data: the bundled UDHR texts, or with XTOK_SHARED its texts.jsonl; for the timings many copies of it with each document's lines
shuffled, for the disk figures the documents themselves, once.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from schemas.config import PreprocessConfig
from schemas.manifest import FileEntry
from tests import real_tokenizers
from tests.conftest import REPOSITORY
from xtok.shards.pipeline import absolute_config, preprocess
from xtok.shards.pool import WorkerPool
from xtok.shards.read import Dataset, open_dataset
from xtok.shards.timing import read_timings

NAME = "preprocess"
DESCRIPTION = "text to published shards, student + 2 teachers, against encode_batch_fast alone; bytes at rest; worker memory"

WORKERS = 2
DEFAULT_PART_BYTES: int = PreprocessConfig.model_fields["part_bytes"].default
REPEATS = 3
TIMED_BYTES = 20_000_000
NUM_PARTS = 16  # an odd number would leave one of the two workers without work for the last one
SIDES = ("qwen3", "llama3_2", "mistral_nemo")
_BASELINE: dict[str, Tokenizer] = {}


def run() -> list[dict[str, Any]]:
    """The figures."""
    texts = documents()
    tokenizers = real_tokenizers.build(real_tokenizers.default_folder())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = write(folder / "once.jsonl", texts, copies=1)
        copies = max(2, TIMED_BYTES // sum(len(text.encode()) for text in texts))
        large = write(folder / "timed.jsonl", texts, copies)
        with WorkerPool(WORKERS) as pool:
            times = _timings(folder, large, tokenizers, pool)
        with WorkerPool(1) as pool:  # without the baseline's tokenizers
            build(folder / "once", small, tokenizers, "auto", pool, part_bytes=DEFAULT_PART_BYTES)
            build(folder / "memory", large, tokenizers, "auto", pool, part_bytes=DEFAULT_PART_BYTES)
            rss = pool.run(_peak_memory, 0, "memory")
        figures = _time_figures(times) + _rest_figures(open_dataset(str(folder / "once")))
    figures.append(_figure("worker memory, three tokenizers, parts of the default size", rss, None, "<= 900", "MB"))
    return figures


def documents() -> list[str]:
    """The texts of the data at hand."""
    shared = os.environ.get("XTOK_SHARED")
    path = Path(shared) / "data" / "texts.jsonl" if shared else REPOSITORY / "infra" / "bundled" / "udhr.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]


def write(path: Path, documents: list[str], copies: int) -> Path:
    """Copies after the first have their lines shuffled, so that no two documents are the same."""
    shuffle = random.Random(7).shuffle
    with open(path, "w", encoding="utf-8") as stream:
        for copy in range(copies):
            for index, text in enumerate(documents):
                lines = text.splitlines(keepends=True)
                if copy:
                    shuffle(lines)
                stream.write(json.dumps({"id": f"{index}-{copy}", "text": "".join(lines)}, ensure_ascii=False) + "\n")
    return path


def stage_seconds(output: str) -> dict[str, float]:
    """Seconds of every stage over all parts, the longest first."""
    total: dict[str, float] = {}
    for part in open_dataset(output).manifest.parts:
        for name, seconds in read_timings(output, part.index).items():
            total[name] = total.get(name, 0.0) + seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _config(output: Path, source: Path, tokenizers: Path, backend: str, part_bytes: int) -> PreprocessConfig:
    student, *teachers = ({"tokenizer": str(tokenizers / side)} for side in SIDES)
    config = {"sources": [str(source)], "student": student, "teachers": teachers, "output": str(output), "backend": backend}
    return absolute_config(
        PreprocessConfig.model_validate(config | {"part_bytes": part_bytes, "workers": WORKERS, "projection": False})
    )


def build(output: Path, source: Path, tokenizers: Path, backend: str, pool: WorkerPool, part_bytes: int | None = None) -> None:
    """part_bytes: NUM_PARTS equal parts where None."""
    part_bytes = part_bytes or -(-source.stat().st_size // NUM_PARTS)
    preprocess(_config(output, source, tokenizers, backend, part_bytes), runner=pool)


def _timings(folder: Path, source: Path, tokenizers: Path, pool: WorkerPool) -> dict[str, list[float]]:
    batches = _batches(source, 2 * WORKERS)
    jobs = [(str(tokenizers / side / "tokenizer.json"), batch) for batch in batches for side in SIDES]
    number = iter(range(1000))

    def ours(backend: str) -> Callable[[], None]:
        return lambda: build(folder / f"run-{next(number)}", source, tokenizers, backend, pool)

    def baseline() -> None:
        list(pool.map(_encode_alone, jobs, lambda job: "the baseline"))

    runs = {"fast": ours("auto"), "reference": ours("tokenizers"), "baseline": baseline}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, action in runs.items():
            began = time.perf_counter()
            action()
            if repeat:  # the first round loads tokenizers and warms caches
                times[name].append(time.perf_counter() - began)
    # The baseline's jobs carry their texts to the workers; that is not tokenization.
    for repeat in range(REPEATS):
        began = time.perf_counter()
        list(pool.map(_receive_alone, jobs, lambda job: "the baseline"))
        times["baseline"][repeat] -= time.perf_counter() - began
    return times


def _batches(source: Path, count: int) -> list[list[str]]:
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").split("\n") if line]
    return [texts[index::count] for index in range(count)]


def _encode_alone(job: tuple[str, list[str]]) -> int:
    path, texts = job
    if path not in _BASELINE:
        _BASELINE[path] = Tokenizer.from_file(path)
        _BASELINE[path].no_truncation()
        _BASELINE[path].no_padding()
    return sum(len(_BASELINE[path].encode_batch_fast(texts[start : start + 512])) for start in range(0, len(texts), 512))


def _receive_alone(job: tuple[str, list[str]]) -> int:
    return len(job[1])


def _peak_memory(_: int) -> int:
    """The worker's greatest resident size so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _time_figures(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        _figure("text end to end, fast backend", median["fast"], median["baseline"], "<= 0.35", "s"),
        _figure("text end to end, fast backend off", median["reference"], median["baseline"], "<= 1.25", "s"),
    ]


def _rest_figures(dataset: Dataset) -> list[dict[str, Any]]:
    student_tokens = dataset.manifest.student_totals.num_tokens
    num_teachers = len(dataset.manifest.teachers)
    tokens = student_tokens + sum(totals.num_tokens for totals in dataset.manifest.teacher_totals)
    ids = alignment = 0
    for part in dataset.manifest.parts:
        for file in (part.student_file, *part.teacher_files):
            assert file is not None, "no teacher of this benchmark has the student's tokenizer"
            sizes = _column_bytes(dataset, file)
            ids += sizes["input_ids"]
            alignment += sum(sizes.get(name, 0) for name in ("student_chunk_id", "teacher_chunk_id", "pair_is_correct"))
    for_each = alignment / student_tokens / num_teachers
    return [
        _figure("ids at rest", ids / tokens, None, "<= 1.6", "bytes a token"),
        _figure("alignment at rest, a teacher", for_each, None, "<= 0.4", "bytes a student token"),
    ]


def _column_bytes(dataset: Dataset, file: FileEntry) -> dict[str, int]:
    sizes: dict[str, int] = {}
    with dataset.open_parquet(file) as parquet:
        for group in range(parquet.metadata.num_row_groups):
            for column in range(parquet.metadata.num_columns):
                chunk = parquet.metadata.row_group(group).column(column)
                name = chunk.path_in_schema.split(".")[0]
                sizes[name] = sizes.get(name, 0) + chunk.total_compressed_size
    return sizes


def _figure(metric: str, value: float, baseline: float | None, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}
