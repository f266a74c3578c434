"""What `engine: ray` costs for each part, beside the work itself, against the local engine.

A dataset of many small parts is built; then each engine is given all of them again and finds each done by its digests (some
milliseconds, measured alone and taken off). What remains is what an engine costs: a Prefect task, the way to a worker and back.
Both have two workers of this machine and the same Prefect server; rounds are interleaved and the start of an engine is a figure of
its own. A process of its own measures, for Prefect takes its settings when it is imported.

Data: the bundled UDHR texts on bundled tokenizers.
"""

from __future__ import annotations

if __name__ == "__main__":  # before Prefect is imported anywhere; not where the benchmarks are only listed
    from flows.environment import use_private_home

    use_private_home()

# isort: split
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.unit.shards.support import UDHR, config_for

NAME = "ray"
DESCRIPTION = "what an engine costs a part beside its work: Ray against the local one, both on two workers of this machine"

WORKERS = 2
ROUNDS = 3
PART_BYTES = 12_000


def run() -> list[dict[str, Any]]:
    """The figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.ray_engine", folder]
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_API")}
        answer = subprocess.run(command, cwd=REPOSITORY, env=alone, stdout=subprocess.PIPE, text=True, check=True)
    figures: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def measure(folder: Path) -> list[dict[str, Any]]:
    """The same, in this process, which Prefect must not have been imported into."""
    from flows.server import prepare_lone_run
    from xtok.shards.part import run_part
    from xtok.shards.pipeline import plan_dataset, preprocess
    from xtok.shards.pool import SerialRunner, WorkerPool
    from xtok.shards.records import part_jobs

    prepare_lone_run()
    config = config_for(folder / "out", UDHR, part_bytes=PART_BYTES, workers=WORKERS)
    with WorkerPool(WORKERS) as pool:
        preprocess(config, runner=pool)
    jobs = part_jobs(plan_dataset(config, SerialRunner()), config)
    began = time.perf_counter()
    for job in jobs:
        run_part(job)
    work = (time.perf_counter() - began) / len(jobs) / WORKERS
    seconds: dict[str, list[tuple[float, float]]] = {"local": [], "ray": []}
    for _ in range(ROUNDS):
        for engine, found in seconds.items():
            found.append(_timed(config.model_copy(update={"engine": engine}), jobs))
    start = {engine: statistics.median(first for first, _ in found) for engine, found in seconds.items()}
    part = {engine: statistics.median(second for _, second in found) - work for engine, found in seconds.items()}
    return [
        _figure(f"Ray, wall time a part beside its work ({len(jobs)} parts)", part["ray"], "<= 1"),
        _figure("local, wall time a part beside its work", part["local"], "<= 0.1"),
        _figure("Ray, start of a cluster of this machine", start["ray"], None),
        _figure("local, start of the workers", start["local"], None),
    ]


def _timed(config: Any, jobs: Any) -> tuple[float, float]:
    """(seconds until the engine has built its first parts, wall seconds for each part of a whole round after that)."""
    from prefect import flow

    from flows.engines import open_engine
    from flows.preprocess import THREADS

    @flow(name="overhead", task_runner=THREADS, persist_result=False)
    def timed() -> tuple[float, float]:
        began = time.perf_counter()
        with open_engine(config) as engine:
            list(engine.build(jobs[: 2 * WORKERS]))
            started = time.perf_counter()
            list(engine.build(jobs))
            return started - began, (time.perf_counter() - started) / len(jobs)

    return timed()


def _figure(metric: str, value: float, limit: str | None) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": None, "limit": limit, "unit": "s"}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
