"""Size and skew: a worker's memory and speed must not depend on how much there is, nor a run on one enormous document.

One worker with three tokenizers of about 130k to 150k tokens builds 10 MB of input, then 200 MB; its greatest resident size and
its speed are compared. Then two workers build the same bytes twice: all small documents, and one of them at the size limit.

Data: the bundled UDHR texts (with XTOK_SHARED its texts.jsonl), copied with each copy's lines shuffled.
"""

from __future__ import annotations

import json
import os
import random
import resource
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
DESCRIPTION = "memory and speed of a worker from 10 MB to 200 MB of input; one document at the size limit among small ones"

SIDES = ("qwen3", "llama3_2", "deepseek_v4")
SMALL_BYTES, LARGE_BYTES = 10_000_000, 200_000_000
SKEW_BYTES, LIMIT_BYTES, PART_BYTES = 24_000_000, 4_000_000, 2_000_000
REPEATS = 3


def run() -> list[dict[str, Any]]:
    """The figures."""
    tokenizers = real_tokenizers.build(real_tokenizers.default_folder())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_size_figures(folder, tokenizers), *_skew_figures(folder, tokenizers)]


def _size_figures(folder: Path, tokenizers: Path) -> list[dict[str, Any]]:
    speed: dict[int, float] = {}
    memory: dict[int, float] = {}
    with WorkerPool(1) as pool:
        _build(folder / "warm", _write(folder / "warm.jsonl", _texts(1_000_000)), tokenizers, pool)
        for size in (SMALL_BYTES, LARGE_BYTES):
            source = _write(folder / f"{size}.jsonl", _texts(size))
            seconds = [
                _build(folder / f"{size}-{repeat}", source, tokenizers, pool)
                for repeat in range(REPEATS if size == SMALL_BYTES else 1)
            ]
            speed[size] = source.stat().st_size / statistics.median(seconds) / 1e6
            memory[size] = pool.run(_peak_memory, 0, "memory")
    return [
        _figure("worker memory, three tokenizers, 200 MB", memory[LARGE_BYTES], None, "<= 900", "MB"),
        _figure("worker memory, 200 MB of input against 10", memory[LARGE_BYTES], memory[SMALL_BYTES], "<= 1.05", "MB"),
        _figure("worker speed, 200 MB of input against 10", speed[LARGE_BYTES], speed[SMALL_BYTES], ">= 0.9", "MB/s"),
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


def _build(output: Path, source: Path, tokenizers: Path, pool: WorkerPool) -> float:
    """Seconds from the sources to the published dataset."""
    student, *teachers = ({"tokenizer": str(tokenizers / side)} for side in SIDES)
    config = {"sources": [str(source)], "student": student, "teachers": teachers, "output": str(output)}
    began = time.perf_counter()
    preprocess(PreprocessConfig.model_validate(config | {"part_bytes": PART_BYTES}), runner=pool)
    return time.perf_counter() - began


def _peak_memory(_: int) -> float:
    """The worker's greatest resident size so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _figure(metric: str, value: float, baseline: float | None, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}
