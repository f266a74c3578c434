"""What a run leaves for use: the student as a Hugging Face folder, the draft in its published layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtok.draft.config import DFlashConfig
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.draft.export import export_draft
from xtok.draft.training import draft_config
from xtok.tokenizers import load_tokenizer
from xtok.train.build import Training
from xtok.train.parallel import reshard

__all__ = ["export_models", "whole_state"]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a sharded module, whole, on the CPU. All data-parallel ranks call it."""
    reshard([module])
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        state[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
    return state


def export_models(training: Training, folder: str, *, is_main: bool, student: bool) -> dict[str, str]:
    """Write `<folder>/student` and `<folder>/draft`; returns what was written, by name. All ranks call it, the main one writes."""
    written: dict[str, str] = {}
    if student:
        state = whole_state(training.student.model)
        if is_main:
            _save_student(training, state, str(Path(folder) / "student"))
        written["student"] = str(Path(folder) / "student")
    if training.draft is not None:
        state = whole_state(training.draft)
        if is_main:
            config: Any = draft_config(training.draft)
            plain = DFlashDraftModel(config) if isinstance(config, DFlashConfig) else DSparkDraftModel(config)
            plain.load_state_dict(state, strict=True)
            export_draft(plain, str(Path(folder) / "draft"), dtype=torch.bfloat16)
        written["draft"] = str(Path(folder) / "draft")
    return written


def _save_student(training: Training, state: dict[str, Tensor], folder: str) -> None:
    """A fresh model of the same configuration takes the weights, so that nothing of the sharding reaches the files."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(training.student.model.config)
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=training.model_dtype)  # type: ignore[no-untyped-call]
    plain.load_state_dict(state, strict=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    load_tokenizer(training.tokenizer_folder).transformers_tokenizer.save_pretrained(folder)
