"""Flat arrays to Arrow columns and back, without a Python object a token.

Shape legend: R = rows, N = values of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.tables import REJECT_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA
from xtok.shards.rows import Reject

__all__ = ["flat_of", "list_column", "null_regions", "reject_columns", "row_sums", "select_rows"]

Value = TypeVar("Value", bound=np.generic)
_IDS = TEACHER_SCHEMA.field("input_ids").type
_FLAGS = TEACHER_SCHEMA.field("token_mask").type


def list_column(
    values: npt.NDArray[np.generic], offsets: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """A list<int32> or list<bool> column. values [N], offsets int64 [R + 1], valid bool [R] (None: no row is null)."""
    kind = _FLAGS if values.dtype == np.bool_ else _IDS
    mask = None if valid is None or bool(valid.all()) else pa.array(~valid)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values), type=kind, mask=mask)


def flat_of(column: pa.Array | pa.ChunkedArray) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """(values [N], offsets int64 [R + 1]) of a list column; a null row is an empty one."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = array.flatten().to_numpy(zero_copy_only=False)
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return values, offsets


def null_regions(num_rows: int) -> pa.Array:
    """The `regions` column of text mode."""
    return pa.nulls(num_rows, STUDENT_SCHEMA.field("regions").type)


def row_sums(values: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [R]: how many values of each row are True."""
    before = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=before[1:])
    return np.diff(before[offsets])


def select_rows(
    values: npt.NDArray[Value], offsets: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Value], npt.NDArray[np.int64]]:
    """Concatenates values[starts[r]:starts[r] + lengths[r]] over r; returns them and their offsets int64 [R + 1]."""
    new_offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    if len(starts) == len(offsets) - 1 and np.array_equal(starts, offsets[:-1]) and new_offsets[-1] == len(values):
        return values, new_offsets
    index = np.arange(new_offsets[-1], dtype=np.int64)
    index += np.repeat(starts - new_offsets[:-1], lengths)
    return values[index], new_offsets


def reject_columns(rejects: Sequence[Reject]) -> dict[str, pa.Array]:
    """The rejects table's columns."""
    return {field.name: pa.array([getattr(reject, field.name) for reject in rejects], type=field.type) for field in REJECT_SCHEMA}
