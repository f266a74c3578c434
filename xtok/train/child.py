"""A training run as a child process of this one: started, watched, ended with it, its failure raised here as a typed error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

from schemas.train_config import TrainConfig
from xtok import errors, storage
from xtok.train.metrics_log import METRICS_FILE

__all__ = ["CHILD_LOG", "TrainingProcess", "typed_error"]

CHILD_LOG = "train.log"
CONFIG_FILE = "train.json"
FAILURE_FILE = "failure.txt"
POLL_SECONDS = 0.5
STOP_SECONDS = 15.0
INTERRUPTED = 130


class TrainingProcess:
    """`xtok.train.launch` on `config`. Use it in a `with` block: leaving it ends the child and its ranks.

    In a terminal the child draws its progress bar there; elsewhere what it says goes to train.log of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        storage.make_folder(config.output)
        path, self._failure = (storage.join(config.output, name) for name in (CONFIG_FILE, FAILURE_FILE))
        storage.write_atomic(path, config.model_dump_json(indent=1).encode())
        storage.remove(self._failure)
        command = [sys.executable, "-m", "xtok.train.launch", "--config", path, "--parent", str(os.getpid())]
        log = None if sys.stderr.isatty() else storage.open_append(storage.join(config.output, CHILD_LOG))
        self._process = subprocess.Popen(
            [*command, "--failure", self._failure], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        if log is not None:
            log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Lines of metrics.jsonl that this launch writes, as they come, until it ends."""
        follower = _Follower(storage.join(self._config.output, METRICS_FILE))
        while True:
            ended = self._process.poll() is not None
            yield from follower.fresh()
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def result(self) -> dict[str, Any]:
        """What `run_training` returned in the main rank. Waits; raises what it raised, as far as it has a type of ours.

        KeyboardInterrupt when the child was interrupted: Ctrl-C reaches it as well, sometimes sooner than this process.
        """
        stdout, _ = self._process.communicate()
        if self._process.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        if self._process.returncode != 0:
            told = storage.read_bytes(self._failure).decode() if storage.exists(self._failure) else ""
            log = storage.join(self._config.output, CHILD_LOG)
            raise typed_error(told or f"the launcher ended with exit code {self._process.returncode}; see {log}")
        answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return answer


class _Follower:
    """New lines of a file that grows. A run that goes on first writes the file anew, without the steps that it will run again: its
    lines are then read from the start, and those that were written before this object was made are passed over."""

    def __init__(self, path: str) -> None:
        self._path, self._began = path, time.time()
        self._file, self._offset = -1, 0

    def fresh(self) -> list[dict[str, Any]]:
        """Whole lines since the last call."""
        if not storage.exists(self._path):
            return []
        with storage.open_read(self._path) as stream:
            file = os.fstat(stream.fileno()).st_ino
            if file != self._file:
                self._file, self._offset = file, 0
            stream.seek(self._offset)
            whole = stream.read().rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["time"] >= self._began]


def typed_error(told: str) -> errors.XtokError:
    """ "ConfigError: no" -> ConfigError("no"); what has no type of ours is a TrainingError with the whole text."""
    name, _, message = told.strip().partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.XtokError) and kind is not errors.RowRefused:
        return kind(message)
    return errors.TrainingError(told.strip())
