"""Processes that end when the one that started them does, whichever way it came, `kill -9` included.

Worker processes of a run have their own guard (`xtok.shards.pool`); this one is for what Prefect starts around them: its server,
the serving process and the process of a served run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["SERVED_BY", "end_with_parent", "end_with_serving_process", "is_alive"]

# Names the serving process to the processes of its runs.
SERVED_BY = "XTOK_SERVED_BY"
POLL_SECONDS = 0.2


def end_with_parent(parent: int, *, on_death: Callable[[], None] | None = None) -> None:
    """End this process at once when `parent`, which must be its parent now, is gone; first call `on_death`.

    A thread that polls: it needs no signal handler, works on every Unix, and no child inherits it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        try:
            if on_death is not None:
                on_death()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_with_serving_process() -> None:
    """In the process of a served run: end when `flows.serve` dies. Anywhere else: nothing."""
    serving = int(os.environ.get(SERVED_BY, "0"))
    if not serving:
        return
    if os.getppid() == serving:
        end_with_parent(serving)
    elif not is_alive(serving):  # it died while this process was starting
        os._exit(1)


def is_alive(process: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
