"""One run at a time in an output folder: two would remove and rename each other's checkpoints.

The lock is the kernel's (`flock`): it goes with the process that holds it, `kill -9` included, so there is never a stale one.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.errors import TrainingError

__all__ = ["is_being_written", "only_writer", "reason_to_wait"]

LOCK_FILE = ".lock"


@contextmanager
def only_writer(output: str) -> Iterator[None]:
    """Hold the folder for one run. Raises TrainingError when another run holds it."""
    storage.make_folder(output)
    with storage.open_append(storage.join(output, LOCK_FILE)) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(
                f"another run is training into {output}: wait for its end (`tail {output}/metrics.jsonl`), or choose another output"
            ) from error
        yield


def is_being_written(output: str) -> bool:
    """Whether a run holds the folder now."""
    if not storage.exists(storage.join(output, LOCK_FILE)):
        return False
    try:
        with only_writer(output):
            return False
    except TrainingError:
        return True


def reason_to_wait(config: TrainConfig) -> str | None:
    """Why a run that a schedule started has nothing to do yet, where one that a person started fails; None when it can begin."""
    if not storage.exists(storage.join(config.dataset, "manifest.json")):
        return f"no manifest is published in {config.dataset} yet"
    if is_being_written(config.output):
        return f"the run before is still training into {config.output}"
    return None
