"""Where the time of preprocessing goes, at 1 and 2 cores measured and at 64 simulated from what was measured.

One warm worker builds the texts, then two. Two costs are told apart by processor time: the caller's (plan, freeze, hand out, publish),
which one process does however many workers there are, and the workers', which parts divide. N cores then take the caller's seconds
plus the workers' divided by N: an estimate without contention for memory, disk or the last part, so an upper bound. Shares of the
stages are of the workers' wall time, from `runs/timings`.

Data: as in `tests.bench.preprocess`.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import real_tokenizers
from tests.bench.preprocess import TIMED_BYTES, build, documents, stage_seconds, write
from xtok.shards.pool import WorkerPool

NAME = "cores"
DESCRIPTION = "text to shards, student + 2 teachers: MB of input a second by cores, and the stage that binds next"

REPEATS = 3
SIMULATED = 64


@dataclass(frozen=True)
class _Run:
    """Seconds of one run. wall: by the clock; caller, workers: of processor time; stages: by name, of the parts' wall time."""

    wall: float
    caller: float
    workers: float
    stages: dict[str, float]


def run() -> list[dict[str, Any]]:
    """MB/s at 1, 2 and 64 cores, the caller's share, and the share of each stage."""
    tokenizers = real_tokenizers.build(real_tokenizers.default_folder())
    texts = documents()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copies = max(2, TIMED_BYTES // sum(len(text.encode()) for text in texts))
        source = write(folder / "texts.jsonl", texts, copies)
        megabytes = source.stat().st_size / 1e6
        one, two = (_fastest(folder, source, tokenizers, workers) for workers in (1, 2))
    many = one.caller + one.workers / SIMULATED
    total = sum(one.stages.values())
    figures = [
        _figure("1 core, measured", megabytes / one.wall, None, "MB/s"),
        _figure("2 cores, measured; beside 1", megabytes / two.wall, megabytes / one.wall, "MB/s"),
        _figure(f"{SIMULATED} cores, simulated; beside 1", megabytes / many, megabytes / one.wall, "MB/s"),
        _figure(f"the caller's share of {SIMULATED} cores' time", one.caller / many, None, "of the whole"),
        _figure("the caller, beside one worker", one.caller, one.workers, "s"),
    ]
    return figures + [
        _figure(f"a worker's {stage}", seconds / total, None, "of its time") for stage, seconds in one.stages.items()
    ]


def _fastest(folder: Path, source: Path, tokenizers: Path, workers: int) -> _Run:
    """The run of the least wall time; tokenizers are loaded before."""
    with WorkerPool(workers) as pool:
        build(folder / f"warm-{workers}", source, tokenizers, "auto", pool)
        runs = [_measured(folder / f"run-{workers}-{number}", source, tokenizers, pool, workers) for number in range(REPEATS)]
    return min(runs, key=lambda run: run.wall)


def _measured(output: Path, source: Path, tokenizers: Path, pool: WorkerPool, workers: int) -> _Run:
    own, theirs, began = time.process_time(), _workers_seconds(pool, workers), time.perf_counter()
    build(output, source, tokenizers, "auto", pool)
    wall, own = time.perf_counter() - began, time.process_time() - own
    theirs = _workers_seconds(pool, workers) - theirs
    return _Run(wall, own, theirs, stage_seconds(str(output)))


def _workers_seconds(pool: WorkerPool, workers: int) -> float:
    """Processor time of the pool's only worker; of several it is not asked."""
    return pool.run(_own_seconds, 0, "time") if workers == 1 else 0.0


def _own_seconds(_: int) -> float:
    return time.process_time()


def _figure(metric: str, value: float, baseline: float | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": None, "unit": unit}
