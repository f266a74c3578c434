"""Breaking a run on purpose: the k-th write of the storage fails, is torn, or is the last thing that the process does.

The steps are counted where they take effect: the rename of a local file, the put and the removal of a remote one. A run with a
plan of faults is a function of that plan alone, so that a failure is repeated by its number.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Died", "Steps", "count_steps"]


_FOLDERS = ("student", "teacher=0", "teacher=1", "rejects", "records", "timings", "runs")


class Died(BaseException):
    """Stands for the death of the process: nothing of ours may catch it."""


@dataclass
class Steps:
    """done: what took effect, in order. fail_at: number of the step that goes wrong. how: full disk, or death before or after."""

    fail_at: int | None = None
    how: str = "full"
    done: list[str] = field(default_factory=list)
    seen: int = 0

    def take(self, name: str, effect: Any) -> None:
        """One step; `effect` makes it real."""
        number, self.seen = self.seen, self.seen + 1
        if number != self.fail_at:
            effect()
        elif self.how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.how == "before":
            raise Died(name)
        else:
            effect()
            self.done.append(name)
            raise Died(name)
        self.done.append(name)


def _name(path: Path) -> str:
    """The file's place in the dataset, whatever the dataset is called."""
    return f"{path.parent.name}/{path.name}" if path.parent.name in _FOLDERS else path.name


@contextmanager
def count_steps(fail_at: int | None = None, how: str = "full") -> Iterator[Steps]:
    """Every rename or link into place and every removal of a local file in this process is a step."""
    steps = Steps(fail_at, how)
    unlink = Path.unlink

    def counted(move: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        return lambda source, target: steps.take(_name(Path(target)), lambda: move(source, target))

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".tmp":
            # A process that died removes nothing; one whose disk is full still may.
            if not (steps.how != "full" and steps.fail_at is not None and steps.seen > steps.fail_at):
                unlink(path, missing_ok=missing_ok)
            return
        steps.take(f"remove {path.name}", lambda: unlink(path, missing_ok=missing_ok))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(os, "link", counted(os.link))
        patch.setattr(Path, "unlink", counted_unlink)
        yield steps
