"""One line or one Parquet value to one row: text or conversation, sample_id, loss multiplier; or a RowRefused that says why.

orjson parses every line; only a line that it refuses is looked at again, slowly, to tell what is wrong with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from schemas.tables import RejectReason
from xtok.chat.conversation import Conversation
from xtok.chat.messages import ChatFields, conversation_from_row
from xtok.errors import RowRefused

__all__ = ["ParsedRow", "RowFields", "content_digest", "parse_line", "parse_record", "without_null_fields"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MISSING = object()
_MAX_MULTIPLIER = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class RowFields:
    """Which fields hold what, and the size limit of a text in bytes of UTF-8.

    chat: where chats stand; None in text mode. only_ids: a row that has an id is not looked into.
    """

    text: str
    id: str | None
    loss_multiplier: str | None
    max_document_bytes: int
    chat: ChatFields | None = None
    only_ids: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        content = (self.text,) if self.chat is None else self.chat.columns
        return content + tuple(name for name in (self.id, self.loss_multiplier) if name is not None)

    @property
    def max_line_bytes(self) -> int:
        """A longer line is refused unread. JSON escapes take up to 6 bytes for one; the rest leaves room for other fields."""
        return 8 * self.max_document_bytes + (1 << 20)


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """An accepted row. conversation: chat mode, where text is empty. num_characters: of all its strings."""

    text: str
    sample_id: str
    loss_multiplier: float
    num_characters: int
    conversation: Conversation | None = None


def content_digest(text: str) -> str:
    """The sample_id of a row without an id: the first 128 bits of the text's SHA-256, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def parse_line(line: bytes, fields: RowFields) -> ParsedRow:
    """One line of JSON, its line end optional. Raises RowRefused."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        record = _parse_refused_line(line, error)
    if type(record) is not dict:
        _refuse(RejectReason.NOT_AN_OBJECT, f"the line holds {_kind(record)}, not an object")
    # orjson turns integers beyond 64 bits into floats.
    if fields.id is not None and type(record.get(fields.id)) is float:
        record = _parse_exactly(line)
    row = parse_record(record, fields)
    if row.conversation is not None and row.conversation.has_float:
        row = parse_record(_parse_exactly(line), fields)
    return row


def parse_record(record: dict[str, Any], fields: RowFields, names: Sequence[str] | None = None) -> ParsedRow:
    """A row as a mapping of field names. names: of all its fields, where `record` holds only those that are read. Raises RowRefused,
    which bears the row's id where that can be read."""
    try:
        if fields.only_ids and (sample_id := _sample_id(record, fields)) is not None:
            return ParsedRow("", sample_id, 1.0, 0)
        if fields.chat is not None:
            return _parse_chat(record, fields, fields.chat)
        return _parse_text(record, fields, list(record) if names is None else names)
    except RowRefused as refused:
        with suppress(RowRefused):
            refused.sample_id = _sample_id(record, fields)
        raise


def _parse_text(record: dict[str, Any], fields: RowFields, names: Sequence[str]) -> ParsedRow:
    text = record.get(fields.text, _MISSING)
    if type(text) is not str:
        if text is _MISSING:
            _refuse(RejectReason.MISSING_TEXT, f"the row has no field {fields.text!r} (it has {_shown(names)})")
        if text is None:
            _refuse(RejectReason.MISSING_TEXT, f"the field {fields.text!r} is null")
        _refuse(RejectReason.TEXT_NOT_STRING, f"the field {fields.text!r} holds {_kind(text)}, not a string")
    if not text:
        _refuse(RejectReason.EMPTY_TEXT, f"the field {fields.text!r} is an empty string")
    if 4 * len(text) > fields.max_document_bytes:
        _check_size(text, fields)
    if not text.isascii():
        _check_surrogates(text, fields.text)
    sample_id = _sample_id(record, fields) or content_digest(text)
    return ParsedRow(text, sample_id, _loss_multiplier(record, fields), len(text))


def without_null_fields(value: Any) -> Any:
    """A value out of Parquet without the null fields of its structs, at any depth.

    Arrow gives every struct of a column the fields of all of them, so a tool call would get the arguments of every other tool, null.
    """
    if type(value) is dict:
        return {name: without_null_fields(item) for name, item in value.items() if item is not None}
    return [without_null_fields(item) for item in value] if type(value) is list else value


def _parse_chat(record: dict[str, Any], fields: RowFields, chat: ChatFields) -> ParsedRow:
    conversation = conversation_from_row(record, chat)
    num_characters = len(conversation.text)
    if 4 * num_characters > fields.max_document_bytes:
        _check_size(conversation.text, fields)
    sample_id = _sample_id(record, fields) or content_digest(_canonical(conversation))
    return ParsedRow("", sample_id, _loss_multiplier(record, fields), num_characters, conversation)


def _canonical(conversation: Conversation) -> str:
    """A conversation as one text: equal for equal conversations, whatever form the row had."""
    value = [conversation.messages, conversation.tools, conversation.template_kwargs]
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _sample_id(record: dict[str, Any], fields: RowFields) -> str | None:
    """The row's own id, None where it has none."""
    value = record.get(fields.id) if fields.id is not None else None
    if type(value) is str and value:
        if not value.isascii():
            _check_surrogates(value, str(fields.id))
        return value
    if type(value) is int:
        return str(value)
    if value is None:
        return None
    _refuse(RejectReason.INVALID_ID, f"the field {fields.id!r} holds {value!r:.80}: an id is a non-empty string or an integer")


def _loss_multiplier(record: dict[str, Any], fields: RowFields) -> float:
    value = record.get(fields.loss_multiplier) if fields.loss_multiplier is not None else None
    if value is None:
        return 1.0
    if type(value) not in (int, float) or not 0 <= value <= _MAX_MULTIPLIER:
        _refuse(
            RejectReason.INVALID_LOSS_MULTIPLIER,
            f"the field {fields.loss_multiplier!r} holds {value!r:.80}: a loss multiplier is a finite number from 0 "
            f"to {_MAX_MULTIPLIER:.3g}, the largest in 32 bits",
        )
    return float(value)


def _check_size(text: str, fields: RowFields) -> None:
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > fields.max_document_bytes:
        _refuse(
            RejectReason.DOCUMENT_TOO_LONG,
            f"the text has {num_bytes} bytes, max_document_bytes is {fields.max_document_bytes}",
        )


def _check_surrogates(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse(
            RejectReason.LONE_SURROGATE,
            f"the field {field!r} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
        )


def _parse_refused_line(line: bytes, error: orjson.JSONDecodeError) -> Any:
    """What a line holds that orjson refuses; a byte-order mark and lone surrogates in unused fields do no harm."""
    line = line.removeprefix(_BYTE_ORDER_MARK)
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as invalid:
        place = f"byte 0x{line[invalid.start]:02X} at position {invalid.start} of the line"
        _refuse(RejectReason.INVALID_UTF8, f"{place}: {invalid.reason}")
    return _parse_exactly(line, str(error))


def _parse_exactly(line: bytes, problem: str = "") -> Any:
    """The line by Python's own parser, which keeps integers of any size. RowRefused with its words, or else with `problem`."""
    try:
        return json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as invalid:
        _refuse(RejectReason.INVALID_JSON, str(invalid) or problem)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(reason: RejectReason, message: str) -> NoReturn:
    raise RowRefused(reason, message, stage="read", side="source")


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return (shown + (", …" if len(names) > 8 else ""))[:200] or "no fields"


def _kind(value: Any) -> str:
    """What a value is called: in JSON, or in Parquet where JSON has nothing like it."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    kind = kinds.get(type(value))
    return f"a value of type {type(value).__name__}" if kind is None else f"a JSON {kind}"
