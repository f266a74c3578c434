"""A rank ends with what launched it, `kill -9` included. Imports nothing heavy: a rank asks for this before it loads torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["LAUNCHED_BY", "end_with_launcher", "end_with_parent"]

# Names the launching process to its ranks: one that dies while they start is missed no more.
LAUNCHED_BY = "XTOK_LAUNCHED_BY"
POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Under torchrun, end this process when that is gone: at once on Linux, else soon. A rank started by hand outlives its shell."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(os.environ.get(LAUNCHED_BY, "0")) or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """End this process soon after `parent` is no longer its parent; at once when it is not even now."""
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
