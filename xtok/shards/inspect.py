"""A dataset's tables as polars frames: what `pl.scan_parquet` gives for a folder, for any URL and with typed errors.

One row as aligned text, token by token, is drawn by `xtok inspect` (xtok.cli).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl
import pyarrow as pa

from schemas.tables import REJECT_SCHEMA, RENDERED_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA
from xtok.shards.read import Dataset, Side

__all__ = ["rejects_frame", "rendered_frame", "side_frame"]


def side_frame(dataset: Dataset, side: Side = "student", columns: Sequence[str] | None = None) -> pl.DataFrame:
    """One side's table, all parts in order. columns: None for all. Raises DamagedPartError."""
    schema = STUDENT_SCHEMA if side == "student" else TEACHER_SCHEMA
    names = schema.names if columns is None else list(columns)
    tables = (dataset.read_row_group(ref, side, names) for ref in dataset.row_groups())
    return _frame(tables, pa.schema([schema.field(name) for name in names]))


def rendered_frame(dataset: Dataset, side: Side = "student") -> pl.DataFrame:
    """What one side was shown (chat mode), all parts in order: RENDERED_SCHEMA. Raises DamagedPartError, DatasetError."""
    return _frame((dataset.read_rendered(ref, side) for ref in dataset.row_groups()), RENDERED_SCHEMA)


def rejects_frame(dataset: Dataset) -> pl.DataFrame:
    """The rejects of all parts: source, line, sample_id, stage, side, reason, message."""

    def tables() -> Iterator[pa.Table]:
        for part in dataset.manifest.parts:
            with dataset.open_parquet(part.rejects_file) as parquet:
                yield parquet.read(use_threads=False)

    return _frame(tables(), REJECT_SCHEMA)


def _frame(tables: Iterator[pa.Table], schema: pa.Schema) -> pl.DataFrame:
    frame = pl.from_arrow(pa.concat_tables([schema.empty_table(), *tables]))
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    return frame
