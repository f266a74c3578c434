"""The first look at the sources that a plan needs: one sequential pass over each file.

`scan_source` reads a file once in blocks: digest, sizes, and checkpoints, places between two lines where a part may be cut. It is a plain
function of picklable arguments and runs in any worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.plan import PlannedSource
from xtok import storage
from xtok.errors import StorageError
from xtok.shards.sources import HashingReader, SourceFile, decompressed

__all__ = ["CHECKPOINT_COLUMNS", "SourceScan", "scan_lines", "scan_source"]

# Columns of a checkpoints array. weight: bytes so far, what parts are balanced by; position: byte offset (jsonl) or row
# (Parquet); lines, rows: how many lie before.
CHECKPOINT_COLUMNS = ("weight", "position", "lines", "rows")
_BLOCK_BYTES = 1 << 20
_IS_BLANK = np.zeros(256, dtype=bool)
_IS_BLANK[[9, 10, 11, 12, 13, 32]] = True


@dataclass(frozen=True, slots=True)
class SourceScan:
    """A source as planned, and int64 [num_checkpoints, 4] CHECKPOINT_COLUMNS, ascending, the last one at the file's end."""

    planned: PlannedSource
    checkpoints: npt.NDArray[np.int64]


def scan_source(source: SourceFile, spacing_bytes: int) -> SourceScan:
    """One pass over a source; checkpoints about `spacing_bytes` apart. Raises StorageError when it cannot be read."""
    if source.format == "parquet":
        return _scan_parquet(source, spacing_bytes)
    with storage.open_read(source.url) as raw:
        hashing = HashingReader(raw)
        with decompressed(source.url, source.compression, hashing) as stream:
            checkpoints = scan_lines(stream, spacing_bytes)
        digest = hashing.finish()
    _, stream_bytes, num_lines, num_rows = checkpoints[-1].tolist()
    planned = PlannedSource(
        name=source.name,
        format="jsonl",
        compression=source.compression,
        num_bytes=hashing.num_bytes,
        sha256=digest,
        stream_bytes=stream_bytes,
        num_lines=num_lines,
        num_rows=num_rows,
    )
    return SourceScan(planned, checkpoints)


def scan_lines(stream: BinaryIO, spacing_bytes: int) -> npt.NDArray[np.int64]:
    """Checkpoints int64 [num_checkpoints, 4] of a stream of lines; the last one is the stream's end."""
    found: list[npt.NDArray[np.int64]] = []
    base = lines = rows = last_cell = 0
    open_line_has_content = False
    while block := stream.read(_BLOCK_BYTES):
        data = np.frombuffer(block, dtype=np.uint8)
        newlines = np.flatnonzero(data == 10)
        has_content = _pieces_with_content(block, data, newlines)
        has_content[0] |= open_line_has_content
        open_line_has_content = bool(has_content[-1])
        if len(newlines):
            ends = base + newlines + 1
            rows_before = rows + np.cumsum(has_content[:-1])
            cells = ends // spacing_bytes
            chosen = np.flatnonzero(np.diff(cells, prepend=last_cell))
            found.append(np.stack([ends[chosen], ends[chosen], lines + chosen + 1, rows_before[chosen]], axis=1))
            last_cell, rows, lines = int(cells[-1]), int(rows_before[-1]), lines + len(newlines)
            last_end = int(ends[-1])
        else:
            last_end = -1
        base += len(block)
        unfinished = last_end != base
    if base and unfinished:
        lines, rows = lines + 1, rows + open_line_has_content
    found.append(np.array([[base, base, lines, rows]], dtype=np.int64))
    return np.concatenate(found)


def _pieces_with_content(block: bytes, data: npt.NDArray[np.uint8], newlines: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool [num newlines + 1]: whether each piece between newlines holds more than blanks. Few pieces begin with a blank."""
    starts = np.concatenate([[0], newlines + 1])
    ends = np.concatenate([newlines, [len(data)]])
    has_content = ends > starts
    first = data[np.minimum(starts, len(data) - 1)]
    for piece in np.flatnonzero(has_content & _IS_BLANK[first]):
        has_content[piece] = not block[starts[piece] : ends[piece]].isspace()
    return has_content


def _scan_parquet(source: SourceFile, spacing_bytes: int) -> SourceScan:
    digest, num_bytes = storage.sha256(source.url), storage.size(source.url)
    try:
        with storage.open_arrow(source.url) as handle, pq.ParquetFile(handle) as parquet:
            groups = [parquet.metadata.row_group(group) for group in range(parquet.metadata.num_row_groups)]
            shape = [(group.num_rows, group.total_byte_size) for group in groups]
    except (pa.ArrowException, OSError) as error:
        raise error if isinstance(error, StorageError) else storage.storage_error("read", source.url, error) from error
    found, rows, weight = [], 0, 0
    for num_rows, group_bytes in shape:
        step = max(1, min(num_rows, spacing_bytes * num_rows // max(1, group_bytes)))
        marks = np.append(np.arange(step, num_rows, step, dtype=np.int64), num_rows)
        weights = weight + marks * group_bytes // max(1, num_rows)
        found.append(np.stack([weights, rows + marks, rows + marks, rows + marks], axis=1))
        rows, weight = rows + num_rows, weight + group_bytes
    checkpoints = np.concatenate([*found, np.array([[weight, rows, rows, rows]], dtype=np.int64)])
    planned = PlannedSource(
        name=source.name, format="parquet", num_bytes=num_bytes, sha256=digest, stream_bytes=weight, num_lines=rows, num_rows=rows
    )
    return SourceScan(planned, checkpoints)
