"""Checkpoints: sharded safetensors written beside the run, moved into place when whole, found again after any death.

    <output>/checkpoints/step-00000100/    one safetensors file a rank, state.json
    <output>/checkpoints/best.json         which step had the lowest evaluation loss

A folder under its final name is whole: data is written under `.writing-…`, and the folder is renamed by the main rank when every rank
has written. Names in the files: `student.…`, `draft.…`, `optimizer.<moment>.<parameter>`. No pickle: tensors are safetensors, the rest
is JSON. The learning rate and every random draw are functions of the step, so the step is all of their state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from schemas.train_config import CheckpointSettings
from xtok import storage
from xtok.errors import TrainingError

__all__ = ["Checkpoints", "Progress"]

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_FILE = "state.json"
PREFIX = "step-"


@dataclass
class Progress:
    """Where a run is: everything beside tensors. step: optimizer steps done. loader: position of the next batch."""

    step: int = 0
    num_tokens: int = 0
    loader: dict[str, Any] | None = None
    best_step: int | None = None
    best_loss: float | None = None
    config_digest: str = ""


class Checkpoints:
    """Saves and loads one run's checkpoints. All ranks call every method."""

    def __init__(
        self,
        folder: str,
        settings: CheckpointSettings,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        is_main: bool,
        group: dist.ProcessGroup,
    ) -> None:
        self._folder, self._settings = Path(folder), settings
        self._parameters, self._optimizer = parameters, optimizer
        self._is_main, self._group = is_main, group
        self._pending: tuple[Future[Any], Progress] | None = None

    def save(self, progress: Progress) -> None:
        """Start to write a checkpoint (or write it, when not asynchronous). One that is still being written is finished first."""
        self.finish()
        name = f"{PREFIX}{progress.step:08d}"
        if (self._folder / name).exists():
            return
        writing = self._folder / f".writing-{name}"
        if self._is_main:
            shutil.rmtree(writing, ignore_errors=True)
            storage.make_folder(str(writing))
        dist.barrier(self._group)
        writer = HuggingFaceStorageWriter(str(writing), save_distributed=True)
        progress = Progress(**asdict(progress))
        tensors = self._tensors()
        if self._settings.asynchronous:
            future = state_dict_saver.async_save(tensors, storage_writer=writer, process_group=self._group)
            assert isinstance(future, Future)
            self._pending = (future, progress)
        else:
            state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group)
            self._publish(progress)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and move it into place."""
        if self._pending is None:
            return
        future, progress = self._pending
        self._pending = None
        future.result()
        self._publish(progress)

    def publish_if_ready(self) -> None:
        """Move a finished checkpoint into place. Ranks agree by one small collective, only while one is being written."""
        if self._pending is None:
            return
        ready = torch.tensor([int(self._pending[0].done())])
        dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self._group)
        if bool(ready):
            self.finish()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, the same on every rank."""
        newest = max((int(path.name.removeprefix(PREFIX)) for path in self._whole()), default=-1) if self._is_main else -1
        step = torch.tensor([newest])
        dist.broadcast(step, src=0, group=self._group)
        return self._folder / f"{PREFIX}{int(step):08d}" if int(step) >= 0 else None

    def load(self, folder: Path, *, config_digest: str) -> Progress:
        """Read tensors into the parameters and the optimizer, on any layout.

        Raises TrainingError for a checkpoint of another model layout or configuration, or one that cannot be read.
        """
        try:
            raw = json.loads(storage.read_bytes(str(folder / STATE_FILE)))
            progress = Progress(**raw)
        except (ValueError, TypeError) as error:
            raise TrainingError(
                f"{folder / STATE_FILE} is no training state ({error}): delete that folder and run again"
            ) from error
        if progress.config_digest != config_digest:
            raise TrainingError(
                f"{folder} belongs to another training configuration (digest {progress.config_digest[:12]}, here {config_digest[:12]}): "
                "choose another output, or delete its checkpoints"
            )
        tensors = self._tensors()
        try:
            state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=self._group)
        except Exception as error:  # the library raises many kinds
            raise TrainingError(
                f"cannot read the checkpoint {folder}: {error}; delete that folder to go on from the one before"
            ) from error
        for parameter in self._parameters.values():
            self._optimizer.state[parameter]["step"] = torch.tensor(float(progress.step))
        return progress

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint; moments the optimizer has not made yet are made, as zeros."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[name] = parameter.detach()
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
            name = f"{PREFIX}{progress.step:08d}"
            writing = self._folder / f".writing-{name}"
            storage.write_atomic(str(writing / STATE_FILE), json.dumps(asdict(progress), indent=1).encode())
            os.replace(writing, self._folder / name)
            self._prune(progress)
        dist.barrier(self._group)

    def _prune(self, progress: Progress) -> None:
        kept = set(sorted(self._whole())[-self._settings.keep_last :])
        if self._settings.keep_best and progress.best_step is not None:
            kept.add(self._folder / f"{PREFIX}{progress.best_step:08d}")
        for folder in self._whole():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _whole(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"{PREFIX}*") if (path / STATE_FILE).exists())
