"""Native ChatML: regions and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chat import support
from tests.unit.chat.support import NATIVE, assistant, bundled_template, locate, renderer, supervised, talk, user
from xtok.chat import ChatRenderer, Conversation
from xtok.errors import RowRefused

CALL = {"name": "set_timer", "arguments": {"minutes": 3, "repeat": True}}
# As Nemotron-Nano: history thinking goes unless a switch says otherwise; calls in lines of their own.
SWITCHED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and m.reasoning_content and (loop.last or not truncate_history_thinking) and enable_thinking %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + c.function.name + '\\n</tool_call>\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
)


def native(template: str | None = None, **options: Any) -> ChatRenderer:
    return renderer(template or bundled_template("chatml"), options=NATIVE, **options)


def texts(renderer: ChatRenderer, conversation: Conversation) -> dict[str, str]:
    chat = renderer.render_row(conversation)
    data = chat.text.encode()
    found = {span.name: data[span.start : span.end].decode() for span in chat.spans}
    assert chat.eot_span is not None
    return {**found, "eot": data[chat.eot_span.start : chat.eot_span.end].decode()}


@pytest.mark.parametrize("template", ["chatml", "chatml_plain"])
@pytest.mark.parametrize(
    "final",
    [
        assistant("yes", reasoning_content=" hm,\nso \n"),
        assistant("<think>\nhm,\nso\n</think>\n\nyes"),
        assistant(" <think>hm,\nso</think>yes\n"),
        assistant("<think>other</think>yes", reasoning_content="hm,\nso"),
    ],
)
def test_reasoning_close_answer_and_end(template: str, final: dict[str, Any]) -> None:
    expected = {"reasoning": "hm,\nso", "close": "</think>", "answer": "yes", "eot": "<|im_end|>"}
    assert texts(native(bundled_template(template)), talk(user("q"), final)) == expected


def test_without_reasoning_there_is_an_answer_alone() -> None:
    expected = {"answer": "yes", "eot": "<|im_end|>"}
    assert texts(native(), talk(user("q"), assistant(" yes "))) == expected
    assert texts(native(support.THINKS), talk(user("q"), assistant("yes"))) == expected  # the empty block is context


def test_tool_calls_belong_to_the_answer() -> None:
    found = texts(
        native(), talk(user("q"), assistant("ok", reasoning_content="hm", tool_calls=[CALL, {**CALL, "name": "other"}]))
    )
    assert found["answer"].startswith('ok\n<tool_call>\n{"name": "set_timer"')
    assert found["answer"].endswith("</tool_call>")
    assert found["answer"].count("<tool_call>") == 2
    alone = texts(native(), talk(user("q"), assistant("", tool_calls=[CALL])))
    assert alone["answer"].startswith("<tool_call>")


def test_the_switches_a_template_knows_are_set() -> None:
    row = talk(user("q"), assistant("a", reasoning_content="first"), user("r"), assistant("b", reasoning_content="second"))
    text = native(SWITCHED, template_kwargs={"enable_thinking": False, "truncate_history_thinking": True}).render_row(row).text
    assert text.count("<think>") == 2


@pytest.mark.parametrize("reasoning", [None, "hm."])
@pytest.mark.parametrize("calls", [[], [CALL]])
def test_the_loss_covers_every_region(reasoning: str | None, calls: list[dict[str, Any]]) -> None:
    part = locate(native(), talk(user("q"), assistant("yes.", reasoning_content=reasoning, tool_calls=calls)))
    wanted = [*(["reasoning", "close"] if reasoning else []), "answer", "eot"]
    assert [region.name for region in part.regions[0]] == wanted
    ids = part.tokens.ids
    covered = [index for region in part.regions[0] for index in range(region.start, region.end)]
    assert [index for index, flag in enumerate(part.token_mask.tolist()) if flag] == covered
    for region, text in zip(part.regions[0], wanted, strict=True):
        shown = part.side.adapter.decode(ids[region.start : region.end]).strip()
        assert {"reasoning": "hm.", "close": "</think>", "eot": "<|im_end|>"}.get(text, shown) == shown
    assert supervised(part)[1] == "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "final", "reason", "words"),
    [
        (None, assistant(" "), "empty_final_content", "neither"),
        (None, assistant("", reasoning_content="hm"), "empty_final_content", "neither"),
        (None, assistant("a <|im_end|>"), "literal_delimiter", "message 1 (assistant)"),
        (None, assistant("a", reasoning_content="x </think> y"), "literal_delimiter", "reasoning"),
        (None, assistant("x </think> y"), "literal_delimiter", "answer"),
        ("PLAIN", assistant("a", reasoning_content="hm"), "dropped_reasoning", "drops"),
        ("PLAIN", assistant("a", tool_calls=[CALL]), "region_mismatch", "0 <tool_call> blocks for 1"),
        ("UPPER_CASE", assistant("a"), "region_mismatch", "not 'a'"),
        ("REPEATS", assistant("a"), "region_mismatch", "adds text"),
        ("DROPS_LAST", assistant("a"), "unknown_layout", "0 for 1"),
        ("GLUED", assistant("a"), "unknown_layout", "ChatML"),
        ("NO_END_MARK", assistant("a"), "unknown_layout", "ChatML"),
        ("PLAIN+tail", assistant("a"), "unknown_layout", "text follows"),
        ("THINKS", assistant("a", reasoning_content="h m"), None, ""),
        ("CHANGES_REASONING", assistant("a", reasoning_content="hm"), "region_mismatch", "'HM'"),
        ("OPEN_BLOCK", assistant("a", reasoning_content="hm"), "unknown_layout", "does not close"),
    ],
)
def test_typed_refusals(template: str | None, final: dict[str, Any], reason: str | None, words: str) -> None:
    shouted = "{% if m.reasoning_content %}<think>{{ m.reasoning_content | upper }}</think>{% endif %}{{ m.content }}"
    special = {
        "PLAIN+tail": support.PLAIN + "tail",
        "CHANGES_REASONING": support.PLAIN.replace("{{ m.content }}", shouted),
        "OPEN_BLOCK": support.PLAIN.replace("{{ m.content }}", "<think>{{ m.content }}"),
    }
    source = None if template is None else special.get(template, getattr(support, template, template))
    run = native(source, allow_special_tokens_in_content=True)
    if reason is None:
        run.render_row(talk(user("q"), final))
        return
    with pytest.raises(RowRefused) as caught:
        run.render_row(talk(user("q"), final))
    assert caught.value.reason == reason
    assert words in caught.value.message


def test_a_delimiter_in_the_context_is_refused_too() -> None:
    with pytest.raises(RowRefused, match="literal_delimiter"):
        native().render_row(talk(user("what is <|im_start|>?"), assistant("a mark")))


def test_a_tokenizer_without_the_end_mark_is_an_unknown_layout() -> None:
    with pytest.raises(RowRefused, match="unknown_layout"):
        locate(native(of="spm_bpe"), talk(user("q"), assistant("yes")))
