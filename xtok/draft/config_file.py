"""The config.json of a draft in the published layouts: written with every field the known engines look for, read strictly.

A field that changes what the draft computes is either expressed by the body here or refused: none is passed over. `xtok.draft.engines`
says which serving engine reads which field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from xtok.draft.config import DFlashConfig, DraftConfig, DSparkConfig
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.errors import ConfigError

__all__ = ["CONFIG_FILE", "DRAFT_CLASSES", "parse_config", "published_config"]

CONFIG_FILE = "config.json"
DRAFT_CLASSES: dict[str, type[DFlashDraftModel] | type[DSparkDraftModel]] = {
    "DFlashDraftModel": DFlashDraftModel,
    "Qwen3DSparkModel": DSparkDraftModel,
}
_NESTED_FIRST = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")
"""Fields that files keep in `dflash_config` or at the top level."""
_MAY_BE_ABSENT = {"init_std", "rms_norm_eps", "rope_scaling", "slot_decay", "max_position_embeddings"}


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


def parse_config(
    raw: Mapping[str, Any], *, place: str = CONFIG_FILE
) -> tuple[DraftConfig, type[DFlashDraftModel] | type[DSparkDraftModel]]:
    """Configuration and class of a published config.json; ids and sizes are looked for in `dflash_config`, then at the top level.

    Args:
        raw: the file's object.
        place: what messages call the file.

    Raises:
        ConfigError: another architecture, a missing or wrong field, or a feature this body does not have.
    """
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in DRAFT_CLASSES:
        raise ConfigError(
            f"{place}: architectures {architectures} is no draft known here: expected one of {sorted(DRAFT_CLASSES)}"
        )
    nested = raw.get("dflash_config") or {}
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    for field, value in (("dflash_config", nested), ("rope_parameters or rope_scaling", rope)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place}: {field} must be an object, not {value!r}")
    problems = _unsupported(raw, nested, rope, next_token=name != "DFlashDraftModel")
    if problems:
        raise ConfigError(f"{place}: this draft has {', '.join(problems)}, which the draft body here does not express")
    model_class = DRAFT_CLASSES[name]
    kind: type[DraftConfig] = DFlashConfig if model_class is DFlashDraftModel else DSparkConfig
    fields = {field: raw[field] for field in kind.model_fields if raw.get(field) is not None}
    fields |= {field: nested[field] for field in _NESTED_FIRST if nested.get(field) is not None}
    # Newer files keep base and scaling together; a kind "default" (or a base alone) is no scaling.
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    theta = raw.get("rope_theta") if raw.get("rope_theta") is not None else rope.get("rope_theta")
    fields |= {
        "num_draft_layers": raw.get("num_hidden_layers"),
        "rope_theta": theta,
        "rope_scaling": scaling if scaling.get("rope_type", scaling.get("type")) != "default" and scaling else None,
        "init_std": raw.get("initializer_range", 0.02),
    }
    required = {field for field in DraftConfig.model_fields if field not in _MAY_BE_ABSENT}
    missing = sorted(field for field in required if fields.get(field) is None)
    if missing:
        raise ConfigError(f"{place} lacks {missing}")
    try:
        return kind(**fields), model_class
    except ValidationError as error:
        raise ConfigError(f"{place} is wrong: {error}") from error


def _unsupported(raw: Mapping[str, Any], nested: Mapping[str, Any], rope: Mapping[str, Any], *, next_token: bool) -> list[str]:
    problems = []
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        problems.append(f"layer_types {kinds} (only full_attention is expressed)")
    if nested.get("use_swa") or (raw.get("use_sliding_window") and not kinds):
        problems.append("sliding-window layers")
    if raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")):
        problems.append(f"a reduced vocabulary ({raw.get('draft_vocab_size')} of {raw.get('vocab_size')})")
    if raw.get("attention_bias"):
        problems.append("attention biases")
    if nested.get("attention_sink_bias") or raw.get("attention_sink_bias"):
        problems.append("attention sinks")
    if nested.get("causal") or raw.get("is_causal"):
        problems.append("causal attention inside a block")
    at_anchor = nested.get("sample_from_anchor", raw.get("sample_from_anchor"))
    if (at_anchor is not None and bool(at_anchor) != next_token) or (next_token and raw.get("dspark_bonus_anchor")):
        problems.append(f"the {'at-position' if next_token else 'next-token'} layout under {raw['architectures'][0]}")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {raw['hidden_act']!r}")
    if raw.get("is_neox_style") is False or raw.get("rope_is_neox_style") is False:
        problems.append("interleaved rotary pairs (neox style false)")
    if {raw.get("partial_rotary_factor"), rope.get("partial_rotary_factor")} - {None, 1}:
        problems.append("rotary positions on a part of each head (partial_rotary_factor)")
    return problems
