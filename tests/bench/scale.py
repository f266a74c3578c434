"""Size and skew: a worker's memory and speed must not depend on how much there is, nor a run on one enormous document.

One worker with three tokenizers of about 130k to 150k tokens builds 10 MB of input, then 100 MB (XTOK_BENCH_SCALE_MB=1000: 1 GB,
in some minutes and 3 GB of the temporary folder). Its greatest resident size is compared, and the speed: input for each second of
processor time, the worker's and the caller's, which a busy machine does not change. What is built once for each pair of
tokenizers, the projection, comes first: it counts for memory, not for speed. Then two workers build the same number of bytes by the
clock: all small documents, and one of them at the size limit.

Data: the bundled UDHR texts (with XTOK_SHARED its texts.jsonl), copied with each copy's lines shuffled.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.config import PreprocessConfig
from tests import real_tokenizers
from tests.conftest import REPOSITORY
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import WorkerPool

NAME = "scale"
DESCRIPTION = "memory and speed of a worker as the input grows; one document at the size limit among small ones"

SIDES = ("qwen3", "llama3_2", "deepseek_v4")
SMALL_MB, LARGE_MB = 10, int(os.environ.get("XTOK_BENCH_SCALE_MB", "100"))
SKEW_BYTES, LIMIT_BYTES, PART_BYTES = 16_000_000, 4_000_000, 2_000_000
REPEATS = 3


def run() -> list[dict[str, Any]]:
    """The figures."""
    tokenizers = real_tokenizers.build(real_tokenizers.default_folder())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_size_figures(folder, tokenizers), *_skew_figures(folder, tokenizers)]


def _size_figures(folder: Path, tokenizers: Path) -> list[dict[str, Any]]:
    speed: dict[int, list[float]] = {SMALL_MB: [], LARGE_MB: []}
    memory: dict[int, float] = {}
    with WorkerPool(1) as pool:
        _build(folder / "warm", _write(folder / "warm.jsonl", _texts(1_000_000)), tokenizers, pool, projection=True)
        small, large = (_write(folder / f"{size}.jsonl", _texts(size * 1_000_000)) for size in (SMALL_MB, LARGE_MB))
        # The small one again at the end: a machine whose clock went down meanwhile is no finding.
        for number, (size, source) in enumerate([(SMALL_MB, small)] * 2 + [(LARGE_MB, large), (SMALL_MB, small)]):
            before = _processor_seconds(pool)
            _build(folder / f"out-{number}", source, tokenizers, pool)
            speed[size].append(source.stat().st_size / (_processor_seconds(pool) - before) / 1e6)
            memory.setdefault(size, pool.run(_peak_memory, 0, "memory"))
            shutil.rmtree(folder / f"out-{number}")
    median = {size: statistics.median(speeds) for size, speeds in speed.items()}
    return [
        _figure(f"worker memory, three tokenizers, {LARGE_MB} MB", memory[LARGE_MB], None, "<= 900", "MB"),
        _figure(f"worker memory, {LARGE_MB} MB of input against {SMALL_MB}", memory[LARGE_MB], memory[SMALL_MB], "<= 1.05", "MB"),
        _figure(f"worker speed, {LARGE_MB} MB of input against {SMALL_MB}", median[LARGE_MB], median[SMALL_MB], ">= 0.9", "MB/s"),
    ]


def _skew_figures(folder: Path, tokenizers: Path) -> list[dict[str, Any]]:
    even = _write(folder / "even.jsonl", _texts(SKEW_BYTES))
    small = _texts(SKEW_BYTES - LIMIT_BYTES)
    whole = "".join(_texts(LIMIT_BYTES)).encode()[: LIMIT_BYTES - 8].decode(errors="ignore")
    skewed = _write(folder / "skewed.jsonl", _with_one(small, whole))
    seconds: dict[str, list[float]] = {"even": [], "skewed": []}
    with WorkerPool(2) as pool:
        _build(folder / "warm-2", folder / "warm.jsonl", tokenizers, pool)
        for repeat in range(REPEATS):
            for kind, source in (("even", even), ("skewed", skewed)):
                seconds[kind].append(_build(folder / f"{kind}-{repeat}", source, tokenizers, pool))
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    return [_figure("one document of 4 MB among small ones", median["skewed"], median["even"], "<= 1.3", "s")]


def _texts(num_bytes: int) -> Iterator[str]:
    """Documents of together so many bytes of UTF-8."""
    shared = os.environ.get("XTOK_SHARED")
    path = Path(shared) / "data" / "texts.jsonl" if shared else REPOSITORY / "infra" / "bundled" / "udhr.jsonl"
    documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]
    shuffle = random.Random(7).shuffle
    while True:
        for text in documents:
            lines = text.splitlines(keepends=True)
            shuffle(lines)
            text = "".join(lines)
            num_bytes -= len(text.encode())
            if num_bytes < 0:
                return
            yield text


def _with_one(texts: Iterator[str], large: str) -> Iterator[str]:
    """The large document after the first hundred."""
    for number, text in enumerate(texts):
        if number == 100:
            yield large
        yield text


def _write(path: Path, texts: Iterator[str]) -> Path:
    with open(path, "w", encoding="utf-8") as stream:
        for number, text in enumerate(texts):
            stream.write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
    return path


def _build(output: Path, source: Path, tokenizers: Path, pool: WorkerPool, *, projection: bool = False) -> float:
    """Seconds by the clock from the sources to the published dataset."""
    student, *teachers = ({"tokenizer": str(tokenizers / side)} for side in SIDES)
    config = {"sources": [str(source)], "student": student, "teachers": teachers, "output": str(output), "projection": projection}
    began = time.perf_counter()
    preprocess(PreprocessConfig.model_validate(config | {"part_bytes": PART_BYTES}), runner=pool)
    return time.perf_counter() - began


def _processor_seconds(pool: WorkerPool) -> float:
    """Of this process and the pool's only worker."""
    return time.process_time() + pool.run(_own_seconds, 0, "time")


def _own_seconds(_: int) -> float:
    return time.process_time()


def _peak_memory(_: int) -> float:
    """The worker's greatest resident size so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _figure(metric: str, value: float, baseline: float | None, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}
