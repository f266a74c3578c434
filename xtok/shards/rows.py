"""Reading the rows of one part: blocks of accepted rows, and every other row as a reject with its line number and reason.

Lines end at a newline byte and nowhere else (U+2028 and U+0085 inside a string are text); a carriage return before it is blank.
Blank lines are no rows: they are counted and get no `idx`. Memory is bounded by one block, whatever the part or a line holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.plan import PlannedSource, Segment
from schemas.tables import RejectReason
from xtok import storage
from xtok.chat.conversation import Conversation
from xtok.errors import RowRefused, StorageError
from xtok.shards.parse import ParsedRow, RowFields, parse_line, parse_record, without_null_fields
from xtok.shards.sources import decompressed

__all__ = ["BLOCK_BYTES", "Reject", "RowBlock", "SourceAt", "count_rows", "read_blocks", "split_lines"]

BLOCK_BYTES = 2_000_000
_READ_BYTES = 1 << 20
_PARQUET_BATCH_ROWS = 128
_LineOrRefusal = bytes | RowRefused


@dataclass(frozen=True, slots=True)
class Reject:
    """One line of the rejects table. sample_id: None where the row could not be read that far."""

    source: str
    line: int
    sample_id: str | None
    stage: str
    side: str
    reason: str
    message: str


@dataclass(slots=True)
class RowBlock:
    """Accepted rows, column by column, in plan order, and the rejects met on the way.

    text: empty strings in chat mode, where conversation holds the rows (else empty). size: characters of each row.
    num_rows: rows read, rejects counted. num_characters: of all rows. sources: names of the sources met, in plan order.
    """

    idx: list[int] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    line: list[int] = field(default_factory=list)
    sample_id: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    conversation: list[Conversation] = field(default_factory=list)
    loss_multiplier: list[float] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    num_rows: int = 0
    num_characters: int = 0
    sources: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceAt:
    """A planned source and where this run finds it."""

    planned: PlannedSource
    url: str


def read_blocks(
    segments: Sequence[Segment],
    sources: dict[int, SourceAt],
    fields: RowFields,
    duplicates: frozenset[int],
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[RowBlock]:
    """The rows of a part, in blocks of about `block_bytes` characters.

    sources: by index, at least those of `segments`. duplicates: `idx` of the rows to refuse as duplicates. Raises StorageError
    when a source cannot be read.
    """
    block = RowBlock()
    for segment in segments:
        source = sources[segment.source]
        name = source.planned.name
        read = _parquet_rows if source.planned.format == "parquet" else _line_rows
        for idx, (line, row) in enumerate(read(source, segment, fields), start=segment.first_idx):
            block.num_rows += 1
            block.sources[name] = None
            if isinstance(row, RowRefused):
                block.rejects.append(Reject(name, line, row.sample_id, row.stage, row.side, row.reason, row.message))
            elif idx in duplicates:
                block.rejects.append(_duplicate(name, line, row.sample_id))
            else:
                block.idx.append(idx)
                block.source.append(name)
                block.line.append(line)
                block.sample_id.append(row.sample_id)
                block.text.append(row.text)
                block.loss_multiplier.append(row.loss_multiplier)
                block.size.append(row.num_characters)
                block.num_characters += row.num_characters
                if row.conversation is not None:
                    block.conversation.append(row.conversation)
            if block.num_characters >= block_bytes or block.num_rows >= block_bytes // 64:
                yield block
                block = RowBlock()
    if block.num_rows:
        yield block


def _duplicate(source: str, line: int, sample_id: str) -> Reject:
    message = f"an earlier row has the id {sample_id!r:.200}; only the first in plan order is used, even if it is refused later"
    return Reject(source, line, sample_id, "read", "source", RejectReason.DUPLICATE_ID.value, message)


def _line_rows(source: SourceAt, segment: Segment, fields: RowFields) -> Iterator[tuple[int, ParsedRow | RowRefused]]:
    with decompressed(source.url, source.planned.compression) as stream:
        _skip(stream, segment.start, seekable=source.planned.compression is None)
        lines = split_lines(stream, segment.end - segment.start, fields.max_line_bytes, source.url)
        for number, line in enumerate(lines, start=segment.first_line):
            if isinstance(line, RowRefused):
                yield number, line
            elif line and not line.isspace():
                try:
                    yield number, parse_line(line, fields)
                except RowRefused as refused:
                    yield number, refused


def split_lines(stream: BinaryIO, num_bytes: int, max_line_bytes: int, url: str) -> Iterator[_LineOrRefusal]:
    """The lines of the next `num_bytes` bytes, without their newlines; a line over the limit as a refusal, its bytes dropped."""
    pieces: list[bytes] = []
    held = 0
    while num_bytes > 0:
        data = stream.read(min(_READ_BYTES, num_bytes))
        if not data:
            raise StorageError(f"{url} ended {num_bytes} bytes early: it changed since the plan was made; run the command again")
        num_bytes -= len(data)
        first, *rest = data.split(b"\n")
        held += len(first)
        if held <= max_line_bytes:
            pieces.append(first)
        else:
            pieces.clear()
        if rest:
            yield _whole(pieces, held, max_line_bytes)
            yield from rest[:-1]
            pieces, held = [rest[-1]], len(rest[-1])
    if held:
        yield _whole(pieces, held, max_line_bytes)


def _whole(pieces: list[bytes], held: int, max_line_bytes: int) -> _LineOrRefusal:
    if held <= max_line_bytes:
        return b"".join(pieces)
    message = f"the line has {held} bytes, more than the {max_line_bytes} that max_document_bytes allows for"
    return RowRefused(RejectReason.DOCUMENT_TOO_LONG, message, stage="read", side="source")


def _skip(stream: BinaryIO, num_bytes: int, *, seekable: bool) -> None:
    if seekable:
        stream.seek(num_bytes)
        return
    while num_bytes > 0 and (block := stream.read(min(_READ_BYTES, num_bytes))):
        num_bytes -= len(block)


def _parquet_rows(source: SourceAt, segment: Segment, fields: RowFields) -> Iterator[tuple[int, ParsedRow | RowRefused]]:
    try:
        with storage.open_arrow(source.url) as handle, pq.ParquetFile(handle) as parquet:
            names = parquet.schema_arrow.names
            columns = [name for name in fields.columns if name in names]
            start, groups = _row_groups(parquet.metadata, segment)
            line = start
            for batch in parquet.iter_batches(_PARQUET_BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
                for record in _records(batch):
                    line += 1
                    if segment.start < line <= segment.end:
                        yield line, _parse(record, fields, names)
    except (pa.ArrowException, OSError) as error:
        raise error if isinstance(error, StorageError) else storage.storage_error("read", source.url, error) from error


def _row_groups(metadata: pq.FileMetaData, segment: Segment) -> tuple[int, list[int]]:
    """Rows before the first row group that the segment touches, and the row groups that it touches."""
    groups: list[int] = []
    first = position = 0
    for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        if position < segment.end and position + num_rows > segment.start:
            first = first if groups else position
            groups.append(group)
        position += num_rows
    return first, groups


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, object] | RowRefused]:
    """The batch's rows; as refusals those with a value that Python has no object for: bad UTF-8, a time in nanoseconds."""
    try:
        records: list[dict[str, object]] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            for row in range(batch.num_rows):
                yield from _records(batch.slice(row, 1))
            return
        reason = RejectReason.INVALID_UTF8 if isinstance(error, UnicodeDecodeError) else RejectReason.INVALID_JSON
        yield RowRefused(reason, str(error), stage="read", side="source")
    else:
        yield from records


def _parse(record: dict[str, object] | RowRefused, fields: RowFields, names: Sequence[str]) -> ParsedRow | RowRefused:
    if isinstance(record, RowRefused):
        return record
    try:
        return parse_record(record if fields.chat is None else without_null_fields(record), fields, names)
    except RowRefused as refused:
        return refused


def count_rows(data: bytes) -> int:
    """Rows among the lines of `data`: the slow statement of the rule that planning and reading share."""
    return sum(1 for line in data.split(b"\n") if line and not line.isspace())
