"""Writing one table of a part: full row groups as rows arrive, then a check of what is on disk before it gets its name.

Encodings were chosen by measuring on 417 real documents (bytes per value, zstd 3): ids 1.40 plain against 1.81 with a dictionary
and 2.21 delta-packed; chunk ids 0.2 to 0.3 delta-packed; masks 0.01 run-length. Memory is bounded by a row group and a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.manifest import FileEntry
from xtok import storage
from xtok.errors import StorageError
from xtok.shards.timing import stage

__all__ = ["TableWriter", "check_file", "file_holds"]

_DELTA = ("idx", "line", "window", "num_tokens", "content_start", "content_end", "calls_start")
_DELTA_LISTS = ("student_chunk_id", "teacher_chunk_id")
_PLAIN_LISTS = ("input_ids",)
_FLAG_LISTS = ("token_mask", "pair_is_correct")
_DICTIONARY = ("source", "route", "stage", "side", "reason", "reasoning")
_STATISTICS = ("sample_id", "idx", "source", "line", "document_id", "num_tokens", "coverage")


class TableWriter:
    """A Parquet file written in row groups of exactly `row_group_rows` rows, the last one smaller.

    final_url: what the file will be called, for errors: several are written at once, and the one that fails is to be named.
    """

    def __init__(self, path: Path, final_url: str, schema: pa.Schema, row_group_rows: int) -> None:
        self._schema, self._final_url = schema, final_url
        self._row_group_rows = row_group_rows
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self.num_rows = 0
        with storage.reported("write", final_url):
            self._writer = pq.ParquetWriter(str(path), schema, **_options(schema))

    def append(self, columns: Mapping[str, pa.Array]) -> None:
        """Adds rows, given column by column."""
        table = pa.Table.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)
        self._pending.append(table)
        self._num_pending += table.num_rows
        self.num_rows += table.num_rows
        whole = self._num_pending - self._num_pending % self._row_group_rows
        if whole:
            with stage("write"):
                self._flush(whole)

    def close(self) -> None:
        """Writes what is left, and the footer."""
        if self._num_pending:
            self._flush(self._num_pending)
        with storage.reported("write", self._final_url):
            self._writer.close()

    def abandon(self) -> None:
        """Gives the file handle up after an error; the file is worthless."""
        try:
            self._writer.close()
        except (OSError, pa.ArrowException):
            pass

    def _flush(self, num_rows: int) -> None:
        table = pa.concat_tables(self._pending)
        with storage.reported("write", self._final_url):
            self._writer.write_table(table.slice(0, num_rows), row_group_size=self._row_group_rows)
        self._num_pending -= num_rows
        self._pending = [table.slice(num_rows)] if self._num_pending else []


def _options(schema: pa.Schema) -> dict[str, Any]:
    names = set(schema.names)
    encodings = {name: "DELTA_BINARY_PACKED" for name in _DELTA if name in names}
    for columns, encoding in ((_DELTA_LISTS, "DELTA_BINARY_PACKED"), (_PLAIN_LISTS, "PLAIN"), (_FLAG_LISTS, "RLE")):
        encodings |= {f"{name}.list.element": encoding for name in columns if name in names}
    return {
        "version": "2.6",
        "data_page_version": "2.0",
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [name for name in _DICTIONARY if name in names],
        "column_encoding": encodings,
        "write_statistics": [name for name in _STATISTICS if name in names],
    }


def check_file(temporary: Path, path: str, num_rows: int) -> FileEntry:
    """Reads a finished file back from the disk: footer, rows, digest. path: its final place, relative to the dataset."""
    try:
        metadata = pq.read_metadata(str(temporary))
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{path} cannot be read back after writing: {error}; the disk is at fault") from error
    groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if metadata.num_rows != num_rows:
        raise StorageError(f"{path} holds {metadata.num_rows} rows after writing {num_rows}; the disk is at fault")
    return FileEntry(
        path=path,
        num_rows=num_rows,
        num_bytes=storage.size(str(temporary)),
        sha256=storage.sha256(str(temporary)),
        row_group_rows=groups,
    )


def file_holds(output: str, entry: FileEntry) -> bool:
    """True when the file is there with the bytes of its entry."""
    url = storage.join(output, entry.path)
    try:
        return storage.exists(url) and storage.size(url) == entry.num_bytes and storage.sha256(url) == entry.sha256
    except StorageError as error:
        if storage.is_no_damage(error):
            raise
        return False
