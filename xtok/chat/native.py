"""Native ChatML (Qwen, Nemotron-Nano): the final turn's regions, read off delimiters that no message may hold.

    <|im_start|>assistant\\n <think> reasoning </think> answer: content, tool calls <|im_end|>

Blanks between the parts are the template's. The last `<|im_start|>assistant` is the final turn because every message is checked
for delimiters, and because the rendering has exactly one such mark per assistant message. Each region must hold the source's own
text; what is missing, changed or laid out otherwise is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from schemas.tables import RejectReason
from xtok.chat.conversation import Conversation, strings_of
from xtok.chat.rendered import ANSWER, RegionSpan, RenderedChat, first_visible
from xtok.chat.side import ChatSide
from xtok.chat.structure import CLOSE, OPEN, THINK_BLOCK

__all__ = ["TURN_END", "TURN_START", "render_native"]

TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
_ASSISTANT: Final = TURN_START + "assistant\n"
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _FinalTurn:
    """The source's final turn: reasoning and content without outer blanks ("" = none), names of its tool calls."""

    reasoning: str
    content: str
    calls: tuple[str, ...]

    @classmethod
    def of(cls, final: dict[str, Any]) -> _FinalTurn:
        block = THINK_BLOCK.match(final["content"])
        content = final["content"][block.end() :] if block else final["content"]
        reasoning = final.get("reasoning_content") or (block[1] if block else "")
        calls = tuple(call["function"]["name"] for call in final.get("tool_calls", ()))
        return cls(reasoning.strip(), content.strip(), calls)

    def message(self, final: dict[str, Any]) -> dict[str, Any]:
        """The final message with its reasoning in a field of its own, as native templates read it."""
        rest = {key: value for key, value in final.items() if key not in ("reasoning_content", "thinking")}
        rest["content"] = self.content
        return {**rest, "reasoning_content": self.reasoning, "thinking": self.reasoning} if self.reasoning else rest


def render_native(side: ChatSide, conversation: Conversation) -> RenderedChat:
    """Render for `side` and place reasoning, close, answer and eot. Raises RowRefused; never guesses."""
    turn = _FinalTurn.of(conversation.final)
    if not turn.content and not turn.calls:
        side.refuse(RejectReason.EMPTY_FINAL_CONTENT, "the final assistant message has neither visible content nor tool calls")
    _check_delimiters(side, conversation, turn)
    side.check_marks(conversation)
    text = side.render(side.shape([*conversation.messages[:-1], turn.message(conversation.final)]), conversation)
    start, end = _turn_body(side, conversation, text)
    spans = []
    answer_from = _after_think_block(side, turn, text, start, end)
    if turn.reasoning:
        close = text.rindex(CLOSE, start, answer_from)
        first = first_visible(text, text.index(OPEN, start) + len(OPEN))
        spans = [RegionSpan("reasoning", first, first + len(turn.reasoning)), RegionSpan("close", close, close + len(CLOSE))]
    answer, calls_start = _answer(side, turn, text, answer_from, end)
    return RenderedChat.of_characters(
        text, (*spans, answer), end, separate=True, calls_start=calls_start, reasoning="shown" if turn.reasoning else "none"
    )


def _check_delimiters(side: ChatSide, conversation: Conversation, turn: _FinalTurn) -> None:
    found = [mark for mark in (TURN_START, TURN_END) if mark in conversation.text]
    for where, text in strings_of(conversation) if found else ():
        for mark in found:
            if mark in text:
                side.refuse(RejectReason.LITERAL_DELIMITER, f"{where} holds the ChatML delimiter {mark!r}")
    for name, text in (("reasoning", turn.reasoning), ("answer", turn.content)):
        for mark in (OPEN, CLOSE):
            if mark in text:
                side.refuse(RejectReason.LITERAL_DELIMITER, f"the final turn's {name} holds the delimiter {mark!r}")


def _turn_body(side: ChatSide, conversation: Conversation, text: str) -> tuple[int, int]:
    """Characters between the final turn's opening and its `<|im_end|>`."""
    turns = sum(message["role"] == "assistant" for message in conversation.messages)
    start = text.rfind(_ASSISTANT)
    end = text.rfind(TURN_END)
    is_last = start == text.rfind(TURN_START) and end == text.find(TURN_END, start)
    if start < 0 or end < start or not is_last or text.count(_ASSISTANT) != turns:
        side.refuse(
            RejectReason.UNKNOWN_LAYOUT,
            f"the {side.name} template does not write ChatML turns ({TURN_START}assistant ... {TURN_END}), "
            f"one per assistant message ({text.count(_ASSISTANT)} for {turns})",
        )
    if first_visible(text, end + len(TURN_END)) >= 0:
        side.refuse(RejectReason.UNKNOWN_LAYOUT, f"text follows the final {TURN_END}: {text[end + len(TURN_END) :][:40]!r}")
    return start + len(_ASSISTANT), end


def _after_think_block(side: ChatSide, turn: _FinalTurn, text: str, start: int, end: int) -> int:
    """Where the answer part begins: behind the think block, which must hold the source's reasoning, or be empty for none."""
    at = first_visible(text, start)
    if not text.startswith(OPEN, at):
        if turn.reasoning:
            side.refuse(RejectReason.DROPPED_REASONING, f"the {side.name} template drops the final turn's reasoning")
        return start
    close = text.find(CLOSE, at, end)
    if close < 0:
        side.refuse(RejectReason.UNKNOWN_LAYOUT, f"the final turn opens {OPEN} and does not close it")
    shown = text[at + len(OPEN) : close].strip()
    if shown != turn.reasoning:
        reason = RejectReason.DROPPED_REASONING if not shown else RejectReason.REGION_MISMATCH
        side.refuse(reason, f"the rendered reasoning is {_short(shown)}, the source's {_short(turn.reasoning)}")
    return close + len(CLOSE)


def _answer(side: ChatSide, turn: _FinalTurn, text: str, start: int, end: int) -> tuple[RegionSpan, int]:
    """The answer region, content through the last tool call, and where its tool calls begin (-1 without any)."""
    first = first_visible(text, start)
    last = start + len(text[start:end].rstrip())
    if not start <= first < last:
        side.refuse(RejectReason.REGION_MISMATCH, f"the {side.name} template writes no answer in the final turn")
    if not text.startswith(turn.content, first):
        shown = _short(text[first:last])
        side.refuse(RejectReason.REGION_MISMATCH, f"the rendered answer begins {shown}, not {_short(turn.content)}")
    calls_start = first_visible(text, first + len(turn.content))
    rest = text[first + len(turn.content) : last].strip()
    if not turn.calls:
        if rest:
            side.refuse(RejectReason.REGION_MISMATCH, f"the template adds text to the final answer: {_short(rest)}")
        return RegionSpan(ANSWER, first, last), -1
    blocks = _CALL.findall(rest)
    if len(blocks) != len(turn.calls) or _CALL.sub("", rest).strip() or not rest.endswith("</tool_call>"):
        side.refuse(
            RejectReason.REGION_MISMATCH,
            f"the {side.name} template shows {len(blocks)} <tool_call> blocks for {len(turn.calls)} calls: {_short(rest)}",
        )
    for name, block in zip(turn.calls, blocks, strict=True):
        if name not in block:
            side.refuse(RejectReason.REGION_MISMATCH, f"the tool call {name!r} is not the one rendered: {_short(block)}")
    return RegionSpan(ANSWER, first, last), calls_start


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
