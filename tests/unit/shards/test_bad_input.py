"""Every kind of bad input: a counted reject that names source, line and reason, or a typed error. Nothing is lost."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.unit.shards.support import TOKENIZERS, build, config_for, udhr_rows, write_lines
from xtok.errors import ConfigError, DatasetMismatchError, PublicationRefusedError, StorageError, TokenizerError
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import WorkerPool

GOOD = {"id": "good", "text": "All human beings are born free."}


def rejects(output: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(output / "rejects" / "*.parquet").to_dicts()


def students(output: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(output / "student" / "*.parquet").to_dicts()


@pytest.mark.parametrize(
    ("line", "reason", "hint"),
    [
        (b'{"id": "a", "text": "caf\xe9"}', "invalid_utf8", "0xE9 at position 24"),
        (b'{"id": "a", "text": "cut', "invalid_json", "line 1 column 21"),
        (b"no json at all", "invalid_json", "Expecting value"),
        (b'{"id": "a", "text": NaN}', "invalid_json", "NaN"),
        (b'{"id": "a", "text": "raw \x00 byte"}', "invalid_json", "control character"),
        (b"[" * 100_000, "invalid_json", "recursion"),
        (b'["a list"]', "not_an_object", "array"),
        (b"null", "not_an_object", "null"),
        (b'{"id": "a", "body": "x"}', "missing_text", "'body'"),
        (b'{"id": "a", "text": null}', "missing_text", "'text'"),
        (b'{"id": "a", "text": 7}', "text_not_string", "number"),
        (b'{"id": "a", "text": ["x"]}', "text_not_string", "array"),
        (b'{"id": "a", "text": ""}', "empty_text", "empty string"),
        (b'{"id": "a", "text": "lone \\ud83d surrogate"}', "lone_surrogate", "U+D83D at character 5"),
        (b'{"id": "\\udc00", "text": "x"}', "lone_surrogate", "'id'"),
        (b'{"id": 1.5, "text": "x"}', "invalid_id", "1.5"),
        (b'{"id": true, "text": "x"}', "invalid_id", "True"),
        (b'{"id": "", "text": "x"}', "invalid_id", "''"),
    ],
)
def test_a_bad_line_is_a_reject_with_its_place_and_reason(tmp_path: Path, line: bytes, reason: str, hint: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD, b"", line, {"id": "last", "text": "Equal in dignity."}])
    manifest = build(tmp_path / "out", source)
    (reject,) = rejects(tmp_path / "out")
    assert (reject["source"], reject["line"], reject["stage"], reject["side"]) == ("in.jsonl", 3, "read", "source")
    assert reject["reason"] == reason
    assert hint in reject["message"]
    assert [row["sample_id"] for row in students(tmp_path / "out")] == ["good", "last"]
    assert [row["idx"] for row in students(tmp_path / "out")] == [0, 2]
    assert manifest.source_rejects == {reason: 1}
    assert (manifest.num_source_rows, manifest.num_blank_lines) == (3, 1)


@pytest.mark.parametrize(
    "text",
    ["a\u2028b", "a\u0085b", "a\u2029b", "nul \x00 inside", "\ufeffmark", "\r\n\t ", " ", "e\u0301", "👩‍👩‍👧", "\U0010ffff"],
)
def test_unusual_text_is_text(tmp_path: Path, text: str) -> None:
    raw = json.dumps({"id": "escaped", "text": text + "!"}).encode()
    source = write_lines(tmp_path / "in.jsonl", [{"id": "plain", "text": text}, raw, GOOD])
    build(tmp_path / "out", source, teachers=["chatml_bpe"])
    rows = students(tmp_path / "out")
    assert [(row["sample_id"], row["line"]) for row in rows] == [("plain", 1), ("escaped", 2), ("good", 3)]
    assert rejects(tmp_path / "out") == []


def test_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [b'\xef\xbb\xbf{"id": "a", "text": "one"}', b"", b'{"id": "b", "text": "two"}', b'{"id": "c", "text": "three"}']
    source.write_bytes(b"\r\n".join(lines))
    manifest = build(tmp_path / "out", source)
    assert [(row["sample_id"], row["line"]) for row in students(tmp_path / "out")] == [("a", 1), ("b", 3), ("c", 4)]
    assert manifest.num_blank_lines == 1


def test_long_text_is_refused_before_tokenizing(tmp_path: Path) -> None:
    long = {"id": "long", "text": "word " * 1_000_000}
    huge = b'{"id": "huge", "text": "' + b"x" * 40_000_000 + b'"}'
    source = write_lines(tmp_path / "in.jsonl", [GOOD, long, huge, {"id": "wide", "text": "é" * 10}])
    build(tmp_path / "out", source)
    found = [(row["line"], row["reason"], row["message"][:14]) for row in rejects(tmp_path / "out")]
    assert found == [(2, "document_too_long", "the text has 5"), (3, "document_too_long", "the line has 4")]
    source = write_lines(tmp_path / "wide.jsonl", [{"id": "wide", "text": "é" * 10}])  # 20 bytes in 10 characters
    build(tmp_path / "fits", source, max_document_bytes=20)
    assert rejects(tmp_path / "fits") == []
    with pytest.raises(PublicationRefusedError, match="no row is left"):
        build(tmp_path / "tight", source, max_document_bytes=19)


def test_of_duplicate_ids_the_first_valid_one_stays(tmp_path: Path) -> None:
    rows = [{"id": "x", "text": ""}, {"id": "x", "text": "first"}, {"id": 7, "text": "seven"}]
    first = write_lines(tmp_path / "a.jsonl", rows)
    rows = [{"id": "x", "text": "again"}, {"id": "7", "text": "7"}, {"text": "same"}, {"text": "same"}]
    second = write_lines(tmp_path / "b.jsonl", rows)
    build(tmp_path / "out", [str(first), str(second)], part_bytes=40)
    rows = students(tmp_path / "out")
    assert [(row["sample_id"], row["source"], row["line"]) for row in rows[:2]] == [("x", "a.jsonl", 2), ("7", "a.jsonl", 3)]
    assert len(rows) == 3
    assert len(rows[2]["sample_id"]) == 32
    assert [(row["source"], row["line"], row["reason"]) for row in rejects(tmp_path / "out")] == [
        ("a.jsonl", 1, "empty_text"),
        ("b.jsonl", 1, "duplicate_id"),
        ("b.jsonl", 2, "duplicate_id"),
        ("b.jsonl", 4, "duplicate_id"),
    ]


def test_loss_multiplier(tmp_path: Path) -> None:
    rows = [{"text": "a", "w": 0.5}, {"text": "b"}, {"text": "c", "w": -1}, {"text": "d", "w": "2"}, {"text": "e", "w": 3}]
    build(tmp_path / "out", write_lines(tmp_path / "in.jsonl", rows), loss_multiplier_field="w")
    assert [row["loss_multiplier"] for row in students(tmp_path / "out")] == [0.5, 1.0, 3.0]
    assert [(row["line"], row["reason"]) for row in rejects(tmp_path / "out")] == [
        (3, "invalid_loss_multiplier"),
        (4, "invalid_loss_multiplier"),
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_an_empty_source_is_a_typed_error(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=r"no rows.*empty\.jsonl"):
        build(tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


def test_a_pattern_without_matches_and_an_unknown_kind_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\*\.jsonl.*matches no file"):
        build(tmp_path / "out", str(tmp_path / "*.jsonl"))
    with pytest.raises(ConfigError, match=r"notes\.txt is of no known kind"):
        build(tmp_path / "out", write_lines(tmp_path / "notes.txt", [GOOD]))


def test_compressed_and_parquet_sources_give_the_same_rows(tmp_path: Path) -> None:
    rows = udhr_rows(60)
    plain = write_lines(tmp_path / "t.jsonl", rows)
    data = plain.read_bytes()
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    (tmp_path / "t.jsonl.zst").write_bytes(zstandard.compress(data[:9000]) + zstandard.compress(data[9000:]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", row_group_size=7)
    tables = []
    for name in ("t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.parquet"):
        manifest = build(tmp_path / f"out-{name}", tmp_path / name, part_bytes=9_000)
        assert len(manifest.parts) > 2
        tables.append(pl.read_parquet(tmp_path / f"out-{name}" / "student" / "*.parquet").drop("source"))
    assert all(table.equals(tables[0]) for table in tables[1:])
    assert tables[0].height == 60


def test_parquet_rows_are_checked_like_lines(tmp_path: Path) -> None:
    broken = pa.array([b"caf\xe9", b"good"]).cast(pa.binary())
    text = pa.StringArray.from_buffers(2, *broken.buffers()[1:])
    pq.write_table(pa.table({"id": [1, 2], "text": text}), tmp_path / "t.parquet")
    build(tmp_path / "out", tmp_path / "t.parquet")
    (reject,) = rejects(tmp_path / "out")
    assert (reject["source"], reject["line"], reject["reason"]) == ("t.parquet", 1, "invalid_utf8")
    assert [row["sample_id"] for row in students(tmp_path / "out")] == ["2"]


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.zst"])
def test_a_cut_archive_is_a_typed_error(tmp_path: Path, name: str) -> None:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in udhr_rows(50))
    whole = gzip.compress(data) if name.endswith("gz") else zstandard.compress(data)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match=name.replace(".", r"\.")):
        build(tmp_path / "out", tmp_path / name)


def test_no_parquet_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"not Parquet at all")
    with pytest.raises(StorageError, match=r"t\.parquet"):
        build(tmp_path / "out", tmp_path / "t.parquet")


def test_an_output_with_another_dataset_is_refused_with_both_values(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(5))
    build(tmp_path / "out", source)
    with pytest.raises(DatasetMismatchError, match=r"overlength was 'truncate', is now 'reject'"):
        build(tmp_path / "out", source, overlength="reject")
    with pytest.raises(DatasetMismatchError, match=r"student .*content_fingerprint was"):
        build(tmp_path / "out", source, student="spm_bpe")
    with pytest.raises(DatasetMismatchError, match=r"context_length was 4096, is now 512"):
        build(tmp_path / "out", source, student={"tokenizer": str(TOKENIZERS / "chatml_bpe"), "context_length": 512})
    write_lines(source, udhr_rows(6))
    with pytest.raises(DatasetMismatchError, match=r"source in\.jsonl changed"):
        build(tmp_path / "out", source)
    (tmp_path / "out" / "plan.json").write_text("{}")
    with pytest.raises(DatasetMismatchError, match=r"no plan of this library"):
        build(tmp_path / "out", source)


def test_an_unwritable_output_is_a_typed_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"file/out.*(not a folder|a file)"):
        build(tmp_path / "file" / "out", source)
    with pytest.raises(StorageError, match="cannot"):
        build(Path("/proc/xtok-cannot-be-here"), source)


def test_no_space_left_is_a_typed_error_and_the_next_run_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(40))
    real = pq.ParquetWriter.write_table
    calls = []

    def full_disk(writer: pq.ParquetWriter, *arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(writer, *arguments, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(StorageError, match="no space left") as caught:
        build(tmp_path / "out", source, part_bytes=8_000)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert list((tmp_path / "out" / "runs" / "staging").iterdir()) == []
    monkeypatch.undo()
    assert build(tmp_path / "out", source, part_bytes=8_000) == build(tmp_path / "whole", source, part_bytes=8_000)


def test_a_real_failing_write_is_a_typed_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(40))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, before[1]))
    try:
        with pytest.raises(StorageError, match="size limit"):
            build(tmp_path / "out", source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_errors_of_a_worker_keep_their_type(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    (tmp_path / "empty").mkdir()
    config = config_for(tmp_path / "out", source, student={"tokenizer": str(tmp_path / "empty")})
    with WorkerPool(1) as pool, pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        preprocess(config, runner=pool)


def test_a_folder_without_a_tokenizer_and_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tokenizer.model").write_bytes(b"sentencepiece")
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match="slow"):
        build(tmp_path / "out", source, teachers=[{"tokenizer": str(slow)}])
    small = tmp_path / "small"
    shutil.copytree(TOKENIZERS / "chatml_bpe", small)
    (small / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(TokenizerError, match="100"):
        build(tmp_path / "out", source, teachers=[{"tokenizer": str(small)}])
    assert not (tmp_path / "out").exists()


def test_an_engine_without_a_runner_is_a_typed_error(tmp_path: Path) -> None:
    config = config_for(tmp_path / "out", write_lines(tmp_path / "in.jsonl", [GOOD]), workers=1, engine="ray")
    with pytest.raises(ConfigError, match="engine: 'ray'"):
        preprocess(config)


def test_a_context_without_room_is_a_typed_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    with pytest.raises(ConfigError, match=r"teacher 0: context_length 2 leaves no room"):
        build(tmp_path / "out", source, teachers=[{"tokenizer": str(TOKENIZERS / "wordpiece_lower"), "context_length": 2}])


def test_too_many_rejects_or_too_little_coverage_refuse_publication(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [GOOD, b"junk", {"id": "b", "text": "free and equal"}])
    with pytest.raises(PublicationRefusedError, match=r"33\.33% of the rows are refused(.|\n)*invalid_json +1"):
        build(tmp_path / "out", source, max_reject_fraction=0.3)
    assert not (tmp_path / "out" / "manifest.json").exists()
    # The threshold is no part of the dataset: another one publishes what is there.
    build(tmp_path / "out", source, max_reject_fraction=0.4)
    assert (tmp_path / "out" / "manifest.json").exists()
    short = {"tokenizer": str(TOKENIZERS / "spm_bpe"), "context_length": 5}
    with pytest.raises(PublicationRefusedError, match=r"teacher=0: coverage is"):
        build(tmp_path / "short", source, teachers=[short], min_coverage=0.9)
