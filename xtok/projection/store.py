"""A projection on disk: one Parquet file with one row a student id, and in its metadata both fingerprints and a digest of the rows,
so that a file that a disk has changed is never taken for a projection, wherever it is read."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xtok import storage
from xtok.errors import ProjectionError
from xtok.projection.build import ProjectionTable

__all__ = ["PROJECTION_FORMAT_VERSION", "projection_bytes", "read_projection", "write_projection"]

# Raised whenever the same two tokenizers would give other bytes.
PROJECTION_FORMAT_VERSION = 2
METADATA_KEY = b"xtok.projection"
SCHEMA = pa.schema(
    [
        pa.field("student_id", pa.int32(), nullable=False),
        pa.field("teacher_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("weights", pa.list_(pa.float32()), nullable=False),
        pa.field("is_exact", pa.bool_(), nullable=False),
    ]
)


def projection_bytes(table: ProjectionTable) -> bytes:
    """The file's bytes: the same for the same table and library versions."""
    entry = table.indices >= 0
    lengths = entry.sum(axis=1)
    offsets = pa.array(np.r_[0, np.cumsum(lengths)].astype(np.int32))
    metadata = _metadata(table)
    columns = [
        pa.array(np.arange(len(lengths), dtype=np.int32)),
        pa.ListArray.from_arrays(offsets, pa.array(table.indices[entry])),
        pa.ListArray.from_arrays(offsets, pa.array(table.weights[entry])),
        pa.array(table.is_exact),
    ]
    schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()})
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), sink, compression="zstd", compression_level=3)
    return sink.getvalue()


def write_projection(table: ProjectionTable, url: str) -> None:
    """Write a projection to a path or URL, whole or not at all. Raises StorageError."""
    storage.write_atomic(url, projection_bytes(table))


def read_projection(
    url: str, *, student_fingerprint: str | None = None, teacher_fingerprint: str | None = None
) -> ProjectionTable:
    """Read a projection; with fingerprints given, one of other tokenizers is refused with both values (ProjectionError)."""
    data = storage.read_bytes(url)
    try:
        content = pq.read_table(pa.BufferReader(data))
        raw = (content.schema.metadata or {}).get(METADATA_KEY)
        metadata = {} if raw is None else dict(json.loads(raw))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise ProjectionError(f"{url} is no projection file, or a damaged one: {error}") from error
    if raw is None:
        raise ProjectionError(f"{url} is a Parquet file, but no projection: build one with `xtok projection STUDENT TEACHER`")
    if metadata.get("version") != PROJECTION_FORMAT_VERSION:
        raise ProjectionError(
            f"{url} has projection format {metadata.get('version')}, this xtok reads {PROJECTION_FORMAT_VERSION}: build it anew"
        )
    for side, wanted in (("student", student_fingerprint), ("teacher", teacher_fingerprint)):
        found = metadata.get(f"{side}_fingerprint")
        if wanted is not None and wanted != found:
            raise ProjectionError(
                f"{url} was built for a {side} tokenizer {found}, but the one in hand is {wanted}: build it anew"
            )
    try:
        table = _table(content, metadata)
        is_whole = _metadata(table) == metadata
    except (pa.ArrowException, KeyError, ValueError, IndexError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise ProjectionError(f"{url} is damaged: its rows are not those it was written with; build it anew")
    return table


def _metadata(table: ProjectionTable) -> dict[str, Any]:
    """What the file says of itself; content_sha256: of the rows, without what no entry stands in."""
    entry = table.indices >= 0
    digest = hashlib.sha256()
    for values in (entry.sum(axis=1, dtype=np.int32), table.indices[entry], table.weights[entry], table.is_exact):
        digest.update(np.ascontiguousarray(values).tobytes())
    return {
        "version": PROJECTION_FORMAT_VERSION,
        "student_fingerprint": table.student_fingerprint,
        "teacher_fingerprint": table.teacher_fingerprint,
        "teacher_vocab_size": table.teacher_vocab_size,
        "k": int(table.indices.shape[1]),
        "reverse": table.reverse,
        "content_sha256": digest.hexdigest(),
    }


def _table(content: pa.Table, metadata: dict[str, Any]) -> ProjectionTable:
    ids, weights = (content.column(name).combine_chunks() for name in ("teacher_ids", "weights"))
    offsets = ids.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    k = int(str(metadata["k"]))
    indices, weight = np.full((len(lengths), k), -1, dtype=np.int32), np.zeros((len(lengths), k), dtype=np.float32)
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(row)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    indices[row, place] = ids.flatten().to_numpy()
    weight[row, place] = weights.flatten().to_numpy()
    return ProjectionTable(
        indices=indices,
        weights=weight,
        is_exact=content.column("is_exact").combine_chunks().to_numpy(zero_copy_only=False),
        student_fingerprint=str(metadata["student_fingerprint"]),
        teacher_fingerprint=str(metadata["teacher_fingerprint"]),
        teacher_vocab_size=int(str(metadata["teacher_vocab_size"])),
        reverse=bool(metadata["reverse"]),
    )
