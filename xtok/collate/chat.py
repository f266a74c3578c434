"""Chat mode: conversations of rows, the renderers of all sides (the same that the offline path uses), and padding.

Legend: B rows, T padded length.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from schemas.tables import reject_side
from xtok.batch import DatumSpec
from xtok.chat import (
    ChatOptions,
    ChatRenderer,
    ChatSide,
    Conversation,
    LocatedPart,
    RenderedChatDocument,
    conversation_from_row,
    documents_of,
    locate_conversations,
)
from xtok.collate.config import CrossTokenizerCollatorConfig
from xtok.collate.text import place_spans
from xtok.errors import ConfigError, RowRefused
from xtok.padding import PaddedLayout
from xtok.tokenizers import adapt_tokenizer

__all__ = ["ChatSides", "SideArguments", "conversations_of", "pad_chats", "raise_refusals", "teacher_arguments"]


@dataclass(frozen=True, slots=True)
class SideArguments:
    """What one side's chats are rendered and read with, its tokenizer and context aside."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    allow_special_tokens_in_content: bool = False
    accept_dropped_reasoning: bool = False


def teacher_arguments(
    aligners: Sequence[object],
    student_kwargs: Mapping[str, Any] | None,
    template_kwargs: Sequence[Mapping[str, Any] | None] | None,
    allow_special_tokens: Sequence[bool] | None,
    accept_dropped_reasoning: Sequence[bool] | None,
) -> list[SideArguments]:
    """Arguments of every teacher. ConfigError for a same-tokenizer teacher (aligner None) with template arguments of its own."""
    sides = []
    for index, aligner in enumerate(aligners):
        kwargs = (template_kwargs[index] if template_kwargs is not None else None) or {}
        if aligner is None and kwargs and kwargs != (student_kwargs or {}):
            raise ConfigError(
                f"chat_template_kwargs_teachers[{index}] is {dict(kwargs)}, the student's {dict(student_kwargs or {})}: a teacher "
                f"that is shown another text than the student needs an aligner, and aligners[{index}] is None"
            )
        flags = (values is not None and values[index] for values in (allow_special_tokens, accept_dropped_reasoning))
        sides.append(SideArguments(kwargs, *flags))
    return sides


class ChatSides:
    """The renderers of a collator: one for each side, made when first asked for, and again after pickling.

    student, teachers: the arguments of the sides. render_date: the day that templates see; None for today (UTC).
    """

    def __init__(
        self,
        config: CrossTokenizerCollatorConfig,
        student: SideArguments,
        teachers: Sequence[SideArguments],
        render_date: datetime.date | None,
    ) -> None:
        regions = config.kd_alignment_regions
        self._options = ChatOptions(
            config.include_thinking_in_loss, config.native_thinking_alignment, None if regions is None else tuple(regions)
        )
        self._arguments = {"student": student, **{reject_side(index): teacher for index, teacher in enumerate(teachers)}}
        self.render_date = render_date or datetime.datetime.now(datetime.UTC).date()
        self._renderers: dict[tuple[int, int, str], ChatRenderer] = {}

    def renderer(self, tokenizer: PreTrainedTokenizerBase, ctx_length: int, side: str) -> ChatRenderer:
        """The renderer of a side (`student`, `teacher=0`, …). Raises ConfigError without a usable template."""
        key = (id(tokenizer), ctx_length, side)
        if key not in self._renderers:
            arguments = self._arguments.get(side, SideArguments())
            chat_side = ChatSide(
                adapt_tokenizer(tokenizer),
                name=side,
                render_date=self.render_date,
                options=self._options,
                template_kwargs=arguments.template_kwargs,
                allow_special_tokens_in_content=arguments.allow_special_tokens_in_content,
                accept_dropped_reasoning=arguments.accept_dropped_reasoning,
                context_length=ctx_length,
            )
            self._renderers[key] = ChatRenderer(chat_side)
        return self._renderers[key]

    def locate(
        self, batch: Sequence[DatumSpec], conversations: Sequence[Conversation], renderer: ChatRenderer
    ) -> tuple[LocatedPart, list[RenderedChatDocument]]:
        """All rows on one side. Raises RowRefused for the first that this side refuses."""
        if renderer.side.renderer.num_checked == 0:
            renderer.prove(conversations)  # on the first batch; a share of all later rows is proven too
        part = locate_conversations(renderer, conversations)
        raise_refusals(batch, part.refusals)
        return part, documents_of(part)

    def __getstate__(self) -> dict[str, Any]:
        """Compiled templates stay with their process."""
        return {**self.__dict__, "_renderers": {}}


def conversations_of(batch: Sequence[DatumSpec]) -> list[Conversation]:
    """The conversations of all rows. Raises RowRefused for the first that is none."""
    conversations = []
    for datum in batch:
        row = {
            "messages": datum.get("message_log"),
            "tools": datum.get("tools"),
            "chat_template_kwargs": datum.get("chat_template_kwargs"),
        }
        try:
            conversations.append(conversation_from_row(row))
        except RowRefused as refused:
            raise_refusals([datum], [refused])
    return conversations


def raise_refusals(batch: Sequence[DatumSpec], refusals: Sequence[RowRefused | None]) -> None:
    """Raises the first refusal, its row named."""
    for datum, refused in zip(batch, refusals, strict=True):
        if refused is not None:
            message = f"row with idx {datum.get('idx')}: {refused.message}"
            raise RowRefused(refused.reason, message, stage=refused.stage, side=refused.side) from refused


def pad_chats(
    ids_list: Sequence[Sequence[int]],
    off_list: Sequence[Sequence[Sequence[int]]],
    mask_list: Sequence[Sequence[int]],
    pad_token_id: int,
    make_seq_div_by: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask, offsets [B, T, 2] and assistant mask, int64; see the collator's `_pad_chat_batch`."""
    lengths = [len(ids) for ids in ids_list]
    for name, rows in (("off_list", off_list), ("mask_list", mask_list)):
        if [len(row) for row in rows] != lengths:
            raise ValueError(f"{name} has rows of {[len(row) for row in rows]} tokens, ids_list of {lengths}")
    layout = PaddedLayout(lengths, divisor=make_seq_div_by)
    ids = layout.place([np.array(row, dtype=np.int64) for row in ids_list], pad_token_id, np.int64)
    mask = layout.place([np.array(row, dtype=np.int64) for row in mask_list], 0, np.int64)
    spans = [np.array(row, dtype=np.int64).reshape(-1, 2) for row in off_list]
    return ids, layout.real(np.int64), place_spans(layout, spans), mask
