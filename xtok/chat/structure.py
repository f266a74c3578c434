"""Ordinary templates: the final content's place, found by structure and never by searching for the content.

The conversation is rendered as it is, and once more with the final content replaced by a probe, a text that it does not hold. What precedes
and follows the probe must be a prefix and a suffix of the real rendering; what remains between is the content, which may have lost
outer blanks and nothing else. A template that rewrites, repeats or drops the content fails this and the row is refused.

With an inline `<think>` block only the answer behind it is probed: a template may lay the block out anew and still give the answer a
certain place. A third rendering, with the reasoning replaced too, tells whether the template shows the reasoning at all.

Most rows of a dataset share a few shapes, and for these the probe would say the same again. `StructureCache` keeps, per shape, what
stands between the last special token and the content, and what follows. A row whose rendering ends in exactly that around its content
needs no probe. It is used only where nothing else in the row could fill that place: see `StructureCache.find`.
"""

from __future__ import annotations

import re
from typing import Any, Final

from schemas.tables import RejectReason
from xtok.chat.conversation import Conversation
from xtok.chat.rendered import ANSWER, RenderedChat, first_visible
from xtok.chat.side import ChatSide
from xtok.chat.structure_cache import StructureCache, shape_of
from xtok.errors import RowRefused

__all__ = ["CLOSE", "OPEN", "THINK_BLOCK", "render_ordinary"]

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
THINK_BLOCK: Final = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_PROBE: Final = "xtok\ue001{}\ue001probe"


def render_ordinary(side: ChatSide, conversation: Conversation, cache: StructureCache) -> RenderedChat:
    """Render for `side` and place the final answer. Raises RowRefused; never guesses."""
    content = conversation.final["content"]
    block = THINK_BLOCK.match(content)
    _check_final(side, conversation, content[block.end() :] if block else content)
    side.check_marks(conversation)
    text = side.render(side.shape(conversation.messages), conversation)
    field = conversation.final.get("reasoning_content")
    if side.options.include_thinking_in_loss and field is not None:
        side.refuse(
            RejectReason.NEEDS_NATIVE_ALIGNMENT,
            "a separate reasoning_content in the loss needs native_thinking_alignment (or put it inline as <think>...</think>)",
        )
    if block is None and field is None:
        return _place_plain(side, conversation, text, cache)
    return _place_behind_reasoning(side, conversation, text, block)


def _check_final(side: ChatSide, conversation: Conversation, answer: str) -> None:
    calls = "tool_calls" in conversation.final
    if not answer.strip():
        hint = "; a turn of tool calls alone needs native_thinking_alignment" if calls else ""
        side.refuse(RejectReason.EMPTY_FINAL_CONTENT, f"the final assistant message has no visible content{hint}")
    if calls:
        side.refuse(
            RejectReason.NEEDS_NATIVE_ALIGNMENT,
            "the final turn has content and tool calls, so its end is not the content's end; it needs native_thinking_alignment",
        )


def _place_plain(side: ChatSide, conversation: Conversation, text: str, cache: StructureCache) -> RenderedChat:
    content = conversation.final["content"]
    shape = shape_of(conversation)
    found = cache.find(shape, conversation, text)
    if found is None or cache.must_prove(shape):
        prefix, suffix = _probe(side, conversation, "")
        place = _fit(side, text, prefix, suffix, content, len(conversation.messages) - 1)
        cache.learn(shape, conversation, prefix, suffix, found, place)
        found = place
    return _rendered(text, *found)


def _place_behind_reasoning(side: ChatSide, conversation: Conversation, text: str, block: re.Match[str] | None) -> RenderedChat:
    content = conversation.final["content"]
    kept = content[: block.end()] if block else ""
    prefix, suffix = _probe(side, conversation, kept)
    start, end = _fit(side, text, prefix, suffix, content[len(kept) :], len(conversation.messages) - 1)
    shown = _reasoning_is_shown(side, conversation, block, prefix)
    in_loss = side.options.include_thinking_in_loss
    if not shown and (in_loss or not side.accept_dropped_reasoning):
        side.refuse(
            RejectReason.DROPPED_REASONING,
            f"the {side.name} template drops or changes the final turn's reasoning, so the model would judge the answer "
            + (
                "and its reasoning cannot be in the loss"
                if in_loss
                else "without it; set accept_dropped_reasoning to keep such rows"
            ),
        )
    state = "shown" if shown else "dropped"
    if not in_loss:
        return _rendered(text, start, end, reasoning=state)
    assert block is not None
    return _with_thinking(side, text, content, block, start, end)


def _with_thinking(side: ChatSide, text: str, content: str, block: re.Match[str], start: int, end: int) -> RenderedChat:
    """Reasoning, close and answer in the loss: the block must stand verbatim right before the answer."""
    opening = content.index(OPEN)
    verbatim = content[opening : block.end()]
    if not text.startswith(verbatim, start - len(verbatim)):
        side.refuse(
            RejectReason.REASONING_NOT_VERBATIM,
            f"the {side.name} template lays the <think> block out anew; with thinking in the loss it must stand verbatim: "
            "use native_thinking_alignment, or keep thinking outside the loss",
        )
    shift = start - block.end()
    close = block.end(1) + shift
    reasoning = first_visible(text, opening + len(OPEN) + shift)
    reasoning_end = max(reasoning, len(text[:close].rstrip()))
    spans = [("close", close, close + len(CLOSE)), (ANSWER, start, end)]
    if reasoning < close:
        spans.insert(0, ("reasoning", reasoning, reasoning_end))
    return RenderedChat.of_characters(text, spans, first_visible(text, end), reasoning="shown")


def _reasoning_is_shown(side: ChatSide, conversation: Conversation, block: re.Match[str] | None, prefix: str) -> bool:
    """Whether the rendering holds the reasoning at the place the template gives reasoning."""
    final = dict(conversation.final)
    field = final.get("reasoning_content")
    inline = block[1] if block else ""
    wanted = [text.strip() for text in (field or "", inline) if text.strip()]
    if not wanted:
        return True
    answer = _unused("answer", conversation)
    probes = []
    if field is not None:
        probes.append(_unused("reasoning", conversation))
        final["reasoning_content"] = final["thinking"] = probes[-1]
    if block is not None and inline.strip():
        probes.append(_unused("inline", conversation))
        head, tail = conversation.final["content"][: block.start(1)], conversation.final["content"][block.end(1) : block.end()]
        final["content"] = head + inline.replace(inline.strip(), probes[-1], 1) + tail + answer
    else:
        final["content"] = (block[0] if block else "") + answer
    try:
        rendered = side.render(side.shape([*conversation.messages[:-1], final]), conversation)
    except RowRefused:
        return False
    before = rendered.partition(answer)[0]
    return all(before.count(probe) == 1 for probe in probes) and all(text in prefix for text in wanted)


def _probe(side: ChatSide, conversation: Conversation, kept: str) -> tuple[str, str]:
    """What the template writes before and after a final content that is `kept` followed by the probe."""
    probe = _unused("answer", conversation)
    final: dict[str, Any] = {**conversation.final, "content": kept + probe}
    turn = len(conversation.messages) - 1
    try:
        rendered = side.render(side.shape([*conversation.messages[:-1], final]), conversation)
    except RowRefused as error:
        side.refuse(
            RejectReason.CONTENT_NOT_VERBATIM,
            f"the template accepts message {turn} but not another content in its place: {error.message}",
        )
    parts = rendered.split(probe)
    if len(parts) != 2:
        how = "drops or rewrites" if len(parts) == 1 else "repeats"
        side.refuse(RejectReason.CONTENT_NOT_VERBATIM, f"the {side.name} template {how} the content of message {turn}")
    return parts[0], parts[1]


def _unused(name: str, conversation: Conversation) -> str:
    """A probe that the conversation does not hold, whatever it holds."""
    probe = _PROBE.format(name)
    while probe in conversation.text:
        probe += "\ue001"
    return probe


def _fit(side: ChatSide, text: str, prefix: str, suffix: str, content: str, turn: int) -> tuple[int, int]:
    """Characters (start, end) of `content` in `text` between prefix and suffix; outer blanks may be gone."""
    start, end = len(prefix), len(text) - len(suffix)
    fits = start <= end and text.startswith(prefix) and text.endswith(suffix)
    shown = text[start:end] if fits else ""
    if not fits or shown not in content or shown.strip() != content.strip():
        side.refuse(
            RejectReason.CONTENT_NOT_VERBATIM,
            f"the {side.name} template changes the content of message {turn} (assistant) beyond its outer blanks",
        )
    return start, end


def _rendered(text: str, start: int, end: int, *, reasoning: str = "none") -> RenderedChat:
    return RenderedChat.of_characters(text, [(ANSWER, start, end)], first_visible(text, end), reasoning=reasoning)
