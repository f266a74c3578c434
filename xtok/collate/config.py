"""Options of the collator, and what about them contradicts itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt
from transformers import PreTrainedTokenizerBase

from xtok.align import TokenAligner
from xtok.errors import ConfigError
from xtok.settings import whole_number
from xtok.tokenizers import adapt_tokenizer
from xtok.tokenizers.byte_table import TokenByteTable

__all__ = ["CrossTokenizerCollatorConfig", "check_aligner", "check_config", "check_per_teacher", "whole_numbers"]


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
    if not isinstance(config, CrossTokenizerCollatorConfig):
        raise ConfigError(f"config must be a CrossTokenizerCollatorConfig, got a {type(config).__name__}")
    if config.num_packed_rows != 1:
        raise ConfigError(f"num_packed_rows is {config.num_packed_rows}: only 1 row in each packed row is supported")
    if config.native_thinking_alignment and not (config.mode == "chat" and config.include_thinking_in_loss):
        raise ConfigError("native_thinking_alignment needs mode='chat' and include_thinking_in_loss=True")
    if config.kd_alignment_regions is not None:
        if not config.native_thinking_alignment:
            raise ConfigError("kd_alignment_regions needs native_thinking_alignment=True")
        if not config.kd_alignment_regions:
            raise ConfigError("kd_alignment_regions is empty: leave it out to keep all regions")


def check_per_teacher(values: Mapping[str, Any], *, may_be_none: Collection[str]) -> int:
    """Number of teachers: the length of every list of `values`, by the argument's name, `aligners` first. Raises ConfigError."""
    for name, entries in values.items():
        if not (isinstance(entries, Sized) and not isinstance(entries, str)) and not (entries is None and name in may_be_none):
            raise ConfigError(f"{name} must be a list with one entry for each teacher, got {entries!r:.80}")
    num_teachers = len(values["aligners"])
    for name, entries in values.items():
        if entries is not None and len(entries) != num_teachers:
            raise ConfigError(f"{name} has {len(entries)} entries for {num_teachers} aligners: give one for each teacher")
    return num_teachers


def whole_numbers(name: str, values: Sequence[int], least: int | None = None) -> list[int]:
    """One int a teacher. Raises ConfigError naming the entry."""
    return [whole_number(f"{name}[{index}]", value, least) for index, value in enumerate(values)]


def check_aligner(index: int, aligner: TokenAligner, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError unless `aligner` is of these two tokenizers: it would read the ids of others as its own."""
    if not callable(getattr(aligner, "align", None)):
        raise ConfigError(f"aligners[{index}] must be a TokenAligner or None, got a {type(aligner).__name__}")
    if not isinstance(aligner, TokenAligner):
        return  # one of the caller's own
    for side, given, own in (("student", student, aligner.student), ("teacher", teacher, aligner.teacher)):
        adapter = adapt_tokenizer(given)
        if adapter is not own and not _spell_alike(adapter.table, own.table):
            raise ConfigError(
                f"aligners[{index}] was made for the {side} {own.name}, which spells other tokens by the same ids than {adapter.name}: "
                "make it of the tokenizers that the collator gets"
            )


def _spell_alike(one: TokenByteTable, other: TokenByteTable) -> bool:
    """Whether ids that both have as ordinary tokens are as long in both. Roles, templates and added tokens may have been set since."""
    shared = min(one.vocab_size, other.vocab_size)
    ordinary = ~(one.is_special[:shared] | other.is_special[:shared])
    return bool((one.lengths[:shared] == other.lengths[:shared])[ordinary].all())
