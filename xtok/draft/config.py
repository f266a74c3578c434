"""Configuration of draft models, validated before anything is built.

A draft shares the target's hidden size and vocabulary; its body is Qwen3-shaped whatever the target is, because serving engines
build that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from xtok.draft.blocks import validate_target_layer_ids
from xtok.draft.rope import RotaryEmbedding
from xtok.errors import ConfigError

__all__ = ["DFlashConfig", "DSparkConfig", "DraftConfig", "Layout", "MarkovHeadType", "default_target_layer_ids"]

Layout = Literal["at_position", "next_token"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]

_DFLASH_SLOT_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}
"""Published decay constants by block size; other sizes use the ratio of the nearest."""


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Evenly spaced target layers, one per draft layer where the target has room; never its last layer.

    36 target layers and 5 draft layers give 1, 9, 17, 25, 33; one draft layer takes the middle.
    """
    last = max(num_target_layers - 2, 0)
    if num_draft_layers == 1:
        return (min(num_target_layers // 2, last),)
    spaced = (round(1 + j * (num_target_layers - 4) / (num_draft_layers - 1)) for j in range(num_draft_layers))
    return tuple(sorted({min(max(i, 0), last) for i in spaced}))


class DraftConfig(BaseModel):
    """Dimensions and wiring that every draft has; units are tokens, layers and channels."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layout: ClassVar[Layout]
    """at_position: slot k predicts the token at anchor + k (slot 0 is given). next_token: slot k predicts anchor + k + 1."""

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_draft_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    target_layer_ids: tuple[StrictInt, ...]
    mask_token_id: int = Field(ge=0)
    block_size: int
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=1e6, gt=0)
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = Field(default=32768, ge=1)
    init_std: float = Field(default=0.02, gt=0)
    slot_decay: float | None = Field(default=None, gt=0)
    """Constant g of the slot weights exp(-k / g), k = 0 for the first drafted slot; None takes the published value."""

    @field_validator("block_size")
    @classmethod
    def _at_least_two_slots(cls, block_size: int) -> int:
        if block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {block_size}: a block of one slot drafts nothing")
        return block_size

    @field_validator("target_layer_ids", mode="before")
    @classmethod
    def _as_tuple(cls, ids: Any) -> Any:
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            return ids
        return tuple(int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in ids)

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _named_rope_type(cls, scaling: Any) -> Any:
        """Older files name the kind `type`; without a name the positions would silently stay unscaled."""
        if not isinstance(scaling, dict) or "rope_type" in scaling:
            return scaling
        if "type" not in scaling:
            raise ValueError(f"rope_scaling {scaling} does not say its rope_type")
        return {"rope_type" if key == "type" else key: value for key, value in scaling.items()}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        validate_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is beyond the target's {self.vocab_size} embedding rows")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads are no multiple of {self.num_key_value_heads} key heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        if math.exp(-1.0 / self.effective_slot_decay) == 0.0:
            raise ValueError(f"slot_decay {self.slot_decay} leaves no weight to any slot but the first")
        if self.rope_scaling is not None:
            _check_rope(self)
        return self

    @property
    def first_supervised_slot(self) -> int:
        """1 where slot 0 is the given anchor token, else 0."""
        return 1 if self.layout == "at_position" else 0

    @property
    def label_offset(self) -> int:
        """Slot k predicts the token at anchor + k + label_offset."""
        return 0 if self.layout == "at_position" else 1

    @property
    def num_draft_slots(self) -> int:
        """Tokens drafted by a block: K - 1 at-position, K next-token."""
        return self.block_size - self.first_supervised_slot

    @property
    def effective_slot_decay(self) -> float:
        """`slot_decay`, or the published constant."""
        raise NotImplementedError

    @classmethod
    def from_target(
        cls,
        target_config: Any,
        *,
        mask_token_id: int,
        num_draft_layers: int = 5,
        block_size: int | None = None,
        target_layer_ids: Sequence[int] | None = None,
        **settings: Any,
    ) -> Self:
        """A draft for a Hugging Face decoder-only target: its width and vocabulary, the body's own layer count.

        Nothing but dimensions and rope_theta is copied: the target's layer types, tied embeddings, partial or scaled rotary
        positions belong to the target.

        Args:
            target_config: the target's `PreTrainedConfig` (its text part for multimodal ones).
            mask_token_id: a reserved id below the embedding rows that is neither padding nor end of text.
            num_draft_layers: D.
            block_size: K; default the published size (16 DFlash, 7 DSpark).
            target_layer_ids: layers to take features from; default `default_target_layer_ids`.
            settings: any other field, over what the target gives.

        Raises:
            ValueError: a field that is out of range or does not fit the target; ConfigError (one of them) where the target's
                configuration lacks a dimension, or ends or pads its texts with the mask token.
        """
        text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
        _check_mask_token(text, mask_token_id)
        heads, layers = _read(text, "num_attention_heads"), _read(text, "num_hidden_layers")
        fields: dict[str, Any] = {
            "hidden_size": _read(text, "hidden_size"),
            "intermediate_size": _read(text, "intermediate_size"),
            "num_draft_layers": num_draft_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": _read(text, "num_key_value_heads", heads),
            "head_dim": _read(text, "head_dim", _read(text, "hidden_size") // heads),
            "vocab_size": _read(text, "vocab_size"),
            "num_target_layers": layers,
            "target_layer_ids": default_target_layer_ids(layers, num_draft_layers)
            if target_layer_ids is None
            else target_layer_ids,
            "mask_token_id": mask_token_id,
            "rms_norm_eps": _read(text, "rms_norm_eps", 1e-6),
            "rope_theta": _rope_theta(text),
            "max_position_embeddings": _read(text, "max_position_embeddings"),
        }
        if block_size is not None:
            fields["block_size"] = block_size
        return cls(**{**fields, **settings})


class DFlashConfig(DraftConfig):
    """DFlash: one pass drafts K - 1 tokens, slot k the one at anchor + k."""

    layout: ClassVar[Layout] = "at_position"
    block_size: int = 16

    @property
    def effective_slot_decay(self) -> float:
        if self.slot_decay is not None:
            return self.slot_decay
        nearest = min(_DFLASH_SLOT_DECAY, key=lambda size: abs(size - self.block_size))
        return _DFLASH_SLOT_DECAY[nearest] * self.block_size / nearest


class DSparkConfig(DraftConfig):
    """DSpark: one pass drafts K tokens, slot k the one at anchor + k + 1, with a Markov bias and a confidence.

    `markov_rank=0, enable_confidence_head=False` is the next-token draft that some publish under the name DFlash.
    """

    layout: ClassVar[Layout] = "next_token"
    block_size: int = 7
    markov_rank: int = Field(default=256, ge=0)
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    @model_validator(mode="after")
    def _confidence_has_its_input(self) -> Self:
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_head_with_markov needs markov_rank >= 1: set it to false, or give the draft a Markov head"
            )
        return self

    @property
    def effective_slot_decay(self) -> float:
        return 4.0 if self.slot_decay is None else self.slot_decay


def _read(text: Any, name: str, default: Any = None) -> Any:
    """A field of a target's configuration, `default` where it is absent or None."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # transformers refuses to say a field that a few layers change: the value of all the others is meant
        value = text.to_dict().get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{type(text).__name__} has no {name}: a draft needs the configuration of a decoder-only target")
    return value


def _check_mask_token(text: Any, mask_token_id: int) -> None:
    for role in ("eos_token_id", "pad_token_id"):
        ids = getattr(text, role, None)
        if ids is not None and mask_token_id in (ids if isinstance(ids, list | tuple) else [ids]):
            raise ConfigError(f"mask_token_id {mask_token_id} is the target's {role}: choose a reserved id")


def _check_rope(config: DraftConfig) -> None:
    """Build the frequencies once: an unknown kind or a missing factor is said here and not at the first step."""
    rope_type = (config.rope_scaling or {})["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_scaling {rope_type!r} depends on the length of the sequence, which the draft's body does not follow"
        )
    try:
        rotary = RotaryEmbedding(
            config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling, max_positions=config.max_position_embeddings
        )
    except KeyError as error:
        raise ValueError(f"rope_scaling {config.rope_scaling}: {error.args[0]}") from error
    partial = (config.rope_scaling or {}).get("partial_rotary_factor", 1.0)
    if len(rotary.inv_freq) != config.head_dim // 2 or (rope_type == "default" and partial != 1.0):
        raise ValueError(
            f"rope_scaling {config.rope_scaling} rotates a part of head_dim {config.head_dim}: the draft rotates all of it"
        )


def _rope_theta(text: Any) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    # Targets with several rotary bases (one per layer type) keep them nested; the full-attention one spans the context.
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)
