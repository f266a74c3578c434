"""Text mode: the text of a row, and its tokens padded to the context.

Legend: B rows, T padded length, N tokens of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from schemas.tables import RejectReason
from xtok.batch import DatumSpec
from xtok.collate.rows import refused_row
from xtok.errors import RowRefused
from xtok.padding import PaddedLayout
from xtok.tokenizers import FlatTokens, adapt_tokenizer, first_unencodable

__all__ = ["place_spans", "text_of", "tokenize_texts"]


def text_of(datum: DatumSpec) -> str:
    """The text of a row, refused where the offline path counts a reject."""
    messages = datum.get("message_log")
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict) or "content" not in messages[0]:
        raise refused_row(
            RejectReason.MISSING_TEXT, datum, "message_log must hold one message with the text as its content in text mode"
        )
    text = messages[0]["content"]
    if not isinstance(text, str):
        raise refused_row(RejectReason.TEXT_NOT_STRING, datum, f"the content is a {type(text).__name__}, not a string")
    if not text:
        raise refused_row(RejectReason.EMPTY_TEXT, datum, "the content is an empty string")
    found = first_unencodable([text])
    if found is not None:
        position = found[1]
        raise refused_row(
            RejectReason.LONE_SURROGATE, datum, f"the content holds U+{ord(text[position]):04X} at character {position}"
        )
    return text


def tokenize_texts(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    ctx_length: int,
    make_seq_div_by: int,
    *,
    add_special_tokens: bool,
    side: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [B, T], attention mask [B, T] and character offsets [B, T, 2], int64; see the collator's `_tokenize_batch`."""
    adapter = adapt_tokenizer(tokenizer)
    nothing = np.empty(0, dtype=np.int32)
    prefix, suffix = (adapter.prefix_ids, adapter.suffix_ids) if add_special_tokens else (nothing, nothing)
    content, spans = adapter.encode_with_spans(texts)
    for row in np.flatnonzero(content.lengths == 0):
        message = f"{adapter.name} gives the text {texts[int(row)]!r:.80} no token"
        raise RowRefused(RejectReason.NO_TOKENS, message, stage="tokenize", side=side)
    kept = _kept_tokens(content, ctx_length - len(prefix) - len(suffix))
    offsets = np.concatenate([[0], np.cumsum(kept)])[content.offsets]
    wrapped = FlatTokens(content.ids[kept], offsets).with_specials(prefix, suffix)
    no_span = np.zeros_like(prefix), np.zeros_like(suffix)
    shown = [FlatTokens(spans[kept, end], offsets).with_specials(*no_span).ids for end in (0, 1)]
    layout = PaddedLayout(wrapped.lengths.tolist(), divisor=make_seq_div_by, at_least=ctx_length)
    bounds = wrapped.offsets[1:-1]
    ids = layout.place(np.split(wrapped.ids, bounds), adapter.pad_token_id, np.int64)
    return ids, layout.real(np.int64), place_spans(layout, np.split(np.stack(shown, axis=1), bounds))


def place_spans(layout: PaddedLayout, spans: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    """int64 [B, T, 2] of one array [tokens, 2] a row."""
    return torch.stack([layout.place([row[:, end] for row in spans], 0, np.int64) for end in (0, 1)], dim=2)


def _kept_tokens(content: FlatTokens, capacity: int) -> npt.NDArray[np.bool_]:
    """bool [N]: the first `capacity` tokens of every text."""
    position = np.arange(len(content.ids)) - np.repeat(content.offsets[:-1], content.lengths)
    return position < capacity
