"""What is told of a row or a source that cannot be used: its place, its id, its reason, the same in every form of a source."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from schemas.base import MAX_COUNT
from schemas.config import MAX_BYTES
from schemas.plan import Plan
from tests.unit.shards.support import build, config_for, frozen_files, side, udhr_rows, write_lines
from xtok.cli.row_source import RowSource
from xtok.errors import ConfigError, DatasetError, DatasetMismatchError
from xtok.shards import freeze
from xtok.shards.pipeline import absolute_config, build_parts, plan_dataset
from xtok.shards.pool import SerialRunner
from xtok.shards.publish import figures_table, publish
from xtok.shards.read import open_dataset
from xtok.shards.scan import scan_source
from xtok.shards.sources import SourceFile

LINES = [
    b'{"id": "good", "text": "free and equal"}',
    b"",
    b'{"id": "a", "body": "x"}',
    b'{"id": 7, "text": null}',
    b'{"id": "c", "text": 3.5}',
    b'{"id": "d", "text": ""}',
    b'{"id": "e", "text": "\\ud83d"}',
    b'{"id": "f", "text": "' + b"x" * 4_000_001 + b'"}',
    b'{"id": true, "text": "x"}',
    b'{"id": "g\xe9", "text": "x"}',
    b'{"id": "h", "text": "cut',
    b'{"id": "good", "text": "again"}\r',
    b'{"id": "\xe2\x80\xa8", "text": "a\xc2\x85b"}',
]
EXPECTED = [
    (3, "a", "missing_text"),
    (4, "7", "missing_text"),
    (5, "c", "text_not_string"),
    (6, "d", "empty_text"),
    (7, "e", "lone_surrogate"),
    (8, "f", "document_too_long"),
    (9, None, "invalid_id"),
    (10, None, "invalid_utf8"),
    (11, None, "invalid_json"),
    (12, "good", "duplicate_id"),
]


def rejects(output: Path) -> pl.DataFrame:
    return pl.read_parquet(output / "rejects" / "*.parquet")


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_refused_row_bears_its_line_its_id_and_its_reason(tmp_path: Path, name: str) -> None:
    pack = {"jsonl": bytes, "gz": gzip.compress, "zst": zstandard.compress}[name.rsplit(".", 1)[1]]
    (tmp_path / name).write_bytes(pack(b"\n".join(LINES)))
    manifest = build(tmp_path / "out", tmp_path / name, part_bytes=60)
    assert len(manifest.parts) > 2
    assert rejects(tmp_path / "out")["line", "sample_id", "reason"].rows() == EXPECTED
    assert set(rejects(tmp_path / "out")["source"]) == {name}
    assert manifest.num_source_rows == 12 == manifest.num_rows + len(EXPECTED)
    with pytest.raises(DatasetError, match=r"has the id 'd'; .*:6 was refused by source: empty_text"):
        RowSource(open_dataset(str(tmp_path / "out")), {}).find(["d"])


@pytest.mark.parametrize(
    ("columns", "reason", "said"),
    [
        ({"body": ["x"], "meta": ["y"]}, "missing_text", "no field 'text' (it has 'id', 'body', 'meta')"),
        ({"text": pa.nulls(1)}, "missing_text", "the field 'text' is null"),
        ({"text": [b"x"]}, "text_not_string", "holds a value of type bytes, not a string"),
        ({"text": [["x"]]}, "text_not_string", "holds a JSON array, not a string"),
        ({"text": [""]}, "empty_text", "empty string"),
    ],
)
def test_a_parquet_row_bears_its_id_and_what_is_there(tmp_path: Path, columns: dict[str, Any], reason: str, said: str) -> None:
    pq.write_table(pa.table({"id": ["r"], **columns}), tmp_path / "bad.parquet")
    pq.write_table(pa.table({"id": ["good"], "text": pa.array(["x"]).dictionary_encode()}), tmp_path / "good.parquet")
    build(tmp_path / "out", str(tmp_path / "*.parquet"))
    (reject,) = rejects(tmp_path / "out").to_dicts()
    assert (reject["source"], reject["line"], reject["sample_id"], reject["reason"]) == ("bad.parquet", 1, "r", reason)
    assert said in reject["message"]


def test_a_folder_is_no_source_and_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no regular file; of a folder, name the files to read: .*/\*\.jsonl"):
        build(tmp_path / "out", str(tmp_path))


def test_a_path_with_two_colons_is_a_path(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a::b.jsonl", [{"text": "x"}])
    assert build(tmp_path / "out", [str(source), str(tmp_path / "*.jsonl")]).num_rows == 1


def test_sources_without_a_row_are_told(tmp_path: Path) -> None:
    write_lines(tmp_path / "full.jsonl", udhr_rows(2))
    for number in range(7):
        (tmp_path / f"empty{number}.jsonl").write_bytes(b"\n" * (number % 2))
    figures = figures_table(build(tmp_path / "out", str(tmp_path / "*.jsonl")))
    assert "sources without a row: empty0.jsonl, empty1.jsonl, empty2.jsonl, empty3.jsonl, empty4.jsonl and 2 more" in figures
    assert "without a row" not in figures_table(build(tmp_path / "full", tmp_path / "full.jsonl"))


def test_the_way_out_of_a_damaged_plan_depends_on_whether_the_dataset_is_published(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(2))
    build(tmp_path / "out", source)
    (tmp_path / "out" / "plan.json").write_text("{")
    with pytest.raises(DatasetMismatchError, match=r"`xtok repair .*out` writes it anew"):
        build(tmp_path / "out", source)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(DatasetMismatchError, match="remove the folder"):
        build(tmp_path / "out", source)


def test_a_document_in_windows_is_found_by_their_names(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": "doc", "text": "All human beings are born free and equal. " * 9}])
    build(tmp_path / "out", source, student=side("chatml_bpe", 40), overlength="split")
    with pytest.raises(DatasetError, match=r"no row of .* has the id 'doc'; it is a document in \d+ windows, doc#0 to doc#\d+"):
        RowSource(open_dataset(str(tmp_path / "out")), {}).find(["doc"])


def test_the_largest_settings_do_no_harm(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "in.parquet")
    scan = scan_source(SourceFile(str(tmp_path / "in.parquet"), "in.parquet", "parquet", None), spacing_bytes=2**70)
    assert scan.checkpoints[:, 1].tolist() == [2, 2]
    sizes = {"part_bytes": MAX_BYTES, "max_document_bytes": MAX_BYTES, "row_group_rows": MAX_COUNT}
    manifest = build(
        tmp_path / "out", tmp_path / "in.parquet", student=side("chatml_bpe", MAX_COUNT), overlength="split", **sizes
    )
    assert manifest.num_rows == 2


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find no plan; then each writes its own, and publishes over what the other one built."""
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(2))
    build(tmp_path / "other", source, overlength="reject")
    (tmp_path / "other" / "manifest.json").unlink()
    looked = freeze.read_plan

    def late(output: str) -> Plan | None:
        monkeypatch.undo()
        found = looked(output)
        shutil.copytree(tmp_path / "other", tmp_path / "out")
        return found

    monkeypatch.setattr(freeze, "read_plan", late)
    with pytest.raises(DatasetMismatchError, match="overlength was 'reject', is now 'truncate'"):
        build(tmp_path / "out", source)
    assert frozen_files(tmp_path / "out") == frozen_files(tmp_path / "other")


def test_nothing_is_published_under_another_runs_plan(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(2))
    build(tmp_path / "other", source, overlength="reject")
    config = absolute_config(config_for(tmp_path / "out", source))
    run = plan_dataset(config, SerialRunner())
    entries = build_parts(run, config, SerialRunner())
    shutil.copy(tmp_path / "other" / "plan.json", tmp_path / "out" / "plan.json")
    with pytest.raises(DatasetMismatchError, match="overlength was 'reject', is now 'truncate'"):
        publish(run, entries, config)
    assert not (tmp_path / "out" / "manifest.json").exists()
