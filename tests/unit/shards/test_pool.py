"""The worker pool: order, errors by type, no torch, no main module, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.shards import pool_tasks
from xtok.errors import RowRefused, WorkerDiedError
from xtok.shards.pool import WorkerPool


def name(item: object) -> str:
    return f"task {item}"


def test_results_come_in_order_and_errors_keep_their_type() -> None:
    with WorkerPool(2) as pool:
        assert list(pool.map(pool_tasks.slow_square, [3, 0, 2, 1, 5], name)) == [9, 0, 4, 1, 25]
        assert list(pool.map(pool_tasks.slow_square, [], name)) == []
        with pytest.raises(RowRefused) as caught:
            pool.run(pool_tasks.refuse, 7, "task 7")
        assert (caught.value.reason, caught.value.side) == ("overlength", "student")
        assert pool.run(pool_tasks.slow_square, 2, "again") == 4


def test_workers_start_without_torch_and_without_the_main_module() -> None:
    with WorkerPool(1) as pool:
        found = pool.run(pool_tasks.loaded_modules, ["xtok.shards.part"], "modules")
    assert "torch" not in found
    assert "prefect" not in found
    assert "pytest" not in found


def test_many_threads_share_one_pool() -> None:
    results: dict[int, int] = {}
    with WorkerPool(2) as pool:

        def run(item: int) -> None:
            results[item] = pool.run(pool_tasks.slow_square, item, name(item))

        threads = [threading.Thread(target=run, args=(item,)) for item in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {item: item * item for item in range(6)}


def test_a_killed_worker_is_a_typed_error_that_names_what_ran() -> None:
    with pytest.raises(WorkerDiedError, match=r"part 13.*-9"), WorkerPool(2) as pool:
        list(pool.map(pool_tasks.kill_own_process, [13], lambda item: f"part {item}"))


def test_leaving_after_an_error_ends_running_tasks_at_once() -> None:
    began = time.monotonic()
    errors: list[BaseException] = []
    pool = WorkerPool(1)

    def sleep() -> None:
        try:
            pool.run(time.sleep, 60.0, "sleep")
        except WorkerDiedError as error:
            errors.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    time.sleep(0.3)
    pool.__exit__(ZeroDivisionError)
    thread.join(10)
    assert len(errors) == 1
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent(number: signal.Signals, repository: Path) -> None:
    script = "from tests.unit.shards.pool_tasks import sleep_in_a_pool; sleep_in_a_pool()"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=repository, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    assert all(psutil.pid_exists(worker) for worker in workers)
    os.kill(parent.pid, number)
    parent.wait(10)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(_is_running, workers)):
        time.sleep(0.05)
    assert not any(map(_is_running, workers))


def _is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
