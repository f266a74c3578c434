"""Production tokenizers with their own templates, in every student and teacher role. XTOK_SHARED adds 677 real conversations."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.parity.test_chat import answer_of, check_chunks
from tests.unit.chat.support import BUNDLED
from tests.unit.chat.test_templates import fixed_day
from xtok.chat import (
    ChatOptions,
    ChatRenderer,
    ChatSide,
    Conversation,
    LocatedPart,
    align_chats,
    conversation_from_row,
    locate_conversations,
)
from xtok.chat.templates import TemplateFailure
from xtok.tokenizers import TokenizerAdapter, load_tokenizer

pytestmark = pytest.mark.slow

NAMES = ("qwen3", "llama3_2", "gpt_oss", "deepseek_v4")
DAY = date(2025, 1, 2)
# What a template that drops reasoning, or prints no reasoning field, may refuse; nothing else is refused of rows of plain text.
DROPS = {"deepseek_v4": {"dropped_reasoning"}, "llama3_2": {"dropped_reasoning"}}


@cache
def chats() -> list[Conversation]:
    files = [BUNDLED / "chats.jsonl"]
    if "XTOK_SHARED" in os.environ:
        files.append(Path(os.environ["XTOK_SHARED"]) / "data" / "chats.jsonl")
    return [conversation_from_row(orjson.loads(line)) for file in files for line in file.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def adapters(real_tokenizer_folder: Path) -> dict[str, TokenizerAdapter]:
    return {name: load_tokenizer(str(real_tokenizer_folder / name), backend="auto") for name in NAMES}


@pytest.fixture(scope="module")
def parts(adapters: dict[str, TokenizerAdapter]) -> dict[str, LocatedPart]:
    return {name: locate_conversations(ChatRenderer(side_of(adapter)), chats()) for name, adapter in adapters.items()}


def side_of(adapter: TokenizerAdapter, **more: Any) -> ChatSide:
    return ChatSide(adapter, name="student", render_date=DAY, **more)


@pytest.mark.parametrize("name", NAMES)
def test_supervised_tokens_decode_to_the_final_content(parts: dict[str, LocatedPart], name: str) -> None:
    part = parts[name]
    for row, conversation in enumerate(chats()):
        if part.refusals[row] is not None:
            continue
        own = slice(int(part.tokens.offsets[row]), int(part.tokens.offsets[row + 1]))
        ids, mask, end = part.tokens.ids[own], part.token_mask[own].copy(), int(part.eot_index[row])
        assert ids[end] == part.side.adapter.eos_token_id
        mask[end] = False
        decoded, wanted = part.side.adapter.decode(ids[mask]).strip(), answer_of(conversation).strip()
        if not part.text.by_bytes[row]:
            decoded, wanted = (unicodedata.normalize("NFC", text) for text in (decoded, wanted))
        assert decoded == wanted


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_plain_content_are_accepted(parts: dict[str, LocatedPart], name: str) -> None:
    reasons = Counter()
    for row, refusal in enumerate(parts[name].refusals):
        if refusal is not None and "tool_calls" not in chats()[row].final:
            reasons[refusal.reason] += 1
    assert set(reasons) <= DROPS.get(name, set())
    if name == "llama3_2":
        assert reasons["dropped_reasoning"] == sum("reasoning_content" in chat.final for chat in chats())


@pytest.mark.parametrize("student", NAMES)
@pytest.mark.parametrize("teacher", NAMES)
def test_chunks_equal_the_slow_reading(parts: dict[str, LocatedPart], student: str, teacher: str) -> None:
    pair = parts[student], parts[teacher]
    aligned = align_chats(*pair)
    assert aligned.flat.pair_is_correct.all()
    assert check_chunks(*pair, aligned, chats()) > 40
    accepted = [row for row in range(len(chats())) if not any(part.refusals[row] for part in pair)]
    covered = total = 0
    for row in accepted:
        own = slice(int(pair[0].tokens.offsets[row]), int(pair[0].tokens.offsets[row + 1]))
        total += int(pair[0].token_mask[own].sum())
        covered += int((aligned.flat.student_chunk_id[own][pair[0].token_mask[own]] >= 0).sum())
    assert covered >= 0.995 * total


@pytest.mark.parametrize("name", NAMES)
def test_rendering_is_transformers_and_minijinja_is_jinja(
    monkeypatch: pytest.MonkeyPatch, adapters: dict[str, TokenizerAdapter], name: str
) -> None:
    fixed_day(monkeypatch, DAY)
    side = side_of(adapters[name])
    assert side.renderer.name == "minijinja"
    tokenizer = side.adapter.transformers_tokenizer
    for chat in chats():
        messages = side.shape(chat.messages)
        texts: list[str | None] = []
        for engine in (side.renderer.reference, side.renderer._fast):
            assert engine is not None
            try:
                texts.append(engine.render(messages, chat.tools, {}))
            except TemplateFailure:
                texts.append(None)
        try:
            texts.append(str(tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=False)))
        except Exception:
            texts.append(None)
        assert texts[0] == texts[2]
        if not chat.by_reference:
            assert texts[0] == texts[1]


@pytest.mark.parametrize("name", NAMES)
def test_two_days_render_the_same(monkeypatch: pytest.MonkeyPatch, adapters: dict[str, TokenizerAdapter], name: str) -> None:
    texts = []
    for today in (date(2031, 3, 4), date(2032, 5, 6)):
        fixed_day(monkeypatch, today)
        part = ChatRenderer(side_of(adapters[name])).render_part(chats())
        texts.append([chat and chat.text for chat in part.chats])
    assert texts[0] == texts[1]


def test_native_regions_on_qwen3(adapters: dict[str, TokenizerAdapter]) -> None:
    options = ChatOptions(include_thinking_in_loss=True, native_thinking_alignment=True)
    part = locate_conversations(ChatRenderer(side_of(adapters["qwen3"], options=options)), chats())
    assert part.refusals == [None] * len(chats())
    for row, chat in enumerate(part.chats):
        assert chat is not None
        data, conversation = part.text.data[row], chats()[row]
        shown = {span.name: data[span.start : span.end].decode() for span in chat.spans}
        assert shown["answer"].startswith(answer_of(conversation).strip())
        assert shown["answer"].count("<tool_call>") == len(conversation.final.get("tool_calls", ()))
        content = conversation.final["content"]
        reasoning = conversation.final.get("reasoning_content") or content[: len(content) - len(answer_of(conversation))]
        assert shown.get("reasoning", "") == reasoning.replace("<think>", "").replace("</think>", "").strip()
