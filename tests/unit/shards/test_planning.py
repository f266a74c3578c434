"""Parts, line numbers and names: the plan against slow statements of the same rules."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.plan import PlannedSource
from tests.unit.shards.support import build, config_for, udhr_rows, write_lines
from xtok.shards import scan as scan_module
from xtok.shards.cutting import balanced_parts
from xtok.shards.duplicates import IdScan, find_duplicates, parts_with_repeats
from xtok.shards.parse import RowFields
from xtok.shards.plan import make_plan, plan_bytes
from xtok.shards.pool import SerialRunner
from xtok.shards.rows import SourceAt, count_rows, read_blocks, split_lines
from xtok.shards.scan import SourceScan, scan_lines
from xtok.shards.sources import portable_names

FIELDS = RowFields("text", "id", None, 1000)
streams = st.lists(st.sampled_from([b"", b" \t", b"\r", b'{"text":"a"}', b"  x", b"y" * 40, b"\x0b\x0c"]), max_size=30).flatmap(
    lambda lines: st.sampled_from([b"\n".join(lines), b"\n".join(lines) + b"\n"])
)


@given(data=streams, spacing=st.integers(1, 50), block=st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_checkpoints_count_lines_and_rows(data: bytes, spacing: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "_BLOCK_BYTES", block)
        checkpoints = scan_lines(io.BytesIO(data), spacing)
    for _, position, lines, rows in checkpoints.tolist():
        before = data[:position]
        assert position == len(data) or before.endswith(b"\n")
        assert rows == count_rows(before)
        assert lines == before.count(b"\n") + (bool(before) and not before.endswith(b"\n"))
    assert checkpoints[-1, 1] == len(data)
    assert (np.diff(checkpoints[:, 1]) >= 0).all()


def scan_of(data: bytes, name: str, spacing: int) -> SourceScan:
    checkpoints = scan_lines(io.BytesIO(data), spacing)
    _, stream_bytes, num_lines, num_rows = checkpoints[-1].tolist()
    counts = {"num_bytes": len(data), "stream_bytes": stream_bytes, "num_lines": num_lines, "num_rows": num_rows}
    planned = PlannedSource.model_validate({"name": name, "format": "jsonl", "sha256": "", **counts})
    return SourceScan(planned, checkpoints)


@given(files=st.lists(streams, min_size=1, max_size=4), part_bytes=st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_parts_cover_every_row_once_with_its_line_number(
    tmp_path_factory: pytest.TempPathFactory, files: list[bytes], part_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("sources")
    scans, urls = [], []
    for index, data in enumerate(files):
        (folder / f"{index}.jsonl").write_bytes(data)
        urls.append(str(folder / f"{index}.jsonl"))
        scans.append(scan_of(data, f"{index}.jsonl", 1))
    sources = {index: SourceAt(scan.planned, urls[index]) for index, scan in enumerate(scans)}
    found = []
    for part in balanced_parts(scans, part_bytes):
        rows = 0
        for block in read_blocks(part.segments, sources, FIELDS, frozenset(), block_bytes=64):
            rows += block.num_rows
            found += [(source, line, idx) for source, line, idx in zip(block.source, block.line, block.idx, strict=True)]
            found += [(reject.source, reject.line, None) for reject in block.rejects]
        assert rows == part.num_rows
    expected, idx = {}, 0
    for index, data in enumerate(files):
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line and not line.isspace():
                expected[f"{index}.jsonl", number] = idx
                idx += 1
    assert sorted((source, line) for source, line, _ in found) == sorted(expected)
    assert all(expected[source, line] == idx for source, line, idx in found if idx is not None)


def test_parts_are_balanced_by_bytes() -> None:
    random.seed(3)
    lines = [b"x" * random.choice([10, 100, 4_000]) for _ in range(3_000)]
    data = b"\n".join(lines)
    parts = balanced_parts([scan_of(data, "a", 100)], 100_000)
    assert len(parts) == -(-len(data) // 100_000)
    sizes = [part.num_bytes for part in parts]
    assert max(sizes) - min(sizes) < 10_000


def test_one_line_larger_than_a_part_is_one_part_and_no_loop() -> None:
    data = b"a\n" + b"b" * 50_000 + b"\n" + b"c\n" * 3
    parts = balanced_parts([scan_of(data, "a", 10)], 1_000)
    assert sum(part.num_rows for part in parts) == 5
    assert max(part.num_bytes for part in parts) <= 50_003


@given(data=streams, limit=st.integers(1, 50), block=st.integers(1, 32))
@settings(max_examples=200, deadline=None)
def test_split_lines_is_a_split_with_a_limit(data: bytes, limit: int, block: int) -> None:
    from xtok.shards import rows as rows_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_READ_BYTES", block)
        found = list(split_lines(io.BytesIO(data), len(data), limit, "x"))
    whole = data.split(b"\n")
    whole = whole if whole[-1] else whole[:-1]
    assert len(found) == len(whole)
    for line, expected in zip(found, whole, strict=True):
        # A line may exceed the limit within one read; it is refused wherever holding it would take more than that.
        assert line == expected or (not isinstance(line, bytes) and len(expected) > limit)


def test_duplicates_keep_the_first_in_plan_order() -> None:
    def part(first: int, *digests: tuple[int, int]) -> IdScan:
        return IdScan(np.arange(first, first + len(digests)), np.array(digests, dtype=np.uint64).reshape(-1, 2))

    scans = [part(0, (1, 1), (2, 1), (1, 1)), part(10), part(20, (2, 1), (1, 2), (1, 1))]
    assert find_duplicates(scans) == [(2,), (), (20, 22)]
    assert find_duplicates([]) == []
    assert parts_with_repeats(scans) == [0, 2]
    assert parts_with_repeats([part(0, (1, 1)), part(3, (2, 1), (1, 2)), part(5, (1, 1))]) == [0, 2]
    assert parts_with_repeats([part(0, (1, 1)), part(3)]) == [] == parts_with_repeats([])


def test_names_are_the_shortest_unique_trailing_paths() -> None:
    assert portable_names(["/data/a/x.jsonl"]) == ["x.jsonl"]
    assert portable_names(["/d/a/x.jsonl", "/d/b/x.jsonl", "/d/b/y.jsonl"]) == ["a/x.jsonl", "b/x.jsonl", "y.jsonl"]
    assert portable_names(["s3://bucket/x.jsonl", "s3://other/x.jsonl"]) == ["bucket/x.jsonl", "other/x.jsonl"]


def test_the_plan_holds_nothing_of_this_machine_and_does_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    plans = []
    for name, changes in (("one", {"workers": 1}), ("two", {"workers": 7, "max_reject_fraction": 0.5, "min_coverage": 0.1})):
        (tmp_path / name).mkdir()
        source = write_lines(tmp_path / name / "in.jsonl", udhr_rows(20))
        config = config_for(tmp_path / name / "out", source, part_bytes=5_000, **changes)
        plans.append(plan_bytes(make_plan(config, SerialRunner()).plan))
    assert plans[0] == plans[1]
    assert str(tmp_path).encode() not in plans[0]
    assert b"workers" not in plans[0]


def test_many_small_files_make_few_parts(tmp_path: Path) -> None:
    rows = udhr_rows(40)
    for index, row in enumerate(rows):
        write_lines(tmp_path / f"s-{index:02d}.jsonl", [row])
    manifest = build(tmp_path / "out", str(tmp_path / "s-*.jsonl"), part_bytes=10_000)
    assert 1 < len(manifest.parts) < 10
    assert manifest.num_rows == 40
    assert [source.name for source in manifest.sources[:2]] == ["s-00.jsonl", "s-01.jsonl"]
