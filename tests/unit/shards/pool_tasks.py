"""Plain functions that the pool's tests run in workers."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time

from xtok.errors import RowRefused
from xtok.shards.pool import WorkerPool


def slow_square(value: int) -> int:
    """Larger values take longer."""
    time.sleep(0.02 * value)
    return value * value


def refuse(value: int) -> None:
    """Raises an error with attributes of its own."""
    raise RowRefused("overlength", f"{value} is too long", stage="tokenize", side="student")


def loaded_modules(names: list[str]) -> list[str]:
    """Imports what is asked for, and says which top-level packages the process then holds."""
    for module in names:
        importlib.import_module(module)
    return sorted({module.split(".")[0] for module in sys.modules})


def kill_own_process(_: int) -> None:
    """What the kernel does to a process that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def own_process(_: int) -> int:
    """The worker's process id."""
    time.sleep(0.3)
    return os.getpid()


def sleep_in_a_pool() -> None:
    """Prints the ids of two workers, started from a thread that ends, and sleeps."""
    pools: list[WorkerPool] = []
    starter = threading.Thread(target=lambda: pools.append(WorkerPool(2)))
    starter.start()
    starter.join()
    with pools[0] as pool:
        print(*pool.map(own_process, [0, 1], str), flush=True)
        list(pool.map(time.sleep, [60.0, 60.0], str))
