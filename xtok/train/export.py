"""What a run leaves for use: the student as a Hugging Face folder, the draft in its published layout.

    python -m xtok.train.export --config train.yaml                      from the newest checkpoint
    python -m xtok.train.export --config train.yaml --checkpoint best    or from the best, or from the one of a step

The end of a run exports by itself; this is for a run that goes on, or for another of its checkpoints. One process, on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from schemas.train_config import CheckpointSettings, ParallelSettings, TrainConfig
from xtok import storage
from xtok.draft.config import DFlashConfig
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.draft.export import export_draft
from xtok.draft.training import draft_config
from xtok.errors import ConfigError, TrainingError, XtokError
from xtok.tokenizers import load_tokenizer
from xtok.train.build import build_models
from xtok.train.checkpoint import BEST_FILE, CHECKPOINT_FOLDER, Checkpoints
from xtok.train.config_file import load_train_config
from xtok.train.models import CausalBody
from xtok.train.optimizer import build_optimizer
from xtok.train.parallel import reshard, trainable_parameters
from xtok.train.runtime import start_runtime, stop_runtime

__all__ = ["EXPORT_FOLDER", "add_arguments", "export_checkpoint", "export_models", "main", "run", "whole_state"]

EXPORT_FOLDER = "export"


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a sharded module, whole, on the CPU. All ranks call it."""
    reshard([module])
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        state[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
    return state


def export_models(
    config: TrainConfig, student: CausalBody, draft: nn.Module | None, *, folder: str, is_main: bool
) -> dict[str, str]:
    """Write `<folder>/student` (unless it is frozen or not wanted) and `<folder>/draft`; returns what is there, by name.

    All ranks call it, the main one writes. A folder is replaced when the new one is whole.
    """
    written: dict[str, str] = {}
    if config.export_student and config.trains_student:
        state = whole_state(student.model)
        written["student"] = storage.join(folder, "student")
        if is_main:
            _replace(written["student"], lambda path: _save_student(config, student, state, path))
    if draft is not None:
        state = whole_state(draft)
        written["draft"] = storage.join(folder, "draft")
        if is_main:
            _replace(written["draft"], lambda path: _save_draft(draft, state, path))
    return written


def export_checkpoint(config: TrainConfig, *, checkpoint: str = "latest", folder: str | None = None) -> dict[str, str]:
    """Export from a checkpoint of `config.output`: "latest", "best", or a step's number. Needs neither teachers nor dataset.

    Starts a process group of one unless there is one. Raises TrainingError when there is no such checkpoint, ConfigError for a folder
    that is no local one.
    """
    if folder is not None and (not folder or "://" in folder):
        raise ConfigError(
            f"cannot export to {folder!r}: give a local or mounted folder (the finished one is moved into place there)"
        )
    joined = dist.is_initialized()
    runtime = start_runtime(ParallelSettings(device="cpu"))
    try:
        tokenizer = load_tokenizer(config.student.tokenizer or config.student.model, revision=config.student.revision)
        student, draft = build_models(config, runtime, tokenizer, context_length=0)
        parameters = trainable_parameters(student, draft)
        checkpoints = Checkpoints(
            storage.join(config.output, CHECKPOINT_FOLDER),
            CheckpointSettings(),
            parameters,
            build_optimizer(parameters, config.optimizer, draft_learning_rate=config.draft.learning_rate),
            is_main=True,
            writer_group=runtime.checkpoint_group,
            control_group=runtime.control_group,
        )
        checkpoints.load(_chosen(checkpoints, config, checkpoint), of=None, with_optimizer=False)
        target = folder or storage.join(config.output, EXPORT_FOLDER)
        return export_models(config.model_copy(update={"export_student": True}), student, draft, folder=target, is_main=True)
    finally:
        if not joined:
            stop_runtime()


def _chosen(checkpoints: Checkpoints, config: TrainConfig, checkpoint: str) -> Path:
    if checkpoint == "best":
        best = storage.join(config.output, CHECKPOINT_FOLDER, BEST_FILE)
        if not storage.exists(best):
            raise TrainingError(f"{best} is not there: no checkpoint of this run was evaluated; take latest or a step")
        try:
            step = int(json.loads(storage.read_bytes(best))["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingError(f"{best} names no step ({error!r}): take latest or a step") from error
        return checkpoints.of_step(step)
    if checkpoint.isdecimal():
        return checkpoints.of_step(int(checkpoint))
    if checkpoint != "latest":
        raise ConfigError(f"checkpoint should be latest, best or a step's number, not {checkpoint!r}")
    newest = checkpoints.newest()
    if newest is None:
        raise TrainingError(f"{storage.join(config.output, CHECKPOINT_FOLDER)} has no checkpoint yet")
    return newest


def _replace(folder: str, save: Any) -> None:
    """Save into a folder beside it, then put that in its place: only ever in the place of an earlier export."""
    final = Path(folder)
    if final.is_dir() and any(final.iterdir()) and not (final / "config.json").is_file():
        raise ConfigError(f"{final} holds something that is no exported model: move it away, or export to another folder")
    writing = final.with_name(f".writing-{final.name}")
    shutil.rmtree(writing, ignore_errors=True)
    storage.make_folder(str(writing))
    with storage.reported("export to", folder):
        save(str(writing))
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)


def _save_student(config: TrainConfig, student: CausalBody, state: dict[str, Tensor], folder: str) -> None:
    """A fresh model of the same configuration takes the weights, so that nothing of the sharding reaches the files."""
    from transformers import AutoModelForCausalLM

    model_config = copy.deepcopy(student.model.config)
    plain: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        model_config, dtype=torch.float32, trust_remote_code=config.student.trust_remote_code
    )
    plain.load_state_dict(state, strict=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer = load_tokenizer(config.student.tokenizer or config.student.model, revision=config.student.revision)
    tokenizer.transformers_tokenizer.save_pretrained(folder)


def _save_draft(draft: nn.Module, state: dict[str, Tensor], folder: str) -> None:
    layout: Any = draft_config(draft)
    plain = DFlashDraftModel(layout) if isinstance(layout, DFlashConfig) else DSparkDraftModel(layout)
    plain.load_state_dict(state, strict=True)
    export_draft(plain, folder, dtype=torch.bfloat16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--config", required=True, metavar="FILE", help="configuration of the run")
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest (default), best, or a step's number")
    parser.add_argument("--to", metavar="FOLDER", help="where to write (default: export/ of the run)")


def run(options: argparse.Namespace) -> int:
    """Export; prints the written folders as JSON. Raises the typed errors of its parts."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    print(json.dumps(export_checkpoint(load_train_config(options.config), checkpoint=options.checkpoint, folder=options.to)))
    return 0


def main() -> int:
    """The same as `xtok export`."""
    parser = argparse.ArgumentParser(
        prog="python -m xtok.train.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except XtokError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
