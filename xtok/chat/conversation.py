"""A canonical conversation, and what can be asked of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.tables import RejectReason
from xtok.errors import RowRefused

__all__ = ["Conversation", "Message", "check_text", "holds_float", "strings_of"]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One canonical conversation (see `xtok.chat.messages`); `template_kwargs` are the row's own, over those of the side.

    has_float: whether a float stands anywhere in it, which engines print differently.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    has_float: bool

    @property
    def final(self) -> Message:
        """The last message, which holds what is supervised."""
        return self.messages[-1]


def check_text(conversation: Conversation) -> None:
    """RowRefused (lone_surrogate) where a string holds half of a surrogate pair, which no tokenizer can read."""
    for where, text in strings_of(conversation):
        if text.isascii():  # a flag of the string, no scan
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowRefused(
                RejectReason.LONE_SURROGATE,
                f"{where} holds the lone surrogate U+{ord(text[error.start]):04X}, which is no character",
                stage="read",
                side="source",
            ) from error


def holds_float(value: Any) -> bool:
    """Whether a float stands anywhere in JSON-like data."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return False
    if isinstance(value, Mapping):
        return any(holds_float(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_float(item) for item in value)
    return isinstance(value, float)


def strings_of(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """(where, text) of every string a row brings, keys of objects included."""
    for index, message in enumerate(conversation.messages):
        where = f"message {index} ({message['role']})"
        for key, value in message.items():
            if key == "thinking" or key == "role":
                continue
            if type(value) is str:
                yield where, value
            else:
                yield from ((where, text) for text in _nested(value))
    yield from (("tools", text) for text in _nested(conversation.tools))
    yield from (("chat_template_kwargs", text) for text in _nested(conversation.template_kwargs))


def _nested(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _nested(item)
    elif isinstance(value, list):
        for item in value:
            yield from _nested(item)
