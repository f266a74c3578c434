"""plan.json: what will be built from what, frozen before any work begins.

A pure function of the sources' bytes, the configuration and the tokenizers: it holds no time, host, absolute path, engine,
number of workers or threshold, so that every run of one configuration writes the same bytes.
"""

from __future__ import annotations

import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["FORMAT_VERSION", "Plan", "PlannedPart", "PlannedSide", "PlannedSource", "Segment"]

# Raised whenever the bytes we write for the same input change: parts of an older version are then built anew.
FORMAT_VERSION = 2


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlannedSource(_Frozen):
    """One source file. name: shortest unique trailing path. num_bytes, sha256: of the file as stored; stream_bytes: decompressed.

    num_lines counts line ends (and a last line without one), blank lines included; num_rows leaves blank lines out.
    """

    name: str
    format: Literal["jsonl", "parquet"]
    compression: Literal["gzip", "zstd"] | None = None
    num_bytes: int
    sha256: str
    stream_bytes: int
    num_lines: int
    num_rows: int


class Segment(_Frozen):
    """A run of one source: half-open [start, end), bytes of the decompressed stream (jsonl) or rows (Parquet).

    first_line: 1-based line (Parquet: row) number at `start`. first_idx: ordinal of the first row over the whole plan.
    """

    source: int
    start: int
    end: int
    first_line: int
    first_idx: int


class PlannedPart(_Frozen):
    """One unit of work. duplicates: `idx` of rows whose sample_id an earlier row of the plan has; they become rejects."""

    index: int
    segments: tuple[Segment, ...]
    num_bytes: int
    num_rows: int
    duplicates: tuple[int, ...] = ()


class PlannedSide(_Frozen):
    """One model's tokenizer as it was found.

    name: last path component of its folder, or the hub id; for people, never compared. content_fingerprint decides equality;
    environment (library versions) decides whether parts are rebuilt. same_as_student: a teacher that needs no files.
    prefix_ids, suffix_ids: what is put around every text (empty without add_special_tokens). backend: the tokenizer that
    encodes, backend_note: why not the fast one, when it is not.
    Chat mode: chat: digest of the template, its arguments, what the side accepts, and whether a teacher's first chunk is dropped;
    renderer: the engine that renders, renderer_note: why not the fast one.
    """

    name: str
    content_fingerprint: str
    environment: dict[str, str]
    context_length: int
    add_special_tokens: bool
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int
    route: Literal["byte", "offset"]
    route_reason: str
    backend: str
    backend_note: str | None = None
    same_as_student: bool = False
    chat: dict[str, Any] = {}
    renderer: str | None = None
    renderer_note: str | None = None


class Plan(_Frozen):
    """The frozen plan.

    config: the part of the configuration that shapes the output, in its portable form. environment: versions of the libraries
    that write the tables; another version builds the parts anew.
    """

    format_version: int = FORMAT_VERSION
    mode: Literal["text", "chat"]
    config: dict[str, Any]
    environment: dict[str, str]
    render_date: datetime.date | None = None
    sources: tuple[PlannedSource, ...]
    student: PlannedSide
    teachers: tuple[PlannedSide, ...]
    parts: tuple[PlannedPart, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all sources, rejects counted."""
        return sum(part.num_rows for part in self.parts)
