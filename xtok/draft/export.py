"""Draft checkpoints in the published layouts: `model.safetensors` and `config.json`, strict about every key and shape.

    python -m xtok.draft.export SOURCE DESTINATION [--dtype bfloat16]     rewrite a draft folder in the published layout

Tensors carry no `model.` prefix and are [out, in]; a DFlash draft is exactly 11 tensors a layer and 3 more. Embedding and head are
the target's and are not stored; a file that holds copies of them is read without them. `xtok.draft.engines` says which serving
engine reads which field.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtok import storage
from xtok.draft.config_file import CONFIG_FILE, parse_config, published_config
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError

__all__ = ["INDEX_FILE", "TARGETS_OWN_TENSORS", "WEIGHTS_FILE", "export_draft", "load_draft", "main"]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TARGETS_OWN_TENSORS = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""Copies of the target's tensors that some published files hold; engines share the target's."""
_MASK_EMBEDDING_FILE = "mask_embedding.pt"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def export_draft(
    model: DFlashDraftModel | DSparkDraftModel, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a draft for serving engines and for `load_draft`.

    Args:
        model: weights are gathered to the CPU and cast to `dtype`; where they are sharded, all ranks call this.
        folder: local path or URL; its two files are replaced.

    Raises:
        ConfigError: no folder, or weights that are NaN or infinite in `dtype`.
        StorageError: the folder cannot be written.
    """
    weights, config = (_inside(folder, name) for name in (WEIGHTS_FILE, CONFIG_FILE))
    tensors = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    _refuse(f"this draft cannot be written to {folder} in {dtype}", _not_finite(tensors))
    storage.make_folder(os.fspath(folder))
    storage.write_atomic(weights, save_safetensors(tensors, metadata={"format": "pt"}))
    fields = published_config(model.config, dtype=dtype)
    storage.write_atomic(config, (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode())


def load_draft(
    folder: str | os.PathLike[str], *, target: FrozenTarget | None = None, dtype: torch.dtype | None = None
) -> DFlashDraftModel | DSparkDraftModel:
    """Read a draft in the published layout, from one safetensors file or several with an index.

    Args:
        folder: local path or URL.
        target: checked for hidden size, vocabulary, layer count and mask token; its device is taken.
        dtype: default the stored one (the widest, where they differ).

    Raises:
        ConfigError: a configuration of another kind, or one this body does not express (sliding windows, reduced vocabulary);
            missing, unexpected, misshapen, quantized or non-finite tensors, each named; a damaged file; a draft that does not fit
            the target.
        StorageError: a file that cannot be read.
    """
    config, model_class = parse_config(_read_object(file := _inside(folder, CONFIG_FILE)), place=file)
    if target is not None:
        target.check_draft(config)
    mask_embedding = _inside(folder, _MASK_EMBEDDING_FILE)
    if storage.exists(mask_embedding):
        raise ConfigError(f"{mask_embedding}: a mask embedding apart from the target's embedding is not supported")
    tensors = _read_tensors(folder)
    with torch.device("meta"):
        model: Any = model_class(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name in wanted or name not in TARGETS_OWN_TENSORS}
    _refuse(f"{folder} does not hold the draft its {CONFIG_FILE} describes", _differences(wanted, tensors))
    _refuse(f"the draft in {folder} is damaged", _not_finite(tensors))
    dtype = dtype or functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    model = model.to_empty(device="cpu")  # rotary frequencies are recomputed by the move, all else is assigned
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=True, assign=True)
    moved: DFlashDraftModel | DSparkDraftModel = model.to(target.device if target is not None else "cpu")
    return moved


def _inside(folder: str | os.PathLike[str], name: str) -> str:
    if not os.fspath(folder):
        raise ConfigError("the folder of a draft is an empty name: give a path or a URL")
    return storage.join(os.fspath(folder), name)


def _read_object(url: str) -> dict[str, Any]:
    try:
        found = json.loads(storage.read_bytes(url))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{url} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{url} must hold a JSON object, not {type(found).__name__}")
    return found


def _read_tensors(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of the folder; with an index and no single file, those of all files that the index names."""
    names = [WEIGHTS_FILE]
    index = _inside(folder, INDEX_FILE)
    if not storage.exists(_inside(folder, WEIGHTS_FILE)) and storage.exists(index):
        places = _read_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(name, str) and name == os.path.basename(name) for name in places.values()
        ):
            raise ConfigError(f"{index} has no weight_map of tensor names to file names")
        names = sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        url = _inside(folder, name)
        try:
            tensors |= read_safetensors(storage.read_bytes(url))
        except SafetensorError as error:
            raise ConfigError(f"{url} is no whole safetensors file ({error}): fetch or export it again") from error
    return tensors


def _differences(wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> list[str]:
    problems = [f"missing {name} {shape}" for name, shape in wanted.items() if name not in tensors]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name not in wanted:
            problems.append(f"unexpected {name} {shape}")
        elif shape != wanted[name]:
            problems.append(f"{name} is {shape}, {CONFIG_FILE} says {wanted[name]}")
        elif tensor.dtype not in _DTYPES:
            problems.append(f"{name} is {tensor.dtype}: quantized drafts are not supported")
    return problems


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"{name} holds NaN or infinity" for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError(f"{what}: {'; '.join(sorted(problems))}")


def main(arguments: list[str] | None = None) -> None:
    """Command line of the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m xtok.draft.export", description="Rewrite a draft in the published layout.")
    parser.add_argument("source")
    parser.add_argument("destination")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args(arguments)
    model = load_draft(options.source)
    export_draft(model, options.destination, dtype=getattr(torch, options.dtype))
    print(f"{options.destination}: {type(model).__name__}, {len(model.state_dict())} tensors, {options.dtype}")


if __name__ == "__main__":
    main()
