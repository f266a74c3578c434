"""Worker processes that start without the caller's main module, take one task each, and never outlive their parent.

Spawned, not forked; each loads a tokenizer once (`xtok.shards.sides` keeps them) and runs many parts. On Linux the kernel kills a
worker when the process that started it dies (PR_SET_PDEATHSIG); elsewhere a thread of the worker watches for it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar

from xtok.errors import WorkerDiedError

__all__ = ["WORKER_ENVIRONMENT", "Runner", "SerialRunner", "WorkerPool", "default_workers"]

Item = TypeVar("Item")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
# What a process that builds parts has: one thread each, for the cores are shared by the processes.
WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Runner(Protocol):
    """Something that runs a plain function over items, in any process and order."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Result]:
        """Results in the order of the items. label: what an item is called in an error."""
        ...


class SerialRunner:
    """Runs everything in this process: for tests, and for looking at one part with a debugger."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Result]:
        """Results in the order of the items."""
        return map(function, items)


def default_workers() -> int:
    """One worker for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """A fixed number of spawned processes. `run` may be called from many threads at once; `map` keeps every worker busy.

    Leaving the `with` block ends the workers: after an error or an interrupt at once, else when they are idle.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or default_workers()
        self._slots = threading.BoundedSemaphore(self.workers)
        self._running: dict[Future[Any], str] = {}
        self._closing = threading.Event()
        self._started = threading.Event()
        self._processes: list[Any] = []
        self._failure: BaseException | None = None
        # The kernel ties a child to the *thread* that started it: this one lives as long as the pool.
        self._owner = threading.Thread(target=self._own, name="xtok-worker-pool", daemon=True)
        self._owner.start()
        self._started.wait()

        if self._failure is not None:
            raise self._failure

    def _own(self) -> None:
        try:
            self._start()
        except BaseException as error:
            self._failure = error
        self._started.set()
        self._closing.wait()

    def _start(self) -> None:
        self._executor = ProcessPoolExecutor(
            self.workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(os.getpid(),)
        )
        with _hidden_main_module(), _environment(WORKER_ENVIRONMENT):
            for _ in range(self.workers):
                self._executor.submit(os.getpid)
            self._processes = list(self._executor._processes.values())

    def run(self, function: Callable[[Item], Result], item: Item, label: str) -> Result:
        """One task in a worker; waits for a free one. Raises what the task raised, or WorkerDiedError naming what ran."""
        with self._slots:
            return self._result(self._submit(function, item, label))

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Result]:
        """Results in the order of the items, each as soon as it and all before it are there."""
        done: dict[int, Result] = {}
        futures: dict[Future[Result], int] = {}
        next_index = submitted = 0
        while futures or submitted < len(items):
            while submitted < len(items) and len(futures) < self.workers:
                futures[self._submit(function, items[submitted], label(items[submitted]))] = submitted
                submitted += 1
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                done[futures.pop(future)] = self._result(future)
            while next_index in done:
                yield done.pop(next_index)
                next_index += 1

    def _submit(self, function: Callable[[Item], Result], item: Item, label: str) -> Future[Result]:
        try:
            future = self._executor.submit(function, item)
        except (BrokenProcessPool, RuntimeError) as error:
            raise self._died(label) from error
        self._running[future] = label
        return future

    def _result(self, future: Future[Result]) -> Result:
        running = ", ".join(sorted(set(self._running.values())))
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise self._died(running) from error
        finally:
            self._running.pop(future, None)

    def _died(self, labels: str) -> WorkerDiedError:
        codes = sorted({code for code in (process.exitcode for process in self._processes) if code not in (None, 0)})
        return WorkerDiedError(
            f"a worker process ended while {labels} ran (exit codes {codes}; -9 often means that memory ran out). "
            "What is finished is kept: run the same command again, with fewer workers or a smaller part_bytes if it repeats."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """Ends the workers. at_once: without waiting for running tasks."""
        if at_once:
            for process in self._processes:
                process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._closing.set()


@contextmanager
def _hidden_main_module() -> Iterator[None]:
    """A spawned process imports its parent's main module; ours need none, and a flow's would cost seconds and 100 MB each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_worker(parent: int) -> None:
    # The parent handles an interrupt and ends us: a worker must not print a traceback of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
