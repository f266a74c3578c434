"""A canonical conversation, and what can be asked of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from schemas.tables import RejectReason
from xtok.errors import RowRefused

__all__ = ["Conversation", "Message", "engines_differ", "holds_float", "strings_of"]

Message = dict[str, Any]

# Blanks and line ends to Python (`strip`, `split`, `splitlines`) and not all of them to Rust.
_ODD_BLANKS: Final = ("\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2028", "\u2029")
_MAX_INTEGER: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Conversation:
    """One canonical conversation (see `xtok.chat.messages`); `template_kwargs` are the row's own, over those of the side.

    has_float: whether a float stands anywhere in it. by_reference: whether it holds what template engines treat differently
    (`engines_differ`). text: all strings it brings (`strings_of`), joined by NUL, so that most questions about them are one search.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    has_float: bool
    by_reference: bool
    text: str

    @classmethod
    def of(cls, messages: list[Message], tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]) -> Conversation:
        """From canonical parts. RowRefused (lone_surrogate) where a string holds half of a surrogate pair."""
        strings: list[str] = []
        nested: list[str] = []
        is_odd = False
        for message in messages:
            for key, value in message.items():
                if key == "thinking" or key == "role":
                    continue
                if key != "content":
                    strings.append(key)
                if type(value) is str:
                    strings.append(value)
                else:
                    is_odd |= _collect(value, strings, nested)
        is_odd |= tools is not None and _collect(tools, strings, nested)
        is_odd |= _collect(template_kwargs, strings, nested)
        text = "\0".join(strings)
        # As `engines_differ`, in fewer looks; that keys are looked at too only sends a row to the reference.
        by_reference = is_odd or not all(map(_prints_plainly, nested)) or _has_odd_blank(text)
        has_float = by_reference and holds_float((messages, tools, template_kwargs))
        conversation = cls(messages, tools, template_kwargs, has_float, by_reference, text)
        _check_text(conversation)
        return conversation

    @property
    def final(self) -> Message:
        """The last message, which holds what is supervised."""
        return self.messages[-1]


def _check_text(conversation: Conversation) -> None:
    """RowRefused where a string holds half of a surrogate pair, which no tokenizer can read."""
    if conversation.text.isascii():  # a flag of the string, no scan
        return
    try:
        conversation.text.encode()
    except UnicodeEncodeError:
        for where, text in strings_of(conversation):
            _refuse_surrogates(where, text)


def _refuse_surrogates(where: str, text: str) -> None:
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


def engines_differ(messages: list[Message], tools: Any, template_kwargs: Mapping[str, Any]) -> bool:
    """Whether Jinja and minijinja may treat a row's data differently, the same template given.

    Floats and integers beyond 64 bits print differently; None in data is an error in a loop or a join to one engine and empty to
    the other; lists and objects print the strings in them escaped by another table; and see `_ODD_BLANKS`.
    """
    if any(_prints_differently(value) for value in template_kwargs.values()) or (
        tools is not None and _prints_differently(tools)
    ):
        return True
    for message in messages:
        for value in message.values():
            if _has_odd_blank(value) if type(value) is str else _prints_differently(value):
                return True
    return False


def _has_odd_blank(text: str) -> bool:
    if "\r" in text and "\r" in text.replace("\r\n", ""):
        return True
    return any(blank in text for blank in _ODD_BLANKS)


def _prints_plainly(text: str) -> bool:
    return text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable()


def _prints_differently(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return not _prints_plainly(value)
    if isinstance(value, Mapping):
        return any(map(_prints_differently, value)) or any(map(_prints_differently, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_prints_differently, value))
    return _is_odd_scalar(value)


def _is_odd_scalar(value: Any) -> bool:
    """What is no string and prints differently: a float, an integer beyond 64 bits, None."""
    return type(value) is not bool and (type(value) is not int or not -_MAX_INTEGER <= value <= _MAX_INTEGER)


def strings_of(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """(where, text) of every string a row brings, keys of objects included."""
    for index, message in enumerate(conversation.messages):
        where = f"message {index} ({message['role']})"
        for key, value in message.items():
            if key == "thinking" or key == "role":
                continue
            if key != "content":
                yield where, key
            if type(value) is str:
                yield where, value
            else:
                yield from ((where, text) for text in _nested(value))
    yield from (("tools", text) for text in _nested(conversation.tools))
    yield from (("chat_template_kwargs", text) for text in _nested(conversation.template_kwargs))


def _collect(value: Any, strings: list[str], nested: list[str]) -> bool:
    """Appends every string in JSON-like data to both, keys of objects included, in the order of `strings_of`.

    True where it holds an odd scalar.
    """
    kind = type(value)
    if kind is str:
        strings.append(value)
        nested.append(value)
        return False
    is_odd = False
    if kind is dict:
        for key, item in value.items():
            strings.append(key)
            nested.append(key)
            is_odd |= _collect(item, strings, nested)
    elif kind is list:
        for item in value:
            is_odd |= _collect(item, strings, nested)
    else:
        is_odd = _is_odd_scalar(value)
    return is_odd


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
