"""Checkpoints: whole or not there, pruned with the best kept, and honest when they cannot be written or read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schemas.train_config import CheckpointSettings
from xtok.errors import TrainingError
from xtok.train.checkpoint import Checkpoints, Progress
from xtok.train.runtime import Runtime

RUN = Progress(run={"steps": 9})


def make(folder: Path, runtime: Runtime, **settings: Any) -> tuple[Checkpoints, nn.Parameter]:
    """A run of one parameter, whose value is the step."""
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.AdamW([weight])
    groups = {"writer_group": runtime.checkpoint_group, "control_group": runtime.control_group}
    return (
        Checkpoints(str(folder), CheckpointSettings(**settings), {"student.w": weight}, optimizer, is_main=True, **groups),
        weight,
    )


def save(checkpoints: Checkpoints, weight: nn.Parameter, step: int, **state: Any) -> None:
    weight.data.fill_(float(step))
    checkpoints.save(Progress(step=step, run={"steps": 9}, loader={}, **state))


def save_and_finish(checkpoints: Checkpoints, weight: nn.Parameter, step: int) -> None:
    save(checkpoints, weight, step)
    checkpoints.finish()


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_kept(tmp_path: Path, runtime: Runtime, asynchronous: bool) -> None:
    checkpoints, weight = make(tmp_path, runtime, keep_last=2, asynchronous=asynchronous)
    for step in range(1, 6):
        save(checkpoints, weight, step, best_step=2 if step >= 2 else None, best_loss=0.5 if step >= 2 else None)
        weight.data.fill_(-1.0)  # training goes on while it is written
    checkpoints.finish()
    assert steps(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 2, "loss": 0.5}
    assert not list(tmp_path.glob(".writing-*"))
    again, restored = make(tmp_path, runtime)
    newest = again.latest()
    assert newest is not None
    assert again.load(newest, of=RUN).step == 5
    assert bool((restored == 5.0).all())
    again.load(again.of_step(2), of=RUN)
    assert bool((restored == 2.0).all())


def test_without_keep_best_only_the_newest_stay(tmp_path: Path, runtime: Runtime) -> None:
    checkpoints, weight = make(tmp_path, runtime, keep_last=1, keep_best=False)
    for step in (1, 2, 3):
        save(checkpoints, weight, step, best_step=1, best_loss=0.5)
    checkpoints.finish()
    assert steps(tmp_path) == ["step-00000003"]


def test_what_a_killed_run_left_is_no_checkpoint(tmp_path: Path, runtime: Runtime) -> None:
    checkpoints, weight = make(tmp_path, runtime, asynchronous=False)
    save(checkpoints, weight, 1)
    half = tmp_path / ".writing-0badcafe-00000002"
    half.mkdir()
    (half / "shard.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000003").mkdir()  # its state is not there: somebody deleted files by hand
    for copied in ("step-00000001-good", "step-00000009.bak", "step-2"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / copied)  # somebody's copies are nobody else's checkpoints
    newest = make(tmp_path, runtime)[0].latest()
    assert newest == tmp_path / "step-00000001"
    for copied in ("step-00000001-good", "step-00000009.bak", "step-2"):
        shutil.rmtree(tmp_path / copied)
    assert not half.exists()
    save(checkpoints, weight, 3)
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]
    assert (tmp_path / "step-00000003/state.json").exists()


def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for asynchronous in (True, False):
        checkpoints, weight = make(tmp_path, runtime, asynchronous=asynchronous)
        save(checkpoints, weight, 1)
        checkpoints.finish()
        with monkeypatch.context() as patch:
            patch.setattr(HuggingFaceStorageWriter, "write_data", full)
            with pytest.raises(TrainingError, match=r"cannot write the checkpoint.*No space left.*are kept"):
                save_and_finish(checkpoints, weight, 2)
        assert steps(tmp_path) == ["step-00000001"]


def test_a_checkpoint_that_cannot_be_read_is_told(tmp_path: Path, runtime: Runtime) -> None:
    checkpoints, weight = make(tmp_path, runtime, asynchronous=False)
    save(checkpoints, weight, 1)
    folder = tmp_path / "step-00000001"
    other = Progress(run={"optimizer": {"learning_rate": 0.1}})
    both = (
        "another training configuration.*optimizer.learning_rate was left at its default and is 0.1, steps was 9 and is left at"
    )
    with pytest.raises(TrainingError, match=both):
        checkpoints.load(folder, of=other)
    with pytest.raises(TrainingError, match="no checkpoint of step 7; there are: 1"):
        checkpoints.of_step(7)
    [shard] = folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(TrainingError, match="cannot read the checkpoint"):
        checkpoints.load(folder, of=RUN)


def test_a_state_that_is_none_is_told_by_its_field(tmp_path: Path, runtime: Runtime) -> None:
    """A value that would send the run elsewhere is never taken."""
    checkpoints, weight = make(tmp_path, runtime, asynchronous=False)
    save(checkpoints, weight, 3)
    file = tmp_path / "step-00000003/state.json"
    state = json.loads(file.read_text())
    assert checkpoints.load(file.parent, of=RUN).step == 3
    for change in (
        {"step": 4},
        {"step": "3"},
        {"step": -3},
        {"num_tokens": None},
        {"num_tokens": -1},
        {"loader": None},
        {"loader": []},
        {"best_loss": 1.0, "best_step": 7},
        {"best_step": 2, "best_loss": "low"},
        {"best_step": 2, "best_loss": None},
        {"strange": 2},
    ):
        file.write_text(json.dumps({**state, **change}))
        with pytest.raises(TrainingError, match=rf"no training state \(.*{list(change)[-1]}.*delete that folder"):
            checkpoints.load(file.parent, of=RUN)
    for broken in (b"", b"[1]", b"{", b"\xff\xfe"):
        file.write_bytes(broken)
        with pytest.raises(TrainingError, match="no training state"):
            checkpoints.load(file.parent, of=RUN)
