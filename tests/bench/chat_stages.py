"""What each stage of a chat costs one core: reading, rendering, tokenizing, placing, aligning; plain Jinja and Hugging Face beside it.

In one process, CPU time. The whole pipeline, Parquet and all, is in `tests.bench.chat`, which takes its rows from here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from tests import real_tokenizers
from xtok.chat import (
    ChatRenderer,
    ChatSide,
    Conversation,
    LocatedPart,
    RenderedPart,
    align_chats,
    conversation_from_row,
    locate_tokens,
    texts_of,
)
from xtok.chat.templates import ReferenceRenderer, TemplateFailure
from xtok.tokenizers import FlatTokens, ProvenEncoder, load_tokenizer

NAME = "chat_stages"
DESCRIPTION = (
    "student Qwen3, teachers Llama 3.2 and gpt-oss: each stage in CPU microseconds a chat, Jinja and Hugging Face beside it"
)

NAMES = ("qwen3", "llama3_2", "gpt_oss")
DAY = date(2025, 1, 2)
MIN_ROWS = 600
ROUNDS = 2


def chat_rows(least: int) -> list[dict[str, Any]]:
    """At least so many rows, whole copies of the data. Each opens with another system message, so no cache of whole texts helps."""
    shared = os.environ.get("XTOK_SHARED")
    folder = Path(shared) / "data" if shared else Path(__file__).resolve().parents[2] / "infra" / "bundled"
    rows = [orjson.loads(line) for line in (folder / "chats.jsonl").read_bytes().splitlines()]
    copies = -(-least // len(rows))
    return [_with_system(row, f"You are assistant number {copy}.") for copy in range(copies) for row in rows]


def _with_system(row: dict[str, Any], text: str) -> dict[str, Any]:
    messages = conversation_from_row(row).messages
    if messages[0]["role"] in ("system", "developer"):
        messages = messages[1:]
    return {"messages": [{"role": "system", "content": text}, *messages], "tools": row.get("tools")}


def _timed(stages: dict[str, float], name: str, body: Callable[[], Any]) -> Any:
    began = time.process_time()
    result = body()
    stages[name] = stages.get(name, 0.0) + time.process_time() - began
    return result


class _Ours:
    """Our path, a renderer and a proven encoder a side, kept over the parts of a run as a worker keeps them."""

    def __init__(self, folder: Path, sample: list[Conversation]) -> None:
        adapters = [load_tokenizer(str(folder / name), backend="auto") for name in NAMES]
        names = ("student", "teacher=0", "teacher=1")
        self.renderers = [
            ChatRenderer(ChatSide(adapter, name=name, render_date=DAY)) for adapter, name in zip(adapters, names, strict=True)
        ]
        self.encoders = [ProvenEncoder(adapter) for adapter in adapters]
        for renderer in self.renderers:
            renderer.prove(sample)

    def run(self, rows: list[dict[str, Any]], stages: dict[str, float]) -> None:
        conversations = _timed(stages, "read", lambda: [conversation_from_row(row) for row in rows])
        parts: list[LocatedPart] = []
        for renderer, encoder in zip(self.renderers, self.encoders, strict=True):
            rendered: RenderedPart = _timed(stages, "render", lambda r=renderer: r.render_part(conversations))
            tokens: FlatTokens = _timed(stages, "encode", lambda e=encoder, r=rendered: e.encode_flat(texts_of(r)))
            parts.append(_timed(stages, "place", lambda s=renderer.side, r=rendered, t=tokens: locate_tokens(s, r, t)))
        for teacher in parts[1:]:
            _timed(stages, "align", lambda t=teacher: align_chats(parts[0], t))


class _Plain:
    """What every open pipeline does at the least: render each side with Jinja, encode it with Hugging Face."""

    def __init__(self, folder: Path) -> None:
        adapters = [load_tokenizer(str(folder / name)) for name in NAMES]
        self.sides = [
            (ReferenceRenderer(adapter.chat_template or "", render_date=DAY, special_tokens=adapter.special_tokens), adapter)
            for adapter in adapters
        ]

    def run(self, conversations: list[Conversation], stages: dict[str, float]) -> None:
        for renderer, adapter in self.sides:
            texts = _timed(
                stages, "render", lambda r=renderer: [render_plainly(r, conversation) for conversation in conversations]
            )
            _timed(stages, "encode", lambda a=adapter, t=texts: a.reference.encode_flat(t))


def render_plainly(renderer: ReferenceRenderer, conversation: Conversation) -> str:
    """The text, or "" where the template refuses the chat."""
    try:
        return renderer.render(conversation.messages, conversation.tools, conversation.template_kwargs)
    except TemplateFailure:
        return ""


def run() -> list[dict[str, Any]]:
    """Stages in CPU microseconds a chat; the best of ROUNDS interleaved rounds."""
    folder = real_tokenizers.build(real_tokenizers.default_folder())
    rows = chat_rows(MIN_ROWS)
    conversations = [conversation_from_row(row) for row in rows]
    ours, plain = _Ours(folder, conversations[:: len(conversations) // 50]), _Plain(folder)
    best: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        measured: tuple[dict[str, float], dict[str, float]] = ({}, {})
        ours.run(rows, measured[0])
        plain.run(conversations, measured[1])
        totals = [sum(stages.values()) for stages in measured]
        if not best or totals[0] / totals[1] < sum(best[0].values()) / sum(best[1].values()):
            best = list(measured)
    micro = 1e6 / len(rows)
    unit = "us/chat"
    figures = [
        {"metric": "all stages", "value": sum(best[0].values()) * micro, "baseline": sum(best[1].values()) * micro, "limit": None}
    ]
    for stage in ("read", "render", "encode", "place", "align"):
        base = best[1].get(stage)
        figures.append(
            {"metric": stage, "value": best[0][stage] * micro, "baseline": None if base is None else base * micro, "limit": None}
        )
    return [{**figure, "unit": unit} for figure in figures]
