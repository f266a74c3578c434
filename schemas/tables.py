"""Arrow schemas of the dataset's tables, and the reasons a row can be refused for.

Student and teacher tables of one part have the same rows in the same order, so that a reader zips them and joins nothing. A row
that only teacher i refuses is null in teacher i's table, but for `sample_id` and `idx`. Nothing is padded. Spans of `regions` are
half-open token spans of that side's own ids.
"""

from __future__ import annotations

from enum import StrEnum

import pyarrow as pa

__all__ = [
    "REGION_TYPE",
    "REJECT_SCHEMA",
    "RENDERED_SCHEMA",
    "STUDENT_SCHEMA",
    "TEACHER_SCHEMA",
    "RejectReason",
    "reject_side",
]


class RejectReason(StrEnum):
    """Why a row was refused. The value is what stands in the rejects table."""

    # read: the row as it stands in the source
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    LONE_SURROGATE = "lone_surrogate"
    MISSING_TEXT = "missing_text"
    TEXT_NOT_STRING = "text_not_string"
    EMPTY_TEXT = "empty_text"
    INVALID_ID = "invalid_id"
    DUPLICATE_ID = "duplicate_id"
    INVALID_LOSS_MULTIPLIER = "invalid_loss_multiplier"
    DOCUMENT_TOO_LONG = "document_too_long"
    # tokenize
    NO_TOKENS = "no_tokens"
    OVERLENGTH = "overlength"
    NO_SHARED_CUT = "no_shared_cut"
    # render (chat mode)
    INVALID_MESSAGES = "invalid_messages"
    NO_FINAL_ASSISTANT = "no_final_assistant"
    EMPTY_FINAL_CONTENT = "empty_final_content"
    TEMPLATE_ERROR = "template_error"
    CONTENT_NOT_VERBATIM = "content_not_verbatim"
    REASONING_NOT_VERBATIM = "reasoning_not_verbatim"
    DROPPED_REASONING = "dropped_reasoning"
    EMBEDDED_SPECIAL_TOKEN = "embedded_special_token"
    BORDER_TOKEN = "border_token"
    UNKNOWN_LAYOUT = "unknown_layout"
    LITERAL_DELIMITER = "literal_delimiter"
    REGION_MISMATCH = "region_mismatch"
    NEEDS_NATIVE_ALIGNMENT = "needs_native_alignment"


def reject_side(teacher_index: int | None) -> str:
    """`student`, or `teacher=<index>`: the values of the rejects table's `side` besides `source`."""
    return "student" if teacher_index is None else f"teacher={teacher_index}"


REGION_TYPE = pa.struct([pa.field("name", pa.string()), pa.field("start", pa.int32()), pa.field("end", pa.int32())])

# No element is ever null, and saying so saves a level a value in Parquet.
_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_FLAGS = pa.list_(pa.field("element", pa.bool_(), nullable=False))
_REGIONS = pa.list_(pa.field("element", REGION_TYPE, nullable=False))

STUDENT_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("idx", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("document_id", pa.string(), nullable=False),
        pa.field("window", pa.int32(), nullable=False),
        pa.field("input_ids", _IDS),
        pa.field("token_mask", _FLAGS),
        pa.field("regions", _REGIONS),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("loss_multiplier", pa.float32(), nullable=False),
    ]
)

TEACHER_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("idx", pa.int64(), nullable=False),
        pa.field("input_ids", _IDS),
        pa.field("token_mask", _FLAGS),
        pa.field("student_chunk_id", _IDS),
        pa.field("teacher_chunk_id", _IDS),
        pa.field("pair_is_correct", _FLAGS),
        pa.field("regions", _REGIONS),
        pa.field("route", pa.string()),
        pa.field("coverage", pa.float32()),
    ]
)

REJECT_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string()),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("side", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)

# Chat mode: what each model was shown, for the rows of the side's other table, in its order; null where the side refuses the row.
# All places are half-open spans of bytes of `text` in UTF-8. content: all that is supervised before the end-of-turn mark.
# regions: its parts, the end-of-turn mark last where the template writes one. calls_start: where the answer's tool calls begin,
# null without any. reasoning: "none" (the row has none), "shown" or "dropped" by the template.
RENDERED_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("idx", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("content_start", pa.int64()),
        pa.field("content_end", pa.int64()),
        pa.field("regions", _REGIONS),
        pa.field("calls_start", pa.int64()),
        pa.field("reasoning", pa.string()),
    ]
)
