"""Sides, conversations and templates for the chat tests. The templates are written for these tests, each with one habit of the wild."""

from __future__ import annotations

from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from xtok.chat import ChatOptions, ChatRenderer, ChatSide, Conversation, LocatedPart, conversation_from_row, locate_conversations
from xtok.tokenizers import TokenizerAdapter, load_tokenizer

BUNDLED = Path(__file__).resolve().parents[3] / "infra" / "bundled"
DAY = date(2025, 1, 2)
NATIVE = ChatOptions(include_thinking_in_loss=True, native_thinking_alignment=True)


def _turns(body: str, loop: str = "for m in messages") -> str:
    """A ChatML template whose turns hold `body`; `m` is the message."""
    return "{% " + loop + " %}{{ '<|im_start|>' + m.role + '\\n' }}" + body + "{{ '<|im_end|>\\n' }}{% endfor %}"


PLAIN = _turns("{{ m.content }}")
TRIMS = _turns("{{ m.content | trim }}")
UPPER_CASE = _turns("{{ m.content | upper if m.role == 'assistant' else m.content }}")
REPEATS = _turns("{{ m.content }}{{ m.content if loop.last else '' }}")
DROPS_LAST = _turns("{{ m.content }}", "for m in messages[:-1]")
# As Qwen3: the last turn gets a think block, empty when there is no reasoning; the block is laid out anew.
THINKS = _turns(
    "{% set c = m.content %}{% set r = m.reasoning_content or '' %}"
    "{% if not r and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n' + r.strip() + '\\n</think>\\n\\n' }}{% endif %}{{ c.strip() }}"
)
# As R1: what was thought is dropped.
DROPS_REASONING = _turns("{{ m.content.split('</think>')[-1] }}")
# As Gemma: the system message goes into the first user turn.
MERGES_SYSTEM = "{% set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}" + _turns(
    "{{ (first if loop.first else '') + m.content }}", "for m in messages if m.role != 'system'"
)
CLOCK = "{{ strftime_now('%d %b %Y') + '\\n' }}" + PLAIN
NO_END_MARK = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '\\n' }}{% endfor %}"
# Marks glued to the content: some tokenizers join them with it.
GLUED = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
NO_DEVELOPER = _turns("{{ m.content }}", "for m in messages if m.role != 'developer'")
# As DeepSeek: arguments are joined as a string.
TEXT_ARGUMENTS = _turns(
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + c.function.arguments + '</tool_call>' }}{% endfor %}"
)
PARTS_ONLY = _turns("{% for part in m.content if part.text is defined %}{{ part.text }}{% endfor %}")


def user(content: Any) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": content, **more}


def talk(*messages: dict[str, Any], **row: Any) -> Conversation:
    """A canonical conversation."""
    return conversation_from_row({"messages": list(messages), **row})


@cache
def tokenizer(name: str = "chatml_bpe") -> TokenizerAdapter:
    """A bundled tokenizer."""
    return load_tokenizer(str(BUNDLED / "tokenizers" / name))


def bundled_template(name: str) -> str:
    """Text of a bundled template."""
    return (BUNDLED / "templates" / f"{name}.jinja").read_text()


def renderer(template: str | None = PLAIN, *, of: str = "chatml_bpe", name: str = "student", **options: Any) -> ChatRenderer:
    """A renderer over a bundled tokenizer."""
    return ChatRenderer(ChatSide(tokenizer(of), name=name, render_date=DAY, template=template, **options))


def locate(renderer: ChatRenderer, *conversations: Conversation) -> LocatedPart:
    """A located part; the first refusal is raised."""
    part = locate_conversations(renderer, conversations)
    for refusal in part.refusals:
        if refusal is not None:
            raise refusal
    return part


def supervised(part: LocatedPart, row: int = 0) -> tuple[str, str]:
    """(text of the supervised tokens but the end of turn, text of the end of turn)."""
    own = slice(int(part.tokens.offsets[row]), int(part.tokens.offsets[row + 1]))
    ids, mask = part.tokens.ids[own], part.token_mask[own].copy()
    end = int(part.eot_index[row])
    decode = part.side.adapter.decode
    if end < 0:
        return decode(ids[mask]), ""
    mask[end] = False
    return decode(ids[mask]), decode(ids[end : end + 1])
