"""Where the time of a part goes: seconds by stage, left in <dataset>/runs/timings/ for the report.

    with measured() as seconds:            around the work of one part
        with stage("tokenize"): ...        anywhere inside, in any module; outside of `measured` it does nothing

A stage inside another counts for the inner one alone, so the stages of a part add up to its wall time; what lies in no stage is
`other`. Seconds are wall clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

from xtok import storage
from xtok.errors import StorageError

__all__ = ["OTHER", "measured", "read_timings", "stage", "staged_items", "write_timings"]

OTHER = "other"
Item = TypeVar("Item")


class _Clock:
    """Gives every moment to the innermost open stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._open = [OTHER]
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


_CLOCK: ContextVar[_Clock | None] = ContextVar("_CLOCK", default=None)


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Measures the block; the dictionary it gives holds seconds by stage, complete when the block has ended."""
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    token = _CLOCK.set(clock)
    try:
        yield seconds
    finally:
        clock.leave()
        _CLOCK.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Counts the time of the block as stage `name` of the part being measured."""
    clock = _CLOCK.get()
    if clock is None:
        yield
        return
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()


def staged_items(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items; producing each of them counts as stage `name`."""
    iterator = iter(items)
    while True:
        with stage(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def write_timings(output: str, index: int, seconds: dict[str, float]) -> None:
    """Leaves a part's seconds by stage. Where that fails nothing happens: they are for people, and the part is whole."""
    data = json.dumps({name: round(value, 6) for name, value in sorted(seconds.items())}).encode()
    with suppress(StorageError):
        storage.write_atomic(_url(output, index), data, storage.join(output, "runs", "staging"))


def read_timings(output: str, index: int) -> dict[str, float]:
    """Seconds by stage of the run that built the part; empty when they are not there or cannot be read."""
    try:
        found = json.loads(storage.read_bytes(_url(output, index)))
    except (StorageError, ValueError):
        return {}
    return {str(name): float(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _url(output: str, index: int) -> str:
    return storage.join(output, "runs", "timings", f"part-{index:05d}.json")
