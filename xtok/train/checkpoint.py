"""Checkpoints: sharded safetensors written beside the run, moved into place when whole, found again after any death.

    <output>/checkpoints/step-00000100/    one safetensors file a rank, state.json
    <output>/checkpoints/best.json         which step had the lowest evaluation loss

A folder under its final name is whole: data is written under `.writing-…` with a nonce of its run, and the folder is renamed by the
main rank when every rank has written. Names in the files: `student.…`, `draft.…`, `optimizer.<moment>.<parameter>`. No pickle: tensors
are safetensors, the rest is JSON. The learning rate and every random draw are functions of the step, so the step is all of their state.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from schemas.train_config import CheckpointSettings
from xtok import storage
from xtok.errors import TrainingError, XtokError
from xtok.train.identity import differences

__all__ = ["BEST_FILE", "CHECKPOINT_FOLDER", "Checkpoints", "Progress"]

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_FILE = "state.json"
PREFIX = "step-"
FOLDER_NAME = re.compile(rf"{PREFIX}(\d{{8,}})")
WRITING = ".writing-"
BEST_FILE = "best.json"
CHECKPOINT_FOLDER = "checkpoints"


@dataclass
class Progress:
    """Where a run is: everything beside tensors. step: optimizer steps done. loader: position of the next batch.

    run: which run it is (`xtok.train.identity.run_document`).
    """

    step: int = 0
    num_tokens: int = 0
    loader: dict[str, Any] | None = None
    best_step: int | None = None
    best_loss: float | None = None
    run: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """Saves and loads one run's checkpoints. All ranks call every method.

    writer_group is used by the thread that writes, control_group by the caller's: both gloo, never the same.
    """

    def __init__(
        self,
        folder: str,
        settings: CheckpointSettings,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        is_main: bool,
        writer_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
    ) -> None:
        self._folder, self._settings = Path(folder), settings
        self._parameters, self._optimizer = parameters, optimizer
        self._is_main, self._writer_group, self._control_group = is_main, writer_group, control_group
        self._nonce = f"{self._agreed(secrets.randbits(32)):08x}"
        self._pending: tuple[Future[Any], Progress] | None = None

    def save(self, progress: Progress) -> None:
        """Start to write a checkpoint (or write it, when not asynchronous). One that is still being written is finished first.

        Raises TrainingError when it cannot be written.
        """
        self.finish()
        writing = self._writing(progress)
        if self._is_main:
            storage.make_folder(str(writing))
        dist.barrier(self._control_group)
        writer = HuggingFaceStorageWriter(str(writing), save_distributed=True)
        progress = Progress(**asdict(progress))
        tensors = self._tensors()
        if self._settings.asynchronous:
            future = state_dict_saver.async_save(tensors, storage_writer=writer, process_group=self._writer_group)
            assert isinstance(future, Future)
            self._pending = (future, progress)
        else:
            with _told(f"write the checkpoint {writing}"):
                state_dict_saver.save(tensors, storage_writer=writer, process_group=self._writer_group)
            self._publish(progress)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and move it into place."""
        if self._pending is None:
            return
        future, progress = self._pending
        self._pending = None
        with _told(f"write the checkpoint {self._writing(progress)}"):
            future.result()
        self._publish(progress)

    def publish_if_ready(self) -> None:
        """Move a finished checkpoint into place. Ranks agree by one small collective, only while one is being written."""
        if self._pending is None:
            return
        ready = torch.tensor([int(self._pending[0].done())])
        dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self._control_group)
        if bool(ready):
            self.finish()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, the same on every rank. What dead runs left half written goes."""
        if self._is_main:
            for folder in self._folder.glob(f"{WRITING}*"):
                shutil.rmtree(folder, ignore_errors=True)
        return self.newest()

    def newest(self) -> Path | None:
        """The same, and nothing is removed: for looking into a run that goes on."""
        step = self._agreed(max(map(_step_of, self._whole()), default=-1))
        return self._of_step(step) if step >= 0 else None

    def of_step(self, step: int) -> Path:
        """The whole checkpoint of `step`. Raises TrainingError when there is none, with those that there are."""
        whole = self._whole()
        if self._of_step(step) not in whole:
            steps = ", ".join(str(_step_of(path)) for path in whole) or "none"
            raise TrainingError(f"{self._folder} has no checkpoint of step {step}; there are: {steps}")
        return self._of_step(step)

    def load(self, folder: Path, *, of: Progress | None, with_optimizer: bool = True) -> Progress:
        """Read tensors into the parameters and the optimizer, on any layout. of: the run; None takes a checkpoint of any.

        Raises TrainingError for a checkpoint of another model layout or configuration, or one that cannot be read.
        """
        try:
            progress = _checked(Progress(**json.loads(storage.read_bytes(str(folder / STATE_FILE)))), _step_of(folder))
        except (ValueError, TypeError) as error:
            raise TrainingError(
                f"{folder / STATE_FILE} is no training state ({error}): delete that folder to go on from the checkpoint before it"
            ) from error
        if of is not None and progress.run != of.run:
            raise TrainingError(
                f"{folder} belongs to another training configuration or dataset ({differences(progress.run, of.run)}): choose another "
                "output, or delete its checkpoints"
            )
        tensors = self._tensors(with_optimizer)
        with _told(f"read the checkpoint {folder}", "Delete that folder to go on from the one before"):
            state_dict_loader.load(
                tensors, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=self._control_group
            )
        for parameter in self._parameters.values() if with_optimizer else ():
            self._optimizer.state[parameter]["step"] = torch.tensor(float(progress.step))
        return progress

    def _tensors(self, with_optimizer: bool = True) -> dict[str, Tensor]:
        """Every tensor of the checkpoint; moments the optimizer has not made yet are made, as zeros."""
        tensors = {name: parameter.detach() for name, parameter in self._parameters.items()}
        if not with_optimizer:
            return tensors
        for name, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                tensors[f"optimizer.{moment}.{name}"] = state[moment]
        return tensors

    def _publish(self, progress: Progress) -> None:
        """State last, then the rename, then what is no longer wanted goes."""
        if self._is_main:
            writing, final = self._writing(progress), self._of_step(progress.step)
            storage.write_atomic(str(writing / STATE_FILE), json.dumps(asdict(progress), indent=1).encode())
            with _told(f"move {writing} into place"):
                if final.exists():  # of a run that was ahead when an older checkpoint was chosen, or half deleted by hand
                    shutil.rmtree(final)
                os.replace(writing, final)
            if progress.best_step is not None:
                best = {"step": progress.best_step, "loss": progress.best_loss}
                storage.write_atomic(str(self._folder / BEST_FILE), json.dumps(best).encode())
            self._prune(progress)
        dist.barrier(self._control_group)

    def _prune(self, progress: Progress) -> None:
        kept = set(self._whole()[-self._settings.keep_last :])
        if self._settings.keep_best and progress.best_step is not None:
            kept.add(self._of_step(progress.best_step))
        for folder in self._whole():
            if folder not in kept:
                # Renamed first: a folder that is half deleted must not look whole.
                doomed = self._folder / f"{WRITING}{self._nonce}-old-{folder.name}"
                os.replace(folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _of_step(self, step: int) -> Path:
        return self._folder / f"{PREFIX}{step:08d}"

    def _writing(self, progress: Progress) -> Path:
        return self._folder / f"{WRITING}{self._nonce}-{progress.step:08d}"

    def _whole(self) -> list[Path]:
        """By step, ascending."""
        named = (path for path in self._folder.glob(f"{PREFIX}*") if FOLDER_NAME.fullmatch(path.name))
        return sorted((path for path in named if (path / STATE_FILE).exists()), key=_step_of)

    def _agreed(self, number: int) -> int:
        """The main rank's number, on every rank."""
        tensor = torch.tensor([number])
        dist.broadcast(tensor, src=0, group=self._control_group)
        return int(tensor)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def _checked(progress: Progress, step: int) -> Progress:
    """The state, if it is one of `step`. Raises ValueError with the field that is wrong."""
    best = (progress.best_step, progress.best_loss)
    wrong = {
        "step": progress.step != step,
        "num_tokens": not isinstance(progress.num_tokens, int) or progress.num_tokens < 0,
        "loader": not isinstance(progress.loader, dict),
        "best_step": not (best == (None, None) or (isinstance(best[0], int) and 0 < best[0] <= step)),
        "best_loss": not (best == (None, None) or (isinstance(best[1], int | float) and math.isfinite(best[1]))),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{name} is {getattr(progress, name)!r} in the state of step {step}")
    return progress


@contextmanager
def _told(action: str, way_out: str = "The checkpoints before it are kept") -> Iterator[None]:
    """The library below raises errors of many kinds (one is no Exception); ours says what was being done."""
    try:
        yield
    except XtokError:
        raise
    except CheckpointException as error:
        causes = {rank: failure[0] for rank, failure in error.failures.items()}
        reason = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        raise TrainingError(f"cannot {action}: {reason}. {way_out}") from next(iter(causes.values()))
    except Exception as error:
        raise TrainingError(f"cannot {action}: {type(error).__name__}: {error}. {way_out}") from error
