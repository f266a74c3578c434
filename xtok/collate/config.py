"""Options of the collator, and what about them contradicts itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from xtok.errors import ConfigError

__all__ = ["CrossTokenizerCollatorConfig", "check_config"]


class CrossTokenizerCollatorConfig(BaseModel):
    """Options shared by all sides; what contradicts itself is refused by the collator.

    mode: "text" tokenizes raw text; "chat" renders each model's template and supervises the final assistant turn.
    include_thinking_in_loss: reasoning text and its closing mark are supervised too.
    native_thinking_alignment: align reasoning, close, answer and end of turn each alone (needs chat and thinking loss).
    kd_alignment_regions: keep distillation to these regions (needs native alignment). num_packed_rows: only 1 is supported.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["text", "chat"] = "text"
    include_thinking_in_loss: bool = False
    native_thinking_alignment: bool = False
    kd_alignment_regions: list[Literal["reasoning", "close", "answer", "eot"]] | None = None
    num_packed_rows: PositiveInt = 1


def check_config(config: CrossTokenizerCollatorConfig) -> None:
    """Raises ConfigError (a ValueError) naming the field."""
    if config.num_packed_rows != 1:
        raise ConfigError(f"num_packed_rows is {config.num_packed_rows}: only 1 row in each packed row is supported")
    if config.native_thinking_alignment and not (config.mode == "chat" and config.include_thinking_in_loss):
        raise ConfigError("native_thinking_alignment needs mode='chat' and include_thinking_in_loss=True")
    if config.kd_alignment_regions is not None:
        if not config.native_thinking_alignment:
            raise ConfigError("kd_alignment_regions needs native_thinking_alignment=True")
        if not config.kd_alignment_regions:
            raise ConfigError("kd_alignment_regions is empty: leave it out to keep all regions")
