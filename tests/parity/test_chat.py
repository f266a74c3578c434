"""Chat masks and chunks against the slow reading, over random conversations and random ChatML-like templates."""

from __future__ import annotations

from datetime import date

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.tables import RejectReason
from tests.parity.chat_reference import slow_chunks, slow_turn
from tests.unit.chat.support import BUNDLED, bundled_template, tokenizer
from xtok.chat import (
    ChatAlignment,
    ChatOptions,
    ChatRenderer,
    ChatSide,
    Conversation,
    LocatedPart,
    align_chats,
    conversation_from_row,
    locate_conversations,
    render_document,
)
from xtok.errors import RowRefused

SIDES = {
    "chatml_bpe": bundled_template("chatml"),
    "spm_bpe": bundled_template("instruct"),
    "unigram_nfkc": bundled_template("chatml_plain"),
    "wordpiece_lower": bundled_template("chatml"),
}


def bundled_chats() -> list[Conversation]:
    return [conversation_from_row(orjson.loads(line)) for line in (BUNDLED / "chats.jsonl").read_bytes().splitlines()]


def located(of: str, template: str, rows: list[Conversation], name: str = "student", **options: object) -> LocatedPart:
    side = ChatSide(tokenizer(of), name=name, render_date=date(2025, 1, 2), template=template, **options)  # type: ignore[arg-type]
    return locate_conversations(ChatRenderer(side), rows)


def answer_of(conversation: Conversation) -> str:
    content = str(conversation.final["content"])
    return (
        content.partition("</think>")[2].lstrip() if content.lstrip().startswith("<think>") and "</think>" in content else content
    )


def end_mark(part: LocatedPart) -> str:
    """What the side's template writes behind the final content."""
    if part.side.renderer.reference.source == part.side.adapter.chat_template:
        return part.side.adapter.special_tokens["eos_token"]
    return "<|im_end|>"


def shown_by(part: LocatedPart, conversation: Conversation) -> str:
    """The answer with the outer blanks the side's template keeps."""
    answer = answer_of(conversation)
    source = part.side.renderer.reference.source
    return answer.strip() if ".strip()" in source or "| trim" in source else answer


def check_masks(part: LocatedPart, rows: list[Conversation]) -> int:
    """Compare every accepted row with the slow reading; returns how many rows it could read."""
    num_read = 0
    for row, conversation in enumerate(rows):
        chat = part.chats[row]
        if part.refusals[row] is not None or chat is None:
            continue
        own = slice(int(part.tokens.offsets[row]), int(part.tokens.offsets[row + 1]))
        slow = slow_turn(
            part.side.adapter, chat.text, shown_by(part, conversation), part.tokens.ids[own].tolist(), end_mark(part)
        )
        if slow is None:
            assert part.side.adapter.prefix_space != "never" or not part.text.by_bytes[row]
            continue
        num_read += 1
        expected = np.zeros(own.stop - own.start, dtype=bool)
        expected[slow.supervised] = True
        if slow.eot is not None:
            expected[slow.eot] = True
        assert part.token_mask[own].tolist() == expected.tolist()
        assert part.eot_index[row] == (-1 if slow.eot is None else slow.eot)
    return num_read


def check_chunks(student: LocatedPart, teacher: LocatedPart, aligned: ChatAlignment, rows: list[Conversation]) -> int:
    """Compare every row both sides accept and both spell byte by byte; returns how many there were."""
    num_read = 0
    for row, conversation in enumerate(rows):
        if any(side.refusals[row] is not None for side in (student, teacher)):
            assert aligned.flat.num_chunks[row] == 0
            continue
        slow, found = [], []
        for side, chunk_id in ((student, aligned.flat.student_chunk_id), (teacher, aligned.flat.teacher_chunk_id)):
            own = slice(int(side.tokens.offsets[row]), int(side.tokens.offsets[row + 1]))
            text = side.chats[row].text  # type: ignore[union-attr]
            slow.append(
                slow_turn(side.side.adapter, text, shown_by(side, conversation), side.tokens.ids[own].tolist(), end_mark(side))
            )
            found.append({index: chunk for index, chunk in enumerate(chunk_id[own].tolist()) if chunk >= 0})
        if slow[0] is None or slow[1] is None:
            continue
        num_read += 1
        expected = slow_chunks(slow[0], slow[1])
        assert (found[0], found[1], int(aligned.flat.num_chunks[row])) == expected
    return num_read


@pytest.mark.parametrize("of", SIDES)
def test_bundled_chats_masks(of: str) -> None:
    rows = bundled_chats()
    part = located(of, SIDES[of], rows)
    if of == "chatml_bpe":
        assert check_masks(part, rows) >= 50
    else:
        check_masks(part, rows)


@pytest.mark.parametrize("teacher", SIDES)
def test_bundled_chats_chunks(teacher: str) -> None:
    rows = bundled_chats()
    parts = located("chatml_bpe", SIDES["chatml_bpe"], rows), located(teacher, SIDES[teacher], rows, "teacher=0")
    num_read = check_chunks(*parts, align_chats(*parts), rows)
    assert num_read >= (50 if teacher == "chatml_bpe" else 0)


def test_one_at_a_time_equals_the_whole_part() -> None:
    rows = bundled_chats()
    for of, template in SIDES.items():
        part = located(of, template, rows)
        renderer = ChatRenderer(ChatSide(tokenizer(of), name="student", render_date=date(2025, 1, 2), template=template))
        for row, conversation in enumerate(rows):
            own = slice(int(part.tokens.offsets[row]), int(part.tokens.offsets[row + 1]))
            refusal = part.refusals[row]
            if refusal is not None:
                with pytest.raises(RowRefused) as caught:
                    render_document(renderer, conversation)
                assert str(caught.value) == str(refusal)
                continue
            document = render_document(renderer, conversation)
            assert document.input_ids.tolist() == part.tokens.ids[own].tolist()
            assert document.assistant_mask.tolist() == part.token_mask[own].tolist()
            assert (document.end_of_turn_index if document.end_of_turn_index is not None else -1) == part.eot_index[row]
            assert document.regions == part.regions[row]
            start, end = document.content_span
            assert document.text[start:end].strip() == answer_of(conversation).strip()
            assert document.offsets.shape == (len(document.input_ids), 2)


PIECES = [*"ab .,\n\t<>/|", "\u00e9", "e\u0301", "\u4e2d", "\u05d0", "\U0001f600", "\u3000", "\u00a0", "\ufb01"]
PIECES += ["think", "</think>", "<think>", "[INST]"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
HEADS = st.sampled_from(
    ["<|im_start|>{}\n", "<|im_start|>{}\n\n", "<|im_start|>{} ", "<|im_start|>{}\n<think>\n\n</think>\n\n", "[{}] ", "{}: "]
)
TAILS = st.sampled_from(["<|im_end|>\n", "\n<|im_end|>\n", "<|im_end|>", " <|im_end|>", "\n", "", "\n### "])
FILTERS = st.sampled_from(
    ["", " | trim", ".lstrip('\\n')", ".rstrip()", " | upper", ".replace('a', 'b')", ".split('</think>')[-1]"]
)


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A ChatML-like template: a head and a tail around each content, which may be trimmed or rewritten, and perhaps a dropped turn."""
    head, tail, content_filter = draw(HEADS), draw(TAILS), draw(FILTERS)
    before, after = head.replace("\n", "\\n").split("{}")
    body = f"{{{{ '{before}' + m.role + '{after}' }}}}{{{{ (m.content{content_filter}) }}}}{{{{ '{tail}' }}}}".replace(
        "\n", "\\n"
    )
    loop = draw(st.sampled_from(["messages", "messages", "messages", "messages[-2:]", "messages[:-1]"]))
    return "{% for m in " + loop + " %}" + body + "{% endfor %}"


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """A few turns that like to repeat each other."""
    pool = draw(st.lists(TEXT, min_size=1, max_size=4))
    pick = st.sampled_from(pool)
    messages = []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(pick)}, {"role": "assistant", "content": draw(pick)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(pick)})
    return conversation_from_row({"messages": messages})


@settings(max_examples=150, deadline=None)
@given(templates(), templates(), st.lists(conversations(), min_size=1, max_size=6), st.sampled_from(sorted(SIDES)))
def test_random_templates_and_conversations(ours: str, theirs: str, rows: list[Conversation], teacher: str) -> None:
    parts = located("chatml_bpe", ours, rows), located(teacher, theirs, rows, "teacher=0")
    for part in parts:
        for row, conversation in enumerate(rows):
            refusal, chat = part.refusals[row], part.chats[row]
            if refusal is not None:
                assert refusal.reason in set(RejectReason)
                continue
            assert chat is not None
            start, end = chat.content
            shown = part.text.data[row][start:end].decode()
            assert shown.strip() == answer_of(conversation).strip() != ""
            if not part.text.by_bytes[row]:
                continue  # spans have holes
            # Only blanks, or nothing, may stand beside the content in the tokens that are supervised.
            own = slice(int(part.tokens.offsets[row]), int(part.tokens.offsets[row + 1]))
            mask = part.token_mask[own].copy()
            if part.eot_index[row] >= 0:
                mask[part.eot_index[row]] = False
            tokens = np.flatnonzero(mask)
            low, high = part.text.starts[own][tokens].min(), part.text.ends[own][tokens].max()
            assert part.text.data[row][low:high].decode(errors="replace").strip() == shown.strip()
    aligned = align_chats(*parts)
    for row in range(len(rows)):
        for side, chunk_id in ((parts[0], aligned.flat.student_chunk_id), (parts[1], aligned.flat.teacher_chunk_id)):
            own = slice(int(side.tokens.offsets[row]), int(side.tokens.offsets[row + 1]))
            held = chunk_id[own][chunk_id[own] >= 0]
            assert (np.diff(held) >= 0).all()
            assert set(held.tolist()) == set(range(int(aligned.flat.num_chunks[row])))
            assert side.token_mask[own][chunk_id[own] >= 0].all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(conversations(), min_size=1, max_size=6),
    st.sampled_from(["{}\n", "{}\n\n"]),
    st.sampled_from(["<|im_end|>\n", "\n<|im_end|>"]),
)
def test_random_conversations_against_the_slow_reading(rows: list[Conversation], after: str, tail: str) -> None:
    def source(filter: str) -> str:
        body = "{{ '<|im_start|>" + after.replace("{}", "' + m.role + '") + "' + m.content" + filter + " + '" + tail + "' }}"
        return "{% for m in messages %}" + body.replace("\n", "\\n") + "{% endfor %}"

    parts = located("chatml_bpe", source(""), rows), located("chatml_bpe", source(".strip()"), rows, "teacher=0")
    for part in parts:
        check_masks(part, rows)
    check_chunks(*parts, align_chats(*parts), rows)


@pytest.mark.parametrize("native", [False, True])
def test_a_cached_structure_changes_nothing(native: bool) -> None:
    rows = bundled_chats()
    options = ChatOptions(native, native)
    for of, template in SIDES.items():
        whole = located(of, template, rows, options=options)
        alone = [located(of, template, [row], options=options) for row in rows]
        assert whole.token_mask.tolist() == [flag for part in alone for flag in part.token_mask.tolist()]
        assert [str(refusal) for refusal in whole.refusals] == [str(part.refusals[0]) for part in alone]
