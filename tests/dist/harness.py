"""Real gloo ranks for tests: a group is spawned once, then runs many cases; a rank that hangs is named and the group is replaced.

    outcome = ranks(2).run(function, *arguments)      # function(context, *arguments) in every rank, at once
    values = ranks(4).values(function, *arguments)    # fails, showing each error, unless every rank returned
    errors = ranks(2).errors(function, *arguments)    # fails unless every rank raised; the (type name, message) of each

`function` is a module-level function (ranks import it by name). Arguments and results are plain data, numpy arrays or tensors: tensors
come back as CPU tensors, low-precision ones as fp32. Ranks meet on 127.0.0.1 through a file store, compute with one thread, and end
with the test process (their pipe closes).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["Outcome", "RankContext", "RankGroup", "ranks"]

_START_SECONDS = 120.0
_COLLECTIVE_SECONDS = 20.0
_DEFAULT_TIMEOUT_SECONDS = 40.0


@dataclass(frozen=True)
class RankContext:
    """What a rank's function is told: who it is, and the group of all ranks."""

    rank: int
    world_size: int
    group: Any


@dataclass(frozen=True)
class Outcome:
    """What one rank did: a value, or an error (type name, message, traceback), and in how many seconds."""

    rank: int
    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""
    seconds: float = 0.0


def _plain(value: Any) -> Any:
    """Tensors as numpy arrays, through dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _tensors(value: Any) -> Any:
    """The inverse: numpy arrays as tensors."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_tensors(item) for item in value)
    return value


def _serve(rank: int, world_size: int, store_path: str, connection: Connection) -> None:
    """Body of a rank: meet the others, then answer calls until the pipe closes."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    context = RankContext(rank, world_size, dist.group.WORLD)
    connection.send("ready")
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        began = time.perf_counter()
        try:
            outcome = Outcome(rank, value=_plain(function(context, *_tensors(arguments))))
        except Exception as error:
            outcome = Outcome(rank, error=(type(error).__name__, str(error)), trace=traceback.format_exc())
        connection.send(Outcome(rank, outcome.value, outcome.error, outcome.trace, time.perf_counter() - began))


class RankGroup:
    """A spawned group of `world_size` gloo ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="xtok-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        spawn = multiprocessing.get_context("spawn")
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            for rank in range(world_size):
                here, there = spawn.Pipe()
                arguments = (rank, world_size, os.path.join(self._folder.name, "store"), there)
                process = spawn.Process(target=_serve, args=arguments, daemon=True, name=f"xtok-rank-{rank}")
                process.start()
                there.close()
                self._connections.append(here)
                self._processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        if self._receive(_START_SECONDS) != ["ready"] * world_size:
            raise RuntimeError("the ranks did not start")

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS
    ) -> list[Outcome]:
        """Call `function(context, *arguments)` in every rank and return the outcomes in rank order.

        Raises AssertionError naming the silent ranks after `timeout_seconds`, and gives the group up.
        """
        message = (function, _plain(arguments))
        for connection in self._connections:
            connection.send(message)
        outcomes: list[Outcome] = self._receive(timeout_seconds)
        if len({outcome.error is None for outcome in outcomes}) > 1:
            self.broken = True  # some ranks may have left the others inside a collective
        return _tensors_of(outcomes)

    def values(
        self, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS
    ) -> list[Any]:
        """The value of every rank; AssertionError with each rank's traceback when one raised."""
        outcomes = self.run(function, *arguments, timeout_seconds=timeout_seconds)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        assert not failed, "\n".join(f"rank {outcome.rank}:\n{outcome.trace}" for outcome in failed)
        return [outcome.value for outcome in outcomes]

    def errors(
        self, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS
    ) -> list[tuple[str, str]]:
        """(type name, message) of every rank's error; AssertionError when one returned instead."""
        outcomes = self.run(function, *arguments, timeout_seconds=timeout_seconds)
        returned = [outcome.rank for outcome in outcomes if outcome.error is None]
        assert not returned, f"ranks {returned} raised nothing; the others: {[outcome.error for outcome in outcomes]}"
        return [outcome.error for outcome in outcomes if outcome.error is not None]

    def close(self) -> None:
        """End the ranks of this group."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _receive(self, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        received: dict[int, Any] = {}
        for rank, connection in enumerate(self._connections):
            try:
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    received[rank] = connection.recv()
            except EOFError:
                pass
        silent = sorted(set(range(self.world_size)) - set(received))
        if silent:
            self.broken = True
            answered = {rank: getattr(outcome, "error", outcome) for rank, outcome in received.items()}
            raise AssertionError(
                f"ranks {silent} of {self.world_size} gave no answer in {timeout_seconds:.0f} s; others: {answered}"
            )
        return [received[rank] for rank in range(self.world_size)]


def _tensors_of(outcomes: list[Outcome]) -> list[Outcome]:
    return [Outcome(one.rank, _tensors(one.value), one.error, one.trace, one.seconds) for one in outcomes]


_groups: dict[int, RankGroup] = {}


def ranks(world_size: int) -> RankGroup:
    """The shared group of `world_size` ranks; started on first use, and again after a case left it unusable."""
    group = _groups.get(world_size)
    if group is None or group.broken:
        if group is not None:
            group.close()
        group = _groups[world_size] = RankGroup(world_size)
    return group


@atexit.register
def _close_all() -> None:
    for group in _groups.values():
        group.close()
