"""One chat as one model sees it: the document the online collator works with, by the same functions as a whole offline part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from xtok.chat.conversation import Conversation
from xtok.chat.locate import LocatedPart, locate_tokens, texts_of
from xtok.chat.places import IntArray
from xtok.chat.render import ChatRenderer
from xtok.chat.rendered import RegionSpan

__all__ = ["RenderedChatDocument", "documents_of", "locate_conversations", "render_document"]


@dataclass(frozen=True)
class RenderedChatDocument:
    """A rendered, tokenized chat, unpadded. Spans are half-open.

    text: what the model is shown. input_ids: int32 [T], no specials but the template's. assistant_mask: bool [T], supervised tokens:
    the final content and the end of turn. content_span: characters of `text`. end_of_turn_index: token, None when the template writes no
    mark. regions: token spans of the supervised parts, the end of turn last. reasoning: "none", "shown" or "dropped" by the template.
    byte_spans: int64 [T, 2], bytes of `text` in UTF-8.
    """

    text: str
    input_ids: npt.NDArray[np.int32]
    assistant_mask: npt.NDArray[np.bool_]
    content_span: tuple[int, int]
    end_of_turn_index: int | None
    regions: tuple[RegionSpan, ...]
    reasoning: str
    byte_spans: IntArray

    @cached_property
    def offsets(self) -> IntArray:
        """int64 [T, 2]: characters of `text` each token touches; pieces of one character share its span."""
        if self.text.isascii():
            return self.byte_spans
        begins = (np.frombuffer(self.text.encode(), dtype=np.uint8) & 0xC0) != 0x80
        num_begun = np.concatenate(([0], np.cumsum(begins)))
        starts, ends = self.byte_spans[:, 0], self.byte_spans[:, 1]
        inside = np.append(~begins, False)[starts]
        return np.stack([num_begun[starts] - inside, num_begun[ends]], axis=1)


def locate_conversations(renderer: ChatRenderer, conversations: Sequence[Conversation | None]) -> LocatedPart:
    """Render, encode and locate rows of one side; refusals are in the result, nothing is raised for a row."""
    part = renderer.render_part(conversations)
    return locate_tokens(renderer.side, part, renderer.side.adapter.encode_flat(texts_of(part)))


def documents_of(part: LocatedPart) -> list[RenderedChatDocument]:
    """The rows as documents. Raises the first row's RowRefused, if any row is refused or was left out."""
    for refusal in part.refusals:
        if refusal is not None:
            raise refusal
    return [_document(part, row) for row in range(len(part.chats))]


def render_document(renderer: ChatRenderer, conversation: Conversation) -> RenderedChatDocument:
    """One conversation for one side. Raises RowRefused."""
    return documents_of(locate_conversations(renderer, [conversation]))[0]


def _document(part: LocatedPart, row: int) -> RenderedChatDocument:
    chat = part.chats[row]
    if chat is None:
        raise ValueError(f"row {row} was left out of this part: it has no rendering")
    own = slice(int(part.tokens.offsets[row]), int(part.tokens.offsets[row + 1]))
    data = part.text.data[row]
    start, end = (len(data[:place].decode()) for place in chat.content)
    eot = int(part.eot_index[row])
    return RenderedChatDocument(
        text=chat.text,
        input_ids=part.tokens.ids[own],
        assistant_mask=part.token_mask[own],
        content_span=(start, end),
        end_of_turn_index=eot if eot >= 0 else None,
        regions=part.regions[row],
        reasoning=chat.reasoning,
        byte_spans=np.stack([part.text.starts[own], part.text.ends[own]], axis=1),
    )
