"""Chunks over the final turns: borders, blanks, regions, literals, subsets."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.unit.chat import support
from tests.unit.chat.support import NATIVE, assistant, bundled_template, locate, renderer, talk, user
from xtok.chat import ChatAlignment, ChatOptions, LocatedPart, align_chats, locate_conversations

NAMES = ("reasoning", "close", "answer", "eot")


def text_of(part: LocatedPart, chunk_id: np.ndarray, chunk: int) -> str:
    return part.side.adapter.decode(part.tokens.ids[chunk_id == chunk])


def chunks(student: LocatedPart, teacher: LocatedPart, aligned: ChatAlignment) -> list[tuple[str, str]]:
    """(student text, teacher text) of every chunk of a one-row part, by the tokenizers' own decoders."""
    flat = aligned.flat
    return [
        (text_of(student, flat.student_chunk_id, chunk), text_of(teacher, flat.teacher_chunk_id, chunk))
        for chunk in range(int(flat.num_chunks[0]))
    ]


def native_pair(final: dict[str, Any], regions: tuple[str, ...] | None = None, **more: Any) -> tuple[LocatedPart, LocatedPart]:
    options = ChatOptions(True, True, regions)  # type: ignore[arg-type]
    row = talk(user("q"), final)
    student = locate(renderer(bundled_template("chatml"), options=options), row)
    teacher = locate(
        renderer(more.get("template", bundled_template("chatml_plain")), of="unigram_nfkc", name="teacher=0", options=options),
        row,
    )
    return student, teacher


def test_whole_content_and_end_of_turn_are_aligned() -> None:
    row = talk(user("The door is open."), assistant("The door is open."))
    student, teacher = locate(renderer(), row), locate(renderer(None, of="spm_bpe", name="teacher=0"), row)
    aligned = align_chats(student, teacher)
    found = chunks(student, teacher, aligned)
    assert found[-1] == ("<|im_end|>", "</s>")
    assert "".join(left for left, _ in found[:-1]) == "The door is open."
    assert all(left.strip() == right.strip() for left, right in found[:-1])
    assert aligned.flat.pair_is_correct.all()
    # Everything supervised is in a chunk, nothing else is.
    assert np.array_equal(aligned.flat.student_chunk_id >= 0, student.token_mask)
    assert np.array_equal(aligned.flat.teacher_chunk_id >= 0, teacher.token_mask)


def test_a_start_border_token_takes_part_and_an_end_border_token_does_not() -> None:
    # A SentencePiece tokenizer begins the answer with the template's blank; a template puts a newline behind the content.
    row = talk(user("q"), assistant("answer"))
    teacher = locate(renderer(None, of="spm_bpe", name="teacher=0"), row)
    first = int(np.flatnonzero(teacher.token_mask)[0])
    chat = teacher.chats[0]
    assert chat is not None
    if teacher.text.starts[first] < chat.content[0]:
        student = locate(renderer(), row)
        assert align_chats(student, teacher).flat.teacher_chunk_id[first] == 0
    newline = support.PLAIN.replace("{{ '<|im_end|>\\n' }}", "{{ '\\n<|im_end|>\\n' }}")
    dotted = talk(user("q"), assistant("Yes.\n\nNo."))
    student, teacher = locate(renderer(newline), dotted), locate(renderer(None, of="spm_bpe", name="teacher=0"), dotted)
    end = student.chats[0].content[1]  # type: ignore[union-attr]
    crossing = np.flatnonzero((student.text.starts < end) & (student.text.ends > end))
    aligned = align_chats(student, teacher)
    assert (aligned.flat.student_chunk_id[crossing] == -1).all()
    assert student.token_mask[crossing].all()
    assert chunks(student, teacher, aligned)[-1] == ("<|im_end|>", "</s>")


@pytest.mark.parametrize("content", [" \n answer", "answer \n", "\n\nanswer\n\n", "\u3000answer\u00a0"])
@pytest.mark.parametrize(("left", "right"), [("PLAIN", "TRIMS"), ("TRIMS", "PLAIN"), ("PLAIN", "PLAIN")])
def test_outer_blanks_that_one_side_trims_are_left_out(content: str, left: str, right: str) -> None:
    row = talk(user("q"), assistant(content))
    student = locate(renderer(getattr(support, left)), row)
    teacher = locate(renderer(getattr(support, right), of="unigram_nfkc", name="teacher=0"), row)
    aligned = align_chats(student, teacher)
    found = chunks(student, teacher, aligned)
    assert "answer" in "".join(text for text, _ in found)
    assert all(one.strip() == other.strip() for one, other in found)
    assert found[-1] == ("<|im_end|>", "<|im_end|>")


def test_without_an_end_mark_on_one_side_there_is_no_such_pair() -> None:
    row = talk(user("q"), assistant("answer"))
    student, teacher = locate(renderer(support.NO_END_MARK), row), locate(renderer(of="unigram_nfkc", name="teacher=0"), row)
    assert all(left.strip() for left, _ in chunks(student, teacher, align_chats(student, teacher)))
    assert "<|im_end|>" not in "".join(right for _, right in chunks(student, teacher, align_chats(student, teacher)))


def test_dropping_the_first_chunk_keeps_the_end_of_turn_and_the_mask() -> None:
    for content in ("The door is open.", "4"):
        row = talk(user("q"), assistant(content))
        student, teacher = locate(renderer(), row), locate(renderer(None, of="spm_bpe", name="teacher=0"), row)
        whole = chunks(student, teacher, align_chats(student, teacher))
        dropped = align_chats(student, teacher, drop_first_chunk=True)
        assert chunks(student, teacher, dropped) == whole[1:]
        assert dropped.flat.student_chunk_id.max() == len(whole) - 2


def test_dropping_the_first_chunk_never_drops_a_lone_end_of_turn() -> None:
    # WordPiece knows no such characters: its content is one unknown token, left without a pair.
    row = talk(user("q"), assistant("answer"))
    student, teacher = locate(renderer(), row), locate(renderer(of="unigram_nfkc", name="teacher=0"), row)
    only_end = ChatOptions(True, True, ("eot",))
    student = locate(renderer(bundled_template("chatml"), options=only_end), row)
    teacher = locate(renderer(bundled_template("chatml"), of="unigram_nfkc", name="teacher=0", options=only_end), row)
    aligned = align_chats(student, teacher, drop_first_chunk=True)
    assert chunks(student, teacher, aligned) == [("<|im_end|>", "<|im_end|>")]


def test_native_regions_never_share_a_chunk() -> None:
    student, teacher = native_pair(assistant("Yes, it is.", reasoning_content="Hm, it is so."))
    aligned = align_chats(student, teacher)
    for part, ids in ((student, aligned.flat.student_chunk_id), (teacher, aligned.flat.teacher_chunk_id)):
        owners: dict[int, set[str]] = {}
        for region in part.regions[0]:
            for chunk in ids[region.start : region.end].tolist():
                owners.setdefault(chunk, set()).add(region.name)
        owners.pop(-1, None)
        assert all(len(names) == 1 for names in owners.values())
        assert set().union(*owners.values()) == set(NAMES)


@pytest.mark.parametrize("subset", [s for n in range(1, 5) for s in combinations(NAMES, n)])
def test_every_subset_of_regions(subset: tuple[str, ...]) -> None:
    final = assistant("Yes, it is.", reasoning_content="Hm, it is so.")
    student, teacher = native_pair(final)
    whole = align_chats(student, teacher).flat
    limited_student, limited_teacher = native_pair(final, subset)
    limited = align_chats(limited_student, limited_teacher).flat
    kept = np.zeros(len(whole.student_chunk_id), dtype=bool)
    for region in student.regions[0]:
        kept[region.start : region.end] = region.name in subset
    expected = np.where(kept, whole.student_chunk_id, -1)
    numbers = {chunk: place for place, chunk in enumerate(dict.fromkeys(expected[expected >= 0].tolist()))}
    assert limited.student_chunk_id.tolist() == [numbers.get(chunk, -1) for chunk in expected.tolist()]
    assert np.array_equal(limited_student.token_mask, student.token_mask)  # the loss keeps every region
    assert limited.num_chunks.tolist() == [len(numbers)]


@pytest.mark.parametrize("value", [True, False, None])
def test_a_bare_literal_spelled_differently_leaves_kd_only(value: Any) -> None:
    arguments = {"label": "true or None", "repeat": value, "minutes": 3}
    student, teacher = native_pair(assistant("ok", tool_calls=[{"name": "set_timer", "arguments": arguments}]))
    aligned = align_chats(student, teacher)
    assert aligned.refusals == [None]
    assert student.token_mask[student.regions[0][0].start : student.regions[0][0].end].all()
    data, (start, end) = student.text.data[0], student.chats[0].content  # type: ignore[union-attr]
    word = {True: b"true", False: b"false", None: b"null"}[value]
    place = data.rindex(b'"repeat": ', start, end) + len(b'"repeat": ')
    assert data[place:].startswith(word)
    touching = (student.text.starts < place + len(word)) & (student.text.ends > place)
    assert (aligned.flat.student_chunk_id[touching] == -1).all()
    others = student.token_mask & ~touching
    assert (aligned.flat.student_chunk_id[others] >= 0).mean() > 0.8
    for left, right in chunks(student, teacher, aligned):
        assert left.strip() == right.strip()


def test_without_differing_literals_tool_calls_are_aligned_whole() -> None:
    student, teacher = native_pair(assistant("ok", tool_calls=[{"name": "f", "arguments": {"label": "true", "n": 3}}]))
    aligned = align_chats(student, teacher)
    assert np.array_equal(aligned.flat.student_chunk_id >= 0, student.token_mask)


def test_other_blanks_before_the_tool_calls_are_left_out() -> None:
    template = bundled_template("chatml").replace("{{- '\\n' }}", "{{- '\\n\\n' }}")
    student, teacher = native_pair(assistant("ok.", tool_calls=[{"name": "f", "arguments": {"n": 3}}]), template=template)
    aligned = align_chats(student, teacher)
    assert aligned.refusals == [None]
    joined = "".join(left for left, _ in chunks(student, teacher, aligned))
    assert "ok" in joined
    assert '{"name": "f", "arguments": {"n": 3}}\n</tool_call>' in joined


def test_a_pair_that_does_not_fit_is_refused_for_the_teacher() -> None:
    calls = [{"name": "f", "arguments": {"n": 3}}]
    other = bundled_template("chatml").replace('{"name": ', '{"function": ')
    student, teacher = native_pair(assistant("ok", tool_calls=calls), template=other)
    aligned = align_chats(student, teacher)
    refusal = aligned.refusals[0]
    assert refusal is not None
    assert (refusal.reason, refusal.stage, refusal.side) == ("region_mismatch", "align", "teacher=0")
    assert aligned.flat.num_chunks.tolist() == [0]
    assert (aligned.flat.student_chunk_id == -1).all()


def test_rows_refused_on_either_side_have_no_chunks() -> None:
    rows = [talk(user("q"), assistant("a")), talk(user("</s>"), assistant("b")), talk(user("<|im_end|>"), assistant("c")), None]
    student = locate_conversations(renderer(), rows)
    teacher = locate_conversations(renderer(None, of="spm_bpe", name="teacher=0"), rows)
    aligned = align_chats(student, teacher)
    assert (aligned.flat.num_chunks > 0).tolist() == [True, False, False, False]
    assert aligned.refusals == [None] * 4
    with pytest.raises(ValueError, match="4 rows"):
        align_chats(student, locate(renderer(name="teacher=0"), rows[0]))  # type: ignore[arg-type]


def test_a_part_without_chunks() -> None:
    empty = locate_conversations(renderer(), [])
    assert align_chats(empty, empty).flat.num_chunks.tolist() == []
    nothing = locate_conversations(renderer(), [talk(user("q"))])
    assert align_chats(nothing, nothing).flat.num_chunks.tolist() == [0]


def test_a_normalizing_tokenizer_takes_the_offset_route_for_what_it_changes() -> None:
    rows = [talk(user("q"), assistant("ﬁne ½ ①")), talk(user("ﬁne"), assistant("plain")), talk(user("q"), assistant("plain"))]
    student = locate_conversations(renderer(options=NATIVE), rows)
    teacher = locate_conversations(renderer(of="unigram_nfkc", name="teacher=0", options=NATIVE), rows)
    aligned = align_chats(student, teacher)
    assert teacher.text.by_bytes.tolist() == [False, False, True]
    # The second row is changed in its context only: its final turn verifies by its bytes.
    assert aligned.flat.route.tolist() == [1, 0, 0]
    covered = aligned.flat.student_chunk_id[student.token_mask] >= 0
    assert covered.all()
