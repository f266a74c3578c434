"""Where the work of `preprocess` runs: the processes of this machine, or a Ray cluster over storage that all machines reach.

Both give the same bytes: what runs is the same plain function of a job. Ray is an extra, imported only when it is asked for; a
cluster is found by RAY_ADDRESS, else one is started on 127.0.0.1 for the length of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from prefect import task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.futures import as_completed

from schemas.config import PreprocessConfig
from schemas.manifest import PartEntry
from xtok.errors import ConfigError, WorkerDiedError, XtokError
from xtok.shards.part import run_part
from xtok.shards.pool import WORKER_ENVIRONMENT, Runner, WorkerPool, default_workers
from xtok.shards.records import PartJob

__all__ = ["Engine", "open_engine"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine(Protocol):
    """What a flow needs of a place to work at."""

    @property
    def runner(self) -> Runner:
        """For what is no part: scans, tokenizers, reports."""

    @property
    def place(self) -> str:
        """Where the parts run, for people."""

    def build(self, jobs: Sequence[PartJob]) -> Iterator[PartEntry]:
        """One Prefect task a part; the entries as they are finished."""


@contextmanager
def open_engine(config: PreprocessConfig) -> Iterator[Engine]:
    """The engine of a configuration, until the block ends. Raises ConfigError when its extra is not installed."""
    if config.engine == "ray":
        with _ray_engine(config) as engine:
            yield engine
        return
    with WorkerPool(config.workers) as pool:
        yield _LocalEngine(pool, f"{pool.workers} workers")


@task(name="part", task_run_name="part-{job.part.index:05d}", persist_result=False, cache_policy=NO_CACHE)
def _part_in_pool(job: PartJob, pool: WorkerPool) -> PartEntry:
    """Build one part in a worker process, or find it done."""
    return pool.run(run_part, job, job.label)


@task(name="part", task_run_name="part-{job.part.index:05d}", persist_result=False, cache_policy=NO_CACHE)
def _part_here(job: PartJob) -> PartEntry:
    """Build one part in this process, a worker of the cluster, or find it done. Its tokenizers stay for the next part."""
    return _in_worker(run_part, job)


def _in_worker(function: Callable[[Item], Result], item: Item) -> Result:
    os.environ.update(WORKER_ENVIRONMENT)
    return function(item)


@dataclass(frozen=True)
class _LocalEngine:
    runner: WorkerPool
    place: str

    def build(self, jobs: Sequence[PartJob]) -> Iterator[PartEntry]:
        for future in as_completed(_part_in_pool.map(jobs, unmapped(self.runner))):
            yield future.result()


@contextmanager
def _ray_engine(config: PreprocessConfig) -> Iterator[Engine]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from prefect_ray import RayTaskRunner
    except ImportError as error:
        raise ConfigError(f"engine: ray needs the extra [ray] ({error}): pip install 'xtok[ray]', or leave engine out") from error
    with RayTaskRunner(init_kwargs=_cluster(config)) as task_runner:
        cores = int(cast(Any, ray).cluster_resources().get("CPU", 1))
        yield _RayEngine(_RayRunner(ray, cores), f"{cores} cores of a Ray cluster", task_runner)


def _cluster(config: PreprocessConfig) -> dict[str, Any]:
    """Arguments of ray.init; RAY_ADDRESS names a cluster that is there."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        return quiet
    alone = {"num_cpus": config.workers or default_workers(), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    return quiet | alone


@dataclass(frozen=True)
class _RayRunner:
    """Plain functions on the cluster, without a Prefect task each. `map` keeps every core busy and no more in flight."""

    ray: Any
    cores: int

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Result]:
        """Results in the order of the items. Raises what the function raised, WorkerDiedError naming the item."""
        remote = self.ray.remote(_in_worker)
        started: list[Any] = []
        for index, item in enumerate(items):
            while len(started) < min(len(items), index + 2 * self.cores):
                started.append(remote.remote(function, items[len(started)]))
            reference, started[index] = started[index], None  # lets the cluster forget the result
            with _typed(self.ray, label(item)):
                result = self.ray.get(reference)
            yield result


@dataclass(frozen=True)
class _RayEngine:
    runner: _RayRunner
    place: str
    task_runner: Any

    def build(self, jobs: Sequence[PartJob]) -> Iterator[PartEntry]:
        for future in as_completed(self.task_runner.map(_part_here, {"job": list(jobs)})):
            with _typed(self.runner.ray, "a part"):
                entry: PartEntry = future.result()
            yield entry


@contextmanager
def _typed(ray: Any, label: str) -> Iterator[None]:
    """Errors of the body as they were raised; those of the cluster as WorkerDiedError."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, XtokError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(
            f"the Ray cluster gave up on {label}: {error}. What is finished is kept: run the same command again."
        ) from error
