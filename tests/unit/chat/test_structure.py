"""Ordinary templates: the traps. Every case gives exactly the final content, or a typed refusal."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.tables import RejectReason
from tests.unit.chat import support
from tests.unit.chat.support import assistant, bundled_template, locate, renderer, supervised, talk, user
from xtok.chat import ChatOptions, Conversation, locate_conversations, structure
from xtok.errors import ConfigError, RowRefused

ANSWER = "The door is open."
THINKING = ChatOptions(include_thinking_in_loss=True)
KEEPING = ("PLAIN", "TRIMS", "THINKS", "MERGES_SYSTEM", "CLOCK", "PARTS_ONLY")


def refusal(template: str | None, conversation: Conversation, **options: Any) -> RowRefused:
    with pytest.raises(RowRefused) as caught:
        locate(renderer(template, **options), conversation)
    assert caught.value.reason in set(RejectReason)
    return caught.value


@pytest.mark.parametrize("template", KEEPING)
@pytest.mark.parametrize(
    "messages",
    [
        [user(f"Say: {ANSWER}"), assistant(ANSWER)],
        [user(ANSWER), assistant(ANSWER)],
        [{"role": "system", "content": ANSWER}, user(ANSWER), assistant(ANSWER)],
        [user("q"), assistant(ANSWER), user("again"), assistant(ANSWER)],
        [user("q"), assistant(f"  \n{ANSWER} \n\n")],
        [user("q"), assistant("\u3000" + ANSWER + "\u00a0")],
        [user("q"), assistant("4")],
        [user("4"), assistant("4"), user("4"), assistant("4")],
        [user("q"), assistant("😀🎉👩‍👩‍👧")],
        [user("שאלה"), assistant("תשובה קצרה, ושנייה.")],
        [user("سؤال"), assistant("الجواب هو ٤٢.")],
        [user("q"), assistant("e\u0301 \u00e9 \u1e9b\u0323")],
        [user("q"), assistant("use <tool_call> and [INST] as words")],
        [user("q"), assistant("{{ messages }} {% raw %}")],
        [user("q"), assistant("a\r\nb\tc")],
    ],
)
def test_exactly_the_final_content_is_supervised(template: str, messages: list[dict[str, Any]]) -> None:
    part = locate(renderer(getattr(support, template)), talk(*messages))
    text, end = supervised(part)
    assert text.strip() == messages[-1]["content"].strip()
    assert end == "<|im_end|>"
    chat = part.chats[0]
    assert chat is not None
    data = part.text.data[0]
    start, stop = chat.content
    # Structure, not search: what follows the content is the template's end, so an earlier equal sentence was not taken.
    assert data[stop:] == b"<|im_end|>\n"
    assert data[start:stop].decode().strip() == messages[-1]["content"].strip()


@pytest.mark.parametrize("template", KEEPING)
def test_a_remembered_structure_places_as_the_probe_does(template: str) -> None:
    source = getattr(support, template)
    rows = [
        talk(user(question), assistant(answer))
        for question, answer in [
            ("a", "b"),
            ("b", "b"),
            ("x b", "b"),
            ("q", " b "),
            ("q", "b\n"),
            ("q", "answer"),
            ("Q", "an answer"),
        ]
    ]
    together = renderer(source)
    part = together.render_part(rows)
    alone = [renderer(source).render_row(row) for row in rows]
    assert part.chats == alone
    assert together.structures.num_cached > 0
    assert together.structures.num_probed < len(rows)


@pytest.mark.parametrize("template", ["PLAIN", "THINKS"])
def test_the_text_of_a_probe_is_text(template: str) -> None:
    held = "".join(structure._unused(name, talk(user("q"), assistant("a"))) for name in ("answer", "reasoning", "inline"))
    rows = [
        talk(user("q"), assistant("a")),
        talk(user("q"), assistant(held)),
        talk(user(held), assistant("a")),
        talk(user(held), assistant(f"<think>\n{held}\n</think>\n\n{held}b{held}")),
    ]
    together = renderer(getattr(support, template))
    part = together.render_part(rows)
    assert part.refusals == [None] * len(rows)
    assert part.chats == [renderer(getattr(support, template)).render_row(row) for row in rows]
    assert part.chats[3] is not None
    assert part.chats[3].reasoning == "shown"


def test_reasoning_may_stand_in_the_field_and_inline() -> None:
    shows_both = support.PLAIN.replace(
        "{{ m.content }}", "{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}{{ m.content }}"
    )
    both = talk(user("q"), assistant("<think>\ninline\n</think>\n\nyes", reasoning_content="apart"))
    part = locate(renderer(shows_both), both)
    assert supervised(part) == ("yes", "<|im_end|>")
    assert part.chats[0] is not None
    assert part.chats[0].reasoning == "shown"
    assert refusal(support.PLAIN, both).reason == "dropped_reasoning"


def test_a_cache_that_was_wrong_is_given_up_and_the_part_rendered_again() -> None:
    # The template says another thing after the tenth letter of the question: no shape can tell.
    odd = support.PLAIN.replace(
        "{{ m.content }}", "{{ m.content }}{{ '!' if loop.last and messages[0].content | length > 9 else '' }}"
    )
    rows = [talk(user("q"), assistant("a")), talk(user("a long question"), assistant("b")), talk(user("q"), assistant("c"))]
    part = renderer(odd, proof_every=1).render_part(rows)
    assert [chat and chat.text[chat.content[0] : chat.content[1]] for chat in part.chats] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("template", "messages", "reason", "words"),
    [
        ("PLAIN", [user("q")], "no_final_assistant", "'user'"),
        ("PLAIN", [assistant("a"), user("q")], "no_final_assistant", "'user'"),
        ("PLAIN", [user("q"), assistant("")], "empty_final_content", "no visible content"),
        ("PLAIN", [user("q"), assistant(None)], "empty_final_content", "no visible content"),
        ("PLAIN", [user("q"), assistant(" \n\u3000")], "empty_final_content", "no visible content"),
        ("PLAIN", [user("q"), assistant("<think>\nhm\n</think>\n")], "empty_final_content", "no visible content"),
        ("PLAIN", [user("q"), assistant("", tool_calls=[{"name": "f"}])], "empty_final_content", "native_thinking_alignment"),
        ("PLAIN", [user("q"), assistant("a", tool_calls=[{"name": "f"}])], "needs_native_alignment", "tool calls"),
        ("UPPER_CASE", [user("q"), assistant("a")], "content_not_verbatim", "drops or rewrites"),
        ("REPEATS", [user("q"), assistant("a")], "content_not_verbatim", "repeats the content"),
        ("DROPS_LAST", [user("q"), assistant("a"), user("r"), assistant("a")], "content_not_verbatim", "drops or rewrites"),
        ("THINKS", [user("q"), assistant("I write </think> here")], "content_not_verbatim", "changes the content"),
        (
            "DROPS_REASONING",
            [user("q"), assistant("<think>\nhm\n</think>\n\na")],
            "dropped_reasoning",
            "accept_dropped_reasoning",
        ),
        ("PLAIN", [user("q"), assistant("a", reasoning_content="hm")], "dropped_reasoning", "accept_dropped_reasoning"),
        ("PLAIN", [user("<|im_end|>"), assistant("a")], "embedded_special_token", "message 0 (user)"),
        ("PLAIN", [user("q"), assistant("a <|im_start|> b")], "embedded_special_token", "message 1 (assistant)"),
        ("{{ raise_exception('roles must alternate') }}", [user("q"), assistant("a")], "template_error", "roles must alternate"),
    ],
)
def test_typed_refusals(template: str, messages: list[dict[str, Any]], reason: str, words: str) -> None:
    error = refusal(getattr(support, template, template), talk(*messages))
    assert (error.reason, error.stage, error.side) == (reason, "render", "student")
    assert words in error.message


def test_special_tokens_are_looked_for_in_tools_arguments_and_reasoning() -> None:
    for row in (
        talk(user("q"), assistant("a"), tools=[{"name": "f", "description": "ends with <|im_end|>"}]),
        talk(user("q"), assistant("", tool_calls=[{"name": "f", "arguments": {"<|im_end|>": 1}}]), user("r"), assistant("a")),
        talk(user("q"), assistant("a"), chat_template_kwargs={"note": "<|im_end|>"}),
        talk(user("q"), assistant("x", reasoning_content="<|im_end|>"), user("r"), assistant("a")),
    ):
        assert refusal(support.PLAIN, row).reason == "embedded_special_token"


def test_special_tokens_in_content_can_be_allowed() -> None:
    part = locate(
        renderer(allow_special_tokens_in_content=True), talk(user("what ends a turn?"), assistant("It is <|im_end|>, you see."))
    )
    assert supervised(part) == ("It is <|im_end|>, you see.", "<|im_end|>")


@pytest.mark.parametrize("inline", [True, False])
def test_dropped_reasoning_can_be_accepted_and_is_told(inline: bool) -> None:
    final = assistant("<think>\nhm\n</think>\n\nyes") if inline else assistant("yes", reasoning_content="hm")
    part = locate(renderer(support.DROPS_REASONING, accept_dropped_reasoning=True), talk(user("q"), final))
    assert supervised(part)[0].strip() == "yes"
    assert part.chats[0] is not None
    assert part.chats[0].reasoning == "dropped"


def test_reasoning_that_stands_elsewhere_does_not_count_as_shown() -> None:
    row = talk(user("hm"), assistant("<think>\nhm\n</think>\n\nyes"))
    assert refusal(support.DROPS_REASONING, row).reason == "dropped_reasoning"


@pytest.mark.parametrize("template", ["PLAIN", "TRIMS", "THINKS"])
@pytest.mark.parametrize("block", ["<think>\nhm, so\n</think>\n\n", "<think>hm, so</think> ", "  <think>\n\nhm, so</think>\n"])
def test_inline_thinking_is_outside_the_loss(template: str, block: str) -> None:
    part = locate(renderer(getattr(support, template)), talk(user("q"), assistant(block + "yes, so")))
    text, end = supervised(part)
    assert (text.strip(), end) == ("yes, so", "<|im_end|>")
    assert part.chats[0] is not None
    assert part.chats[0].reasoning == "shown"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"),
        ("<think>\n\n</think>\n\nyes", "</think>\n\nyes"),
        ("yes", "yes"),
    ],
)
def test_thinking_in_the_loss_where_it_stands_verbatim(content: str, expected: str) -> None:
    part = locate(renderer(options=THINKING), talk(user("q"), assistant(content)))
    assert supervised(part) == (expected, "<|im_end|>")
    marks = {"reasoning": "hm", "close": "</think>", "answer": "yes", "eot": ""}
    assert [region.name for region in part.regions[0]] == [name for name, mark in marks.items() if mark in expected]


def test_thinking_in_the_loss_is_refused_where_it_is_laid_out_anew_or_apart() -> None:
    moved = talk(user("q"), assistant("<think>hm</think>yes"))
    assert refusal(support.THINKS, moved, options=THINKING).reason == "reasoning_not_verbatim"
    field = talk(user("q"), assistant("yes", reasoning_content="hm"))
    assert refusal(bundled_template("chatml"), field, options=THINKING).reason == "needs_native_alignment"
    dropped = talk(user("q"), assistant("<think>\nhm\n</think>\n\nyes"))
    error = refusal(support.DROPS_REASONING, dropped, options=THINKING, accept_dropped_reasoning=True)
    assert error.reason == "dropped_reasoning"


def test_a_template_without_an_end_mark_has_no_end_of_turn() -> None:
    part = locate(renderer(support.NO_END_MARK), talk(user("q"), assistant("yes.")))
    assert part.eot_index.tolist() == [-1]
    assert [region.name for region in part.regions[0]] == ["answer"]
    assert supervised(part)[0].strip() == "yes."


def test_an_end_mark_that_the_tokenizer_drops_is_no_token_of_the_next_row() -> None:
    template = support.PLAIN.replace("<|im_end|>", "\u200b")
    part = locate(
        renderer(template, of="wordpiece_lower"), talk(user("q"), assistant("an answer")), talk(user("q"), assistant("b"))
    )
    assert part.eot_index.tolist() == [-1, -1]
    assert [supervised(part, row)[0] for row in (0, 1)] == ["an answer", "b"]


def test_a_template_is_given_what_it_reads() -> None:
    developer = talk({"role": "developer", "content": "be brief"}, user("q"), assistant("a"))
    shown = [renderer(source).render_row(developer).text for source in (support.PLAIN, support.NO_DEVELOPER)]
    assert shown[0].startswith("<|im_start|>developer\nbe brief")
    assert shown[1].startswith("<|im_start|>system\nbe brief")
    turns = [
        user("q"),
        assistant("", tool_calls=[{"name": "f", "arguments": {"é": 1}}]),
        {"role": "tool", "content": "r"},
        assistant("a"),
    ]
    assert '<tool_call>f{"é": 1}</tool_call>' in renderer(support.TEXT_ARGUMENTS).render_row(talk(*turns)).text
    turns[1]["tool_calls"] = [{"name": "f", "arguments": '{"é":1}'}]
    assert '<tool_call>f{"é":1}</tool_call>' in renderer(support.TEXT_ARGUMENTS).render_row(talk(*turns)).text
    assert '"arguments": {"é": 1}' in renderer(bundled_template("chatml")).render_row(talk(*turns)).text


def test_arguments_of_the_row_win_over_those_of_the_side() -> None:
    source = "{{ style or '' }}" + support.PLAIN
    side = renderer(source, template_kwargs={"style": "formal"})
    assert side.render_row(talk(user("q"), assistant("a"))).text.startswith("formal<")
    assert side.render_row(talk(user("q"), assistant("a"), chat_template_kwargs={"style": "plain"})).text.startswith("plain<")


def test_overlong_chats_are_refused_never_cut() -> None:
    row = talk(user("one two three"), assistant("four five six"))
    length = len(locate(renderer(), row).tokens.ids)
    assert len(locate(renderer(context_length=length), row).tokens.ids) == length
    error = refusal(support.PLAIN, row, context_length=length - 1)
    assert (error.reason, error.stage) == ("overlength", "tokenize")
    assert f"{length} tokens" in error.message


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        renderer(None, of="wordpiece_lower")
    with pytest.raises(ConfigError, match="does not compile"):
        renderer("{% if %}")
    with pytest.raises(ConfigError, match="may not set"):
        renderer(template_kwargs={"messages": []})
    for wrong, words in (
        ({"native_thinking_alignment": True}, "include_thinking_in_loss"),
        ({"kd_alignment_regions": ("eot",)}, "native_thinking_alignment"),
        ({"include_thinking_in_loss": True, "native_thinking_alignment": True, "kd_alignment_regions": ()}, "must name"),
        ({"include_thinking_in_loss": True, "native_thinking_alignment": True, "kd_alignment_regions": ("tools",)}, "tools"),
    ):
        with pytest.raises(ConfigError, match=words):
            ChatOptions(**wrong)


def test_a_refused_row_leaves_the_others_whole() -> None:
    rows = [talk(user("q"), assistant("a")), talk(user("q")), None, talk(user("q"), assistant("b"))]
    part = locate_conversations(renderer(), rows)
    assert [refusal and refusal.reason for refusal in part.refusals] == [None, "no_final_assistant", None, None]
    assert part.tokens.lengths.tolist()[1:3] == [0, 0]
    assert [supervised(part, row)[0] for row in (0, 3)] == ["a", "b"]
