"""Raw rows to one canonical conversation, the same for every model.

A canonical conversation is a list of plain dicts with these properties, whatever shape the row had:
- `role` is one of `ROLES`; ShareGPT and legacy names are mapped.
- `content` is a string. A list of text parts is joined without a separator; an assistant turn without content has "".
- `reasoning_content` is a non-blank string or absent; the older names `thinking` and `reasoning` are read too, and `thinking`
  is set beside it, as transformers does, because gpt-oss templates read that name.
- `tool_calls` is a non-empty list of `{"type", "function": {"name", "arguments"}}` or absent; arguments are an object, and where
  the row gave a JSON string, that string is kept beside it (`ARGUMENTS_TEXT`) for the templates that print it.
- Keys whose value is None are dropped, as `apply_chat_template` does.
- All else is JSON data of at most `MAX_DEPTH` levels; a date or time out of Parquet is text in ISO form.
Anything else is refused with stage "read" and side "source": it would fail for every model.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from schemas.tables import RejectReason
from xtok.chat.conversation import Conversation, Message
from xtok.errors import RowRefused

__all__ = ["ARGUMENTS_TEXT", "MAX_DEPTH", "ROLES", "ChatFields", "conversation_from_row", "normalize_messages"]

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
ARGUMENTS_TEXT: Final = "_arguments_text"
MAX_DEPTH: Final = 100  # of lists and objects in one another; what is deeper breaks templates, or the stack

_ROLE_NAMES: Final = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_READ_APART: Final = frozenset(("role", "content", "from", "value", "tool_calls", "function_call", *_REASONING_KEYS))
_RESERVED_KWARGS: Final = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ChatFields:
    """Names of the columns a chat row is read from; the first of messages, conversations, prompt + completion that is there.

    system: a system prompt that stands beside the messages. system, tools, template_kwargs: None where rows have none that are to be
    read.
    """

    messages: str = "messages"
    conversations: str = "conversations"
    prompt: str = "prompt"
    completion: str = "completion"
    system: str | None = "system"
    tools: str | None = "tools"
    template_kwargs: str | None = "chat_template_kwargs"

    @property
    def columns(self) -> tuple[str, ...]:
        """All of them."""
        names = (self.messages, self.conversations, self.prompt, self.completion, self.system, self.tools, self.template_kwargs)
        return tuple(name for name in names if name is not None)


def conversation_from_row(row: Mapping[str, Any], fields: ChatFields | None = None) -> Conversation:
    """Read one source row. Raises RowRefused (stage "read", side "source") where it is no conversation."""
    fields = fields or ChatFields()
    raw = row.get(fields.messages)
    if raw is None:
        raw = row.get(fields.conversations)
    if raw is None and row.get(fields.completion) is not None:
        raw = _prompt_completion(row.get(fields.prompt), row[fields.completion])
    if raw is None:
        _refuse(
            f"the row has none of {fields.messages!r}, {fields.conversations!r} and {fields.completion!r}: {_short(sorted(row))}"
        )
    messages = normalize_messages(_with_system(raw, None if fields.system is None else row.get(fields.system)))
    tools, template_kwargs = (None if name is None else row.get(name) for name in (fields.tools, fields.template_kwargs))
    return Conversation.of(messages, _normalize_tools(tools), _normalize_kwargs(template_kwargs))


def normalize_messages(raw: Any) -> list[Message]:
    """Canonical messages of a list of OpenAI-style or ShareGPT-style messages; the given objects are not modified."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        _refuse(f"messages must be a non-empty list, got {_short(raw)}")
    return [_normalize_message(message, index) for index, message in enumerate(raw)]


def _normalize_message(raw: Any, index: int) -> Message:
    if not isinstance(raw, Mapping):
        _refuse(f"message {index} must be an object with role and content, got {_short(raw)}")
    name = _either(raw, "role", "from")
    role = _ROLE_NAMES.get(name) if isinstance(name, str) else None
    if role is None:
        _refuse(f"message {index} has the unknown role {name!r}; known: {', '.join(_ROLE_NAMES)}")
    content = _either(raw, "content", "value")
    calls = raw.get("tool_calls")
    if name == "function_call" and not calls:
        content, calls = None, _sharegpt_calls(content, index)
    elif raw.get("function_call") and not calls:  # OpenAI's older name
        calls = [raw["function_call"]]
    message: Message = {
        key: _plain(value, f"message {index}") for key, value in raw.items() if value is not None and key not in _READ_APART
    }
    message["role"] = role
    message["content"] = _normalize_content(content, role, index)
    reasoning = next((raw[key] for key in _REASONING_KEYS if raw.get(key) is not None), None)
    if reasoning is not None and role == "assistant":
        if not isinstance(reasoning, str):
            _refuse(f"message {index}: reasoning_content must be a string, got {_short(reasoning)}")
        if reasoning.strip():
            message["reasoning_content"] = message["thinking"] = str(reasoning)
    if calls:
        if role != "assistant":
            _refuse(f"message {index}: a {role} message cannot hold tool_calls")
        message["tool_calls"] = _normalize_calls(calls, index)
    return message


def _either(raw: Mapping[str, Any], name: str, other: str) -> Any:
    """OpenAI's field or ShareGPT's; a table of both has nulls in the one that is not in use."""
    value = raw.get(name)
    return raw.get(other) if value is None else value


def _normalize_content(content: Any, role: str, index: int) -> str:
    if isinstance(content, str):
        return str(content)
    if content is None:
        if role == "assistant":
            return ""
        _refuse(f"message {index} ({role}) has no content")
    if role == "tool" and isinstance(content, Mapping):
        return json.dumps(_plain(content, f"message {index}"), ensure_ascii=False)
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(_part_text(part, index) for part in content)
    _refuse(f"message {index}: content must be a string or a list of text parts, got {_short(content)}")


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RowRefused(
        RejectReason.INVALID_MESSAGES, f"message {index} holds a part of type {kind!r}; only text parts are supported",
        stage="read", side="source",
    )  # fmt: skip


def _normalize_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        _refuse(f"message {index}: tool_calls must be a list, got {_short(calls)}")
    return [_normalize_call(call, index) for call in calls]


def _normalize_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(f"message {index}: a tool call needs a function with a name, got {_short(call)}")
    arguments, text = function.get("arguments"), None
    if isinstance(arguments, str):
        text, arguments = arguments, _parse_json(arguments or "{}", f"message {index}: tool call arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        _refuse(f"message {index}: tool call arguments must be an object, got {_short(arguments)}")
    plain: dict[str, Any] = {"name": str(function["name"]), "arguments": _plain(arguments, f"message {index}")}
    if text:
        plain[ARGUMENTS_TEXT] = text
    outer = {key: _plain(value, f"message {index}") for key, value in call.items() if key == "id" and value is not None}
    return {"type": "function", **outer, "function": plain}


def _sharegpt_calls(value: Any, index: int) -> list[Any]:
    parsed = _parse_json(value, f"message {index}: function_call") if isinstance(value, str) else value
    return list(parsed) if isinstance(parsed, list) else [parsed]


def _with_system(raw: Any, system: Any) -> Any:
    """The messages, begun with the system prompt that stands in a column of its own, as much ShareGPT data has it."""
    if system is None or system == "" or not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        return raw
    if not isinstance(system, str):
        _refuse(
            f"the system prompt must be text, got {_short(system)}; a column of another kind is left out by system_field: null"
        )
    own = [message for message in raw if isinstance(message, Mapping) and _either(message, "role", "from") == "system"]
    if not own:
        return [{"role": "system", "content": system}, *raw]
    if any(str(_either(message, "content", "value") or system).strip() != system.strip() for message in own):
        _refuse(
            "the row has a system prompt, and another one among its messages: it is not clear which of them holds; the column is left "
            "out by system_field: null"
        )
    return raw


def _prompt_completion(prompt: Any, completion: Any) -> list[Any]:
    ends: list[Any] = []
    for name, value, role in (("prompt", prompt, "user"), ("completion", completion, "assistant")):
        if isinstance(value, str):
            if value or role == "assistant":
                ends.append({"role": role, "content": value})
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            ends += value
        elif value is not None:
            _refuse(f"the {name} must be text or a list of messages, got {_short(value)}")
    return ends


def _normalize_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Tools as `{"type": "function", "function": ...}`; a JSON string is parsed; an empty list is None (templates ask `is none`)."""
    if isinstance(raw, str):
        raw = _parse_json(raw, "tools") if raw.strip() else None
    if raw is None:
        return None
    if not isinstance(raw, Sequence) or isinstance(raw, bytes) or not all(isinstance(tool, Mapping) for tool in raw):
        _refuse(f"tools must be a list of objects, got {_short(raw)}")
    plain = [_plain(tool, "tools") for tool in raw]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in plain] or None


def _normalize_kwargs(raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        raw = _parse_json(raw, "chat_template_kwargs") if raw.strip() else None
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        _refuse(f"chat_template_kwargs must be an object, got {_short(raw)}")
    taken = [key for key in raw if key in _RESERVED_KWARGS]
    if taken:
        _refuse(f"chat_template_kwargs may not set {taken}: they are given by the row itself")
    # Arrow structs fill absent fields with None; a None argument is the same as none given.
    return {str(key): _plain(value, "chat_template_kwargs") for key, value in raw.items() if value is not None}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy out of JSON types only: templates come from strangers and must not meet objects with methods."""
    if value is None or type(value) in (str, int, bool):
        return value
    if depth > MAX_DEPTH:
        _refuse(f"{where}: data of more than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, datetime.date | datetime.time) and not getattr(value, "nanosecond", 0):  # pandas has those, Python not
        return value.isoformat()
    _refuse(f"{where}: {value if type(value) is float else 'a ' + type(value).__name__} is no JSON value")


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(f"{what} is not JSON ({error}): {_short(text)}")


def _refuse(message: str) -> NoReturn:
    raise RowRefused(RejectReason.INVALID_MESSAGES, message, stage="read", side="source")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 120 else text[:117] + "..."
