"""What is known of a template's final turn, per shape of conversation: saves the probe, never decides without a check."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from xtok.chat.conversation import Conversation

__all__ = ["Shape", "StructureCache", "shape_of"]

Shape = tuple[str, ...] | None
MAX_SHAPES = 4096
# What templates write around turns where they use no special token: <|Assistant|>, [/INST].
_MARK_LIKE = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]+\]")


def shape_of(conversation: Conversation) -> Shape:
    """The message shape a structure is remembered under, None for rows that are always probed.

    Rows with tools, tool calls, reasoning, think marks or arguments of their own are probed: their control flow has too many inputs.
    """
    if conversation.tools is not None or conversation.template_kwargs:
        return None
    for message in conversation.messages:
        if "tool_calls" in message or "reasoning_content" in message or "think>" in message["content"]:
            return None
    return tuple(message["role"] for message in conversation.messages)


@dataclass(slots=True)
class StructureCache:
    """Structures of one side. proof_every: one cached row in so many is probed all the same; a difference ends the cache's use.

    special_mark: matches the side's special tokens; None where there are none, or where messages may hold them.
    """

    special_mark: re.Pattern[str] | None
    proof_every: int = 200
    difference: str | None = None
    num_probed: int = 0
    num_cached: int = 0
    _known: dict[Shape, tuple[str, str]] = field(default_factory=dict)

    def find(self, shape: Shape, conversation: Conversation, text: str) -> tuple[int, int] | None:
        """Characters (start, end) of the final content where the known structure gives them for certain, else None.

        The rendering must end in head + content + suffix, outer blanks of the content aside, where head begins with a
        mark of turns that no message holds: so the content fills a turn of its own. No other message may end in the same text, or
        that turn could be its.
        """
        known = self._known.get(shape) if shape is not None and self.difference is None else None
        if known is None:
            return None
        head, suffix = known
        core = conversation.final["content"].strip()
        mark = head.strip()
        if mark in core or any(
            mark in message["content"] or message["content"].rstrip().endswith(core) for message in conversation.messages[:-1]
        ):
            return None
        for shown in dict.fromkeys((conversation.final["content"], core)):
            end = len(text) - len(suffix)
            start = end - len(shown)
            if text.endswith(suffix) and text.startswith(shown, max(start, 0)) and text.endswith(head, 0, max(start, 0)):
                self.num_cached += 1
                return start, end
        return None

    def must_prove(self, shape: Shape) -> bool:
        """Whether the row just found is due for the continuing proof."""
        return self.num_cached % self.proof_every == 0

    def learn(
        self,
        shape: Shape,
        conversation: Conversation,
        prefix: str,
        suffix: str,
        found: tuple[int, int] | None,
        place: tuple[int, int],
    ) -> None:
        """Take in what a probe showed; `found` is what the cache had said of the same row, if anything."""
        self.num_probed += 1
        if found is not None and found != place:
            self.difference = f"a cached structure placed the content at {found}, the probe at {place}"
            self._known.clear()
        if shape is None or self.difference is not None:
            return
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        before = conversation.messages[-2]["content"].strip() if len(conversation.messages) > 1 else ""
        for mark in (self.special_mark, _MARK_LIKE):
            starts = [match.start() for match in mark.finditer(prefix)] if mark else []
            if starts and not (before and before in prefix[starts[-1] :]):
                self._known[shape] = (prefix[starts[-1] :], suffix)
                return
