"""Raw rows to canonical conversations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chat.support import assistant, user
from xtok.chat import ChatFields, conversation_from_row, normalize_messages
from xtok.chat.messages import ARGUMENTS_TEXT
from xtok.errors import RowRefused


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
        ({"messages": [user("q"), assistant("a")], "tools": 3}, "tools"),
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
        {"messages": [user("q"), assistant("a")], "tools": [{"name": "f", "description": "\ud800"}]},
    ],
)
def test_lone_surrogates_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused, match="lone_surrogate"):
        conversation_from_row(row)


def test_no_tools_is_none() -> None:
    for tools in (None, [], "", "[]"):
        assert conversation_from_row({"messages": [user("q"), assistant("a")], "tools": tools}).tools is None
