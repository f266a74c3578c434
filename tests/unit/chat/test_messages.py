"""Raw rows to canonical conversations."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from typing import Any

import pytest

from tests.unit.chat.support import assistant, user
from xtok.chat import ChatFields, Conversation, conversation_from_row, normalize_messages
from xtok.chat.messages import ARGUMENTS_TEXT
from xtok.errors import RowRefused

DEEP = reduce(lambda inner, _: [inner], range(990), [])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("hi"), assistant("hello")]},
        {"messages": [user([{"type": "text", "text": "h"}, "i"]), assistant([{"type": "text", "text": "hello"}])]},
        {"messages": [{**user("hi"), "tool_calls": None, "name": None}, assistant("hello", reasoning_content="  ")]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [user("hi"), assistant("hello")]},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": [user("hi")], "completion": [assistant("hello")]},
        {"messages": None, "prompt": "hi", "completion": "hello"},
        {"messages": [{"role": None, "content": None, "from": "human", "value": "hi"}, {**assistant("hello"), "from": None}]},
    ],
)
def test_every_shape_gives_the_same_conversation(row: dict[str, Any]) -> None:
    conversation = conversation_from_row(row)
    assert conversation.messages == [user("hi"), assistant("hello")]
    assert conversation.tools is None
    assert conversation.template_kwargs == {}
    assert not conversation.has_float


def test_field_names_are_configurable() -> None:
    fields = ChatFields(messages="chat", tools="functions", template_kwargs="extra")
    row = {"chat": [user("q"), assistant("a")], "functions": '[{"name": "f"}]', "extra": {"x": 1, "unset": None}}
    conversation = conversation_from_row(row, fields)
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]
    assert conversation.template_kwargs == {"x": 1}


def test_the_row_is_not_modified() -> None:
    row = {"messages": [user(["a", "b"]), assistant("c", tool_calls=[{"name": "f", "arguments": "{}"}])]}
    copy = {"messages": [dict(message) for message in row["messages"]]}
    conversation_from_row(row)
    assert row == copy


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_two_names(key: str) -> None:
    message = normalize_messages([user("q"), assistant("a", **{key: "because"})])[1]
    assert message == assistant("a", reasoning_content="because", thinking="because")


@pytest.mark.parametrize("arguments", ['{"x": 1, "y": null}', {"x": 1, "y": None}])
@pytest.mark.parametrize("wrapped", [True, False])
def test_tool_arguments_are_objects(arguments: Any, wrapped: bool) -> None:
    call = {"name": "f", "arguments": arguments}
    raw = {"id": "7", "type": "function", "function": call} if wrapped else call
    message = normalize_messages([user("q"), {"role": "assistant", "tool_calls": [raw]}])[1]
    function = message["tool_calls"][0]["function"]
    assert message["content"] == ""
    assert function["arguments"] == {"x": 1, "y": None}
    assert function.get(ARGUMENTS_TEXT) == (arguments if isinstance(arguments, str) else None)


def test_sharegpt_tool_turns() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 2.5}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a"},
    ]
    conversation = conversation_from_row({"conversations": turns})
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 2.5}}
    assert conversation.has_float


def test_a_system_prompt_in_a_column_of_its_own() -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    row = {"conversations": turns, "system": "Be brief."}
    with_one = {"conversations": [{"from": "system", "value": "Be brief."}, *turns]}
    wanted = conversation_from_row(with_one)
    assert [message["role"] for message in wanted.messages] == ["system", "user", "assistant"]
    assert conversation_from_row(row) == wanted
    assert conversation_from_row({**with_one, "system": "Be brief."}) == wanted
    plain = conversation_from_row({"conversations": turns})
    for nothing in ("", None):
        assert conversation_from_row({"conversations": turns, "system": nothing}) == plain
    assert conversation_from_row(row, ChatFields(system=None)) == plain
    assert conversation_from_row({"messages": [user("q"), assistant("a")], "system": "Be brief."}) == wanted
    assert conversation_from_row({"prompt": "q", "completion": "a", "system": "Be brief."}) == wanted
    assert conversation_from_row({**with_one, "system": "Be brief.\n"}) == wanted
    for bad in ({**with_one, "system": "Be long."}, {"conversations": turns, "system": 3}):
        with pytest.raises(RowRefused, match="system prompt"):
            conversation_from_row(bad)


def test_the_older_function_call_is_a_tool_call() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    new = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}
    assert normalize_messages([user("q"), old]) == normalize_messages([user("q"), new])


def test_times_out_of_parquet_are_text() -> None:
    when = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    assert normalize_messages([{**user("q"), "timestamp": when, "day": when.date()}]) == [
        {**user("q"), "timestamp": "2024-05-06T07:08:09+00:00", "day": "2024-05-06"}
    ]


def test_a_tool_result_may_be_an_object() -> None:
    message = normalize_messages([user("q"), {"role": "tool", "content": {"città": 1}}])[1]
    assert message["content"] == '{"città": 1}'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "none of"),
        ({"messages": []}, "non-empty list"),
        ({"messages": "hi"}, "non-empty list"),
        ({"messages": ["hi"]}, "message 0"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "'robot'"),
        ({"messages": [{"content": "hi"}]}, "None"),
        ({"messages": [user(None), assistant("a")]}, "no content"),
        ({"messages": [user(3), assistant("a")]}, "got 3"),
        ({"messages": [user([{"type": "image", "url": "x"}]), assistant("a")]}, "'image'"),
        ({"messages": [user("q"), assistant("a", reasoning_content=["x"])]}, "reasoning_content"),
        ({"messages": [user("q"), assistant("", tool_calls="f()")]}, "tool_calls"),
        ({"messages": [user("q"), assistant("", tool_calls=[{"arguments": {}}])]}, "a name"),
        ({"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": "{x"}])]}, "not JSON"),
        ({"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])]}, "object"),
        ({"messages": [{**user("q"), "tool_calls": [{"name": "f"}]}]}, "cannot hold"),
        ({"messages": [user("q"), assistant("a", weight=object())]}, "no JSON value"),
        ({"messages": [user("q"), assistant("a", weight=float("nan"))]}, "nan is no JSON value"),
        ({"messages": [user("q"), assistant("a", extra=DEEP)]}, "message 1: data of more than 100 levels"),
        (
            {"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": '{"x": 1e999}'}])]},
            "inf is no JSON value",
        ),
        ({"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": "[" * 100_000}])]}, "not JSON"),
        ({"messages": [user("q"), assistant("a", function_call="f()")]}, "a name"),
        ({"messages": DEEP}, "must be an object"),
        ({"prompt": "q", "completion": 5}, "the completion must be text or a list of messages, got 5"),
        ({"prompt": 0.5, "completion": "a"}, "the prompt must be text or a list of messages, got 0.5"),
        ({"prompt": "q", "completion": assistant("a")}, "the completion must be text or a list of messages"),
        ({"messages": [user("q"), assistant("a")], "tools": 3}, "tools"),
        ({"messages": [user("q"), assistant("a")], "tools": [{"x": DEEP}]}, "tools: data of more"),
        ({"messages": [user("q"), assistant("a")], "tools": "[" * 100_000}, "tools is not JSON"),
        ({"messages": [user("q"), assistant("a")], "chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs: data of more"),
        ({"messages": [user("q"), assistant("a")], "chat_template_kwargs": {"messages": []}}, "may not set"),
        ({"messages": [user("q"), assistant("a")], "chat_template_kwargs": "[]"}, "object"),
    ],
)
def test_anything_else_is_refused_for_all(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowRefused, match="invalid_messages") as caught:
        conversation_from_row(row)
    assert words in caught.value.message
    assert (caught.value.stage, caught.value.side) == ("read", "source")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("a \ud800 b"), assistant("a")]},
        {"messages": [user("q"), assistant("é", reasoning_content="\udfff")]},
        {"messages": [user("q"), assistant("a", **{"\ud800": "x"})]},
        {"messages": [user("q"), assistant("a")], "tools": [{"name": "f", "description": "\ud800"}]},
    ],
)
def test_lone_surrogates_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused, match="lone_surrogate"):
        conversation_from_row(row)


def test_no_tools_is_none() -> None:
    for tools in (None, [], "", "[]"):
        assert conversation_from_row({"messages": [user("q"), assistant("a")], "tools": tools}).tools is None


def test_an_empty_completion_is_an_empty_answer() -> None:
    assert conversation_from_row({"prompt": "q", "completion": ""}).messages == [user("q"), assistant("")]


@pytest.mark.parametrize("odd", [0.5, 10**30, None, "a\u200bb", ["\u2028"], {"k": {"\x85": 1}}])
def test_data_that_engines_print_differently_is_marked(odd: Any) -> None:
    def conversation(value: Any) -> Conversation:
        call = {"name": "f", "arguments": {"x": value}}
        return conversation_from_row({"messages": [user("q"), assistant("", tool_calls=[call]), assistant("a")]})

    assert conversation(odd).by_reference
    assert not conversation(['it\'s \n\t"é"', 1, True, {"中": -(2**63) + 1}]).by_reference
    assert conversation_from_row({"messages": [user("q"), assistant("a")], "tools": [{"name": "f", "x": odd}]}).by_reference


@pytest.mark.parametrize("content", ["a\x1c", "a\u2028b", "a\rb", "\x85"])
def test_blanks_that_engines_read_differently_are_marked(content: str) -> None:
    assert conversation_from_row({"messages": [user(content), assistant("a")]}).by_reference
    assert not conversation_from_row({"messages": [user("a\r\nb \u3000\xa0\u200b"), assistant("a")]}).by_reference
