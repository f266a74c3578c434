"""What the loader refuses, and how it says so."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.loader.synthetic import make_rows, publish
from xtok.errors import ConfigError, DamagedPartError, UnpublishedDatasetError
from xtok.loader import AlignedShardLoader
from xtok.loader.rows import ListColumn


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank must be smaller than world_size, got rank=2"),
        ({"rank": -1}, "rank must be at least 0"),
        ({"epoch": -1}, "epoch must be at least 0"),
        ({"shuffle_row_groups": 0}, "shuffle_row_groups must be at least 1"),
        ({"pad_divisor": 0}, "pad_divisor must be at least 1"),
        ({"pad_to": "widest"}, "pad_to .* got 'widest'"),
        ({"teachers": [2]}, r"teachers .* 2 teachers, got \[2\]"),
        ({"teachers": [0, 0]}, r"got \[0, 0\]"),
        ({"batch_size": 2.0}, "batch_size must be a whole number, got 2.0"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"epoch": 2**63}, "epoch must be at most"),
        ({"rank": 0.0}, "rank must be a whole number"),
        ({"shuffle_row_groups": 2.5}, "shuffle_row_groups must be a whole number"),
        ({"pad_divisor": 10**30}, "pad_divisor must be at most"),
        ({"teachers": 0}, "teachers must be a list of indices, got 0"),
        ({"teachers": "01"}, r"teachers\[0\] must be a whole number, got '0'"),
        ({"teachers": [True]}, r"teachers\[0\] must be a whole number, got True"),
        ({"teacher_pad_divisors": [8, 0]}, r"teacher_pad_divisors\[1\] must be at least 1, got 0"),
        ({"teacher_pad_divisors": [8]}, r"teacher_pad_divisors .* got \[8\]"),
        ({"teacher_tokenizers": [None]}, "teacher_tokenizers has 1 entries"),
    ],
)
def test_settings(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    url = publish(tmp_path, [make_rows(4)])
    with pytest.raises(ConfigError, match=message):
        AlignedShardLoader(url, **({"batch_size": 2} | setting))


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    url = publish(tmp_path, [make_rows(12)])
    plain = AlignedShardLoader(url, batch_size=2, seed=-5, epoch=3, rank=1, world_size=2, teachers=[1])
    same = {"batch_size": np.int32(2), "seed": np.int64(-5), "epoch": np.uint8(3), "rank": np.int64(1), "world_size": np.int16(2)}
    loader = AlignedShardLoader(url, **same, teachers=np.array([1]))
    assert [batch["idx"] for batch in loader] == [batch["idx"] for batch in plain]
    assert list(next(iter(loader))) == list(next(iter(plain)))
    loader.load_state_dict(plain.state_dict())  # the same order, so the same digest
    for state in ({"epoch": 1.5, "num_rows_consumed": 0}, {"epoch": 0, "num_rows_consumed": True}):
        with pytest.raises(ConfigError, match="lacks the whole numbers"):
            plain.load_state_dict(state)
    with pytest.raises(ConfigError, match="epoch must be a whole number"):
        plain.set_epoch(0.5)  # type: ignore[arg-type]


def test_unpublished(tmp_path: Path) -> None:
    with pytest.raises(UnpublishedDatasetError, match="manifest"):
        AlignedShardLoader(str(tmp_path), batch_size=2)


@pytest.mark.parametrize("read_ahead", [True, False])
def test_damaged_file_is_named(tmp_path: Path, read_ahead: bool) -> None:
    rows = make_rows(12)
    url = publish(tmp_path, [rows[:6], rows[6:]])
    path = tmp_path / "teacher=1" / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DamagedPartError, match="teacher=1/part-00001"):
        list(AlignedShardLoader(url, batch_size=2, read_ahead=read_ahead))
    assert len(list(AlignedShardLoader(url, batch_size=2, teachers=[0]))) == 6  # other teachers are not touched by it


def test_rows_that_do_not_fit_together_are_damage(tmp_path: Path) -> None:
    url = publish(tmp_path, [make_rows(6)])
    path = tmp_path / "teacher=0" / "part-00000.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("student_chunk_id")
    longer = [[*row, -1] for row in table.column(column).to_pylist()]
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(longer, field.type)), path, row_group_size=4)
    with pytest.raises(DamagedPartError, match="student_chunk_id of teacher=0/part-00000"):
        list(AlignedShardLoader(url, batch_size=2))


def test_refused_rows_other_than_the_manifest_counts_are_damage(tmp_path: Path) -> None:
    rows = make_rows(6)
    rows[2].teachers[0] = None
    url = publish(tmp_path, [rows])
    path = tmp_path / "teacher=0" / "part-00000.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("route")
    pq.write_table(table.set_column(column, table.schema.field(column), pa.array(["byte"] * 6)), path, row_group_size=4)
    with pytest.raises(DamagedPartError, match="0 refused rows, the manifest says 1"):
        AlignedShardLoader(url, batch_size=2)


@pytest.mark.parametrize("kind", [pa.int32(), pa.bool_()])
def test_lists_with_holes_are_refused(kind: pa.DataType) -> None:
    column = pa.chunked_array([pa.array([[1, None], [0]]).cast(pa.list_(kind))])
    with pytest.raises(pa.ArrowInvalid):
        ListColumn.from_arrow(column)


@pytest.mark.parametrize("kind", [pa.int32(), pa.bool_()])
def test_rows_of_sliced_chunks(kind: pa.DataType) -> None:
    values = [[1, 0, 1], [], [0], None, [1, 1], [0, 0, 0, 1]]
    whole = pa.array([[1], [0, 0], *values]).cast(pa.list_(kind))
    columns = [pa.chunked_array([whole.slice(2, 2), whole.slice(4, 1)]), pa.chunked_array([whole.slice(5, 3)])]
    found = [ListColumn.from_arrow(column) for column in columns]
    rows = [column.values[start:end].tolist() for column in found for start, end in pairwise(column.bounds)]
    assert rows == [[bool(v) if kind == pa.bool_() else v for v in row or []] for row in values]
