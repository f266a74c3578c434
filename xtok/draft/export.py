"""Draft checkpoints in the published layouts: `model.safetensors` and `config.json`, strict about every key and shape.

    python -m xtok.draft.export SOURCE DESTINATION [--dtype bfloat16]     rewrite a draft folder in the published layout

Tensors carry no `model.` prefix and are [out, in]; a DFlash draft is exactly 11 tensors a layer and 3 more. Embedding and head are
the target's and are not stored; a file that holds copies of them is read without them. `xtok.draft.engines` says which serving
engine reads which field.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor

from xtok import storage
from xtok.draft.config import DFlashConfig, DraftConfig, DSparkConfig
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError

__all__ = [
    "CONFIG_FILE",
    "DRAFT_CLASSES",
    "TARGETS_OWN_TENSORS",
    "WEIGHTS_FILE",
    "export_draft",
    "load_draft",
    "main",
    "parse_config",
    "published_config",
]

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
DRAFT_CLASSES: dict[str, type[DFlashDraftModel] | type[DSparkDraftModel]] = {
    "DFlashDraftModel": DFlashDraftModel,
    "Qwen3DSparkModel": DSparkDraftModel,
}
TARGETS_OWN_TENSORS = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""Copies of the target's tensors that some published files hold; engines share the target's."""


def export_draft(model: DFlashDraftModel | DSparkDraftModel, folder: str, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a draft for serving engines and for `load_draft`.

    Args:
        model: weights are gathered to the CPU and cast to `dtype`.
        folder: local path or URL; its two files are replaced.

    Raises:
        StorageError: the folder cannot be written.
    """
    tensors = {name: tensor.detach().to(device="cpu", dtype=dtype).contiguous() for name, tensor in model.state_dict().items()}
    config = published_config(model.config, dtype=dtype)
    storage.make_folder(folder)
    storage.write_atomic(storage.join(folder, WEIGHTS_FILE), safetensors.torch.save(tensors, metadata={"format": "pt"}))
    storage.write_atomic(storage.join(folder, CONFIG_FILE), (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def load_draft(
    folder: str, *, target: FrozenTarget | None = None, dtype: torch.dtype | None = None
) -> DFlashDraftModel | DSparkDraftModel:
    """Read a draft in the published layout.

    Args:
        folder: local path or URL.
        target: checked for hidden size, vocabulary, layer count and mask token; its device is taken.
        dtype: default the stored one.

    Raises:
        ConfigError: a configuration of another kind, or one this body does not express (sliding windows, reduced vocabulary);
            missing, unexpected or misshapen tensors, each named; a draft that does not fit the target.
        StorageError: a file that cannot be read.
    """
    config, model_class = parse_config(json.loads(storage.read_bytes(storage.join(folder, CONFIG_FILE))))
    if target is not None:
        target.check_draft(config)
    tensors = safetensors.torch.load(storage.read_bytes(storage.join(folder, WEIGHTS_FILE)))
    with torch.device("meta"):
        model: Any = model_class(config)  # type: ignore[arg-type]
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name in wanted or name not in TARGETS_OWN_TENSORS}
    _check_tensors(folder, wanted, tensors)
    stored = tensors["norm.weight"].dtype
    model = model.to_empty(device="cpu")  # rotary frequencies are recomputed by the move, all else is assigned
    model.load_state_dict({name: tensor.to(dtype or stored) for name, tensor in tensors.items()}, strict=True, assign=True)
    moved: DFlashDraftModel | DSparkDraftModel = model.to(target.device if target is not None else "cpu")
    return moved


def _check_tensors(folder: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    problems = [f"missing {name} {shape}" for name, shape in wanted.items() if name not in tensors]
    problems += [f"unexpected {name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if name not in wanted]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, config.json says {shape}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise ConfigError(f"{folder} does not hold the draft its {CONFIG_FILE} describes: {'; '.join(sorted(problems))}")


def published_config(config: DraftConfig, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The config.json of a draft, with every field that the known engines look for."""
    shared: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_draft_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_draft_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "initializer_range": config.init_std,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    ids: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if config.slot_decay is not None:
        shared["slot_decay"] = config.slot_decay
    if isinstance(config, DSparkConfig):
        return {
            **shared,
            **ids,
            "architectures": ["Qwen3DSparkModel"],
            "dflash_config": ids,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
            "sample_from_anchor": True,
            "dspark_bonus_anchor": False,
        }
    return {**shared, "architectures": ["DFlashDraftModel"], "dflash_config": ids}


def parse_config(raw: Mapping[str, Any]) -> tuple[DraftConfig, type[DFlashDraftModel] | type[DSparkDraftModel]]:
    """Configuration and class of a published config.json; ids are looked for in `dflash_config`, then at the top level.

    Raises:
        ConfigError: another architecture, a missing field, or a feature this body does not have.
    """
    architectures = raw.get("architectures") or [None]
    name = architectures[0]
    if name not in DRAFT_CLASSES:
        raise ConfigError(f"architectures {architectures} is no draft known here: expected one of {sorted(DRAFT_CLASSES)}")
    nested: Mapping[str, Any] = raw.get("dflash_config") or {}
    _refuse_unsupported(raw, nested)
    fields: dict[str, Any] = {
        "num_draft_layers": raw.get("num_hidden_layers"),
        "init_std": raw.get("initializer_range", 0.02),
        "mask_token_id": nested.get("mask_token_id", raw.get("mask_token_id")),
        "target_layer_ids": nested.get("target_layer_ids", raw.get("target_layer_ids")),
    }
    parameters = raw.get("rope_parameters") or {}
    fields["rope_theta"] = raw.get("rope_theta", parameters.get("rope_theta"))
    fields["rope_scaling"] = raw.get("rope_scaling")
    same = set(DFlashConfig.model_fields) - set(fields)
    fields |= {field: raw[field] for field in same if field in raw}
    if name == "DFlashDraftModel":
        return _validated(DFlashConfig, fields), DFlashDraftModel
    own = set(DSparkConfig.model_fields) - set(DFlashConfig.model_fields)
    fields |= {field: raw[field] for field in own if field in raw}
    return _validated(DSparkConfig, fields), DSparkDraftModel


def _validated(kind: type[DraftConfig], fields: dict[str, Any]) -> DraftConfig:
    missing = sorted(name for name, value in fields.items() if value is None and name not in ("rope_scaling", "slot_decay"))
    if missing:
        raise ConfigError(f"{CONFIG_FILE} lacks {missing}")
    try:
        return kind(**fields)
    except ValidationError as error:
        raise ConfigError(f"{CONFIG_FILE} is wrong: {error}") from error


def _refuse_unsupported(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    problems = []
    if any(kind != "full_attention" for kind in raw.get("layer_types") or []) or nested.get("use_swa"):
        problems.append("sliding-window layers")
    if raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")):
        problems.append(f"a reduced vocabulary ({raw.get('draft_vocab_size')} of {raw.get('vocab_size')})")
    if raw.get("attention_bias"):
        problems.append("attention biases")
    if nested.get("causal") or raw.get("is_causal"):
        problems.append("causal attention inside a block")
    if raw.get("sample_from_anchor") is False or raw.get("dspark_bonus_anchor"):
        problems.append("a DSpark head in the at-position layout")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {raw['hidden_act']!r}")
    if problems:
        raise ConfigError(f"this draft has {', '.join(problems)}, which this body does not express")


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
