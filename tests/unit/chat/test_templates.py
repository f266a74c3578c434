"""The reference renderer against transformers, the fast one against the reference, the clock, the sandbox."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

import orjson
import pytest

from tests.unit.chat.support import BUNDLED, CLOCK, DAY, PLAIN, assistant, bundled_template, tokenizer, user
from xtok.chat import Conversation, conversation_from_row
from xtok.chat.conversation import engines_differ
from xtok.chat.fast_render import FastRenderer, ProvenRenderer
from xtok.chat.templates import ReferenceRenderer, TemplateFailure, template_variables

TEMPLATES = ("chatml", "chatml_plain", "instruct")
TURNS = [user("q"), assistant("a")]


def bundled_chats() -> list[Conversation]:
    return [conversation_from_row(orjson.loads(line)) for line in (BUNDLED / "chats.jsonl").read_bytes().splitlines()]


def fixed_day(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(day.year, day.month, day.day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


@pytest.mark.parametrize("template", [*map(bundled_template, TEMPLATES), CLOCK], ids=[*TEMPLATES, "clock"])
def test_reference_equals_apply_chat_template(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    fixed_day(monkeypatch, DAY)
    adapter = tokenizer("spm_bpe")
    reference = ReferenceRenderer(template, render_date=DAY, special_tokens=adapter.special_tokens)
    for chat in bundled_chats():
        ours, theirs = [], []
        for outcomes, render in (
            (ours, lambda chat=chat: reference.render(chat.messages, chat.tools, chat.template_kwargs)),
            (theirs, lambda chat=chat: adapter.transformers_tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, chat_template=template, tokenize=False, **chat.template_kwargs
            )),
        ):  # fmt: skip
            try:
                outcomes.append(render())
            except Exception:
                outcomes.append(None)
        assert ours == theirs


@pytest.mark.parametrize("template", [*map(bundled_template, TEMPLATES), CLOCK], ids=[*TEMPLATES, "clock"])
def test_minijinja_equals_jinja_on_rows_without_floats(template: str) -> None:
    specials = tokenizer("spm_bpe").special_tokens
    reference = ReferenceRenderer(template, render_date=DAY, special_tokens=specials)
    fast = FastRenderer(template, render_date=DAY, special_tokens=specials)
    for chat in bundled_chats():
        if chat.by_reference:
            continue
        outcomes = []
        for engine in (reference, fast):
            try:
                outcomes.append(engine.render(chat.messages, chat.tools, {}))
            except TemplateFailure:
                outcomes.append(None)
        assert outcomes[0] == outcomes[1]


def test_two_days_give_the_same_text_and_another_render_date_another(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = set()
    for today in (date(2030, 5, 1), date(2031, 6, 2)):
        fixed_day(monkeypatch, today)
        for engine in (ReferenceRenderer, FastRenderer):
            texts.add(engine(CLOCK, render_date=DAY, special_tokens={}).render(TURNS, None, {}))
    assert len(texts) == 1
    assert texts.pop().startswith("02 Jan 2025\n")
    other = ReferenceRenderer(CLOCK, render_date=date(2024, 12, 31), special_tokens={})
    assert other.render(TURNS, None, {}).startswith("31 Dec 2024\n")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ dict.__class__.__mro__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.missing.more }}",
    ],
)
def test_the_sandbox_holds_and_failures_are_typed(template: str) -> None:
    reference = ReferenceRenderer(template, render_date=DAY, special_tokens={})
    with pytest.raises(TemplateFailure):
        reference.render(TURNS, None, {})


def test_template_helpers() -> None:
    template = (
        "{%- generation -%}{{ {'é': '<'} | tojson }}{%- endgeneration -%}|{{ [1] | tojson(indent=2) }}|{{ dict(a=1) }}"
        "|{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}|{{ none is iterable }}"
    )
    expected = '{"é": "<"}|[\n  1\n]|{\'a\': 1}|1|False'
    for engine in (ReferenceRenderer, FastRenderer):
        assert engine(template, render_date=DAY, special_tokens={}).render(TURNS, None, {}) == expected


def test_variables_are_those_read_from_outside() -> None:
    assert {"messages", "enable_thinking"} <= template_variables("{{ messages }}{% if enable_thinking %}x{% endif %}")


def test_special_tokens_and_arguments_reach_the_template() -> None:
    reference = ReferenceRenderer("{{ bos_token }}{{ style }}", render_date=DAY, special_tokens={"bos_token": "<s>"})
    assert reference.render(TURNS, None, {"style": "x"}) == "<s>x"
    assert reference.render(TURNS, None, {"bos_token": "<b>"}) == "<b>"


# Each prints something of the value in a way that templates use.
EXPRESSIONS = (
    "{{ x }}", "{{ x | tojson }}", "{{ x | trim }}", "{{ x.strip() }}", "{{ x.split() | join('|') }}", "{{ x.splitlines() | join('|') }}",
    "{{ x | title }}", "{{ x | join(',') }}", "{% for y in x %}{{ y }};{% endfor %}", "{{ x is sequence }}", "{{ x is mapping }}",
    "{{ x is iterable }}", "{{ x is number }}", "{{ x ~ '!' }}", "{{ x | string | length }}",
)  # fmt: skip
IN_CONTAINERS = ("{{ [x] }}", "{{ {'k': x} }}", "{{ x | list }}", "{{ x[:9] }}")  # of data that is no message's own text
PLAIN_VALUES = ("", 'it\'s "é"\n', "\u3000中\xa0\t", 2**63 - 1, True, ["a", [1]], {"k": ["v", "'"]}, "a\r\nb", "👩")
ODD_BLANKS = ("\x1ca", "a\x1fb", "a\x0bb", "a\x0cb", "a\x85b", "a\u2028b", "a\u2029b", "a\rb")
ODD_VALUES = (*ODD_BLANKS, 1e-07, 10**40, None, ["\u200b"], {"\ufeff": 1})


@pytest.mark.parametrize("value", [*PLAIN_VALUES, *ODD_VALUES], ids=repr)
def test_a_conversation_knows_what_engines_treat_differently(value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "x": value}}
    for field, tools, kwargs in ((value, None, {}), ({"k": [value]}, None, {}), ("", [tool], {}), ("", None, {"x": value})):
        messages = [{"role": "user", "content": "q", "x": field}]
        assert Conversation.of(messages, tools, kwargs).by_reference == engines_differ(messages, tools, kwargs)


@pytest.mark.parametrize("value", [*PLAIN_VALUES, *ODD_VALUES], ids=repr)
def test_engines_agree_on_all_that_is_not_marked(value: Any) -> None:
    marked = engines_differ([{"x": value}], None, {})
    assert marked == (value in ODD_VALUES)
    differs = False
    for expression in EXPRESSIONS if isinstance(value, str) else (*EXPRESSIONS, *IN_CONTAINERS):
        engines = (kind(expression, render_date=DAY, special_tokens={}) for kind in (ReferenceRenderer, FastRenderer))
        texts = []
        for engine in engines:
            try:
                texts.append(engine.render([{"x": value}], None, {"x": value}))
            except TemplateFailure:
                texts.append(None)
        differs |= texts[1] is not None and texts[0] != texts[1]
    assert differs == marked  # a mark that were not needed would cost time


class TestProof:
    def test_a_difference_in_the_sample_puts_minijinja_out_of_use(self) -> None:
        # An undefined value is iterable in Jinja only.
        template = "{{ missing is iterable }}{{ messages[0].content }}"
        proven = ProvenRenderer(template, render_date=DAY, special_tokens={})
        assert proven.name == "minijinja"
        assert not proven.prove([(TURNS, None, {})])
        assert proven.name == "jinja"
        assert "at character 0" in (proven.difference or "")
        assert proven.render(TURNS, None, {}, by_reference=False) == "Trueq"

    def test_the_continuing_proof_finds_a_later_difference(self) -> None:
        template = "{{ messages[0].content }}{% if messages[0].content == 'odd' %}{{ missing is iterable }}{% endif %}"
        proven = ProvenRenderer(template, render_date=DAY, special_tokens={}, proof_every=2)
        assert proven.prove([(TURNS, None, {})])
        odd = [user("odd"), assistant("a")]
        texts = [proven.render(odd, None, {}, by_reference=False) for _ in range(4)]
        assert texts[1:] == ["oddTrue"] * 3  # the second row is proven, what follows is Jinja's
        assert proven.difference is not None

    def test_a_float_goes_to_jinja(self) -> None:
        proven = ProvenRenderer("{{ x }}", render_date=DAY, special_tokens={})
        assert proven.render(TURNS, None, {"x": 440.0}, by_reference=True) == "440.0"
        assert proven.render(TURNS, None, {"x": 1e-07}, by_reference=True) == "1e-07"

    def test_a_template_minijinja_cannot_compile_goes_to_jinja(self) -> None:
        proven = ProvenRenderer("{% print messages[0].content %}", render_date=DAY, special_tokens={})
        assert (proven.name, "cannot compile" in (proven.difference or "")) == ("jinja", True)
        assert proven.render(TURNS, None, {}, by_reference=False) == "q"

    def test_rows_minijinja_refuses_are_rendered_by_jinja(self) -> None:
        template = "{{ messages[0].content.swapcase() if messages[0].content == 'q' else messages[0].content }}"
        proven = ProvenRenderer(template, render_date=DAY, special_tokens={})
        other = [user("other"), assistant("a")]
        assert proven.prove([(TURNS, None, {}), (other, None, {})])  # refusals cost time and are no difference
        assert proven.render(TURNS, None, {}, by_reference=False) == "Q"
        assert proven.name == "minijinja"

    def test_mostly_refused_samples_are_not_worth_it(self) -> None:
        proven = ProvenRenderer("{{ messages[0].content.swapcase() }}", render_date=DAY, special_tokens={})
        assert not proven.prove([(TURNS, None, {})] * 3)
        assert (proven.name, proven.difference) == ("jinja", "minijinja refuses 3 of 3 sample rows")

    def test_refusals_are_the_references(self) -> None:
        proven = ProvenRenderer("{{ raise_exception('only two turns') }}", render_date=DAY, special_tokens={})
        with pytest.raises(TemplateFailure, match="only two turns"):
            proven.render(TURNS, None, {}, by_reference=False)

    def test_proof_every_is_checked(self) -> None:
        with pytest.raises(ValueError, match="proof_every"):
            ProvenRenderer(PLAIN, render_date=DAY, special_tokens={}, proof_every=0)
