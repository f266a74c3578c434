"""Relaunch, added teachers, fallback, damage and repair: always the bytes of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.unit.shards.support import PARTS, TOKENIZERS, build, config_for, frozen_files, side, udhr_rows
from xtok.errors import ConfigError, DamagedPartError, DatasetError, DatasetMismatchError, UnpublishedDatasetError
from xtok.shards import part as part_module
from xtok.shards.inspect import side_frame
from xtok.shards.part import run_part
from xtok.shards.pipeline import absolute_config, build_parts, plan_dataset, preprocess, rebuild_part
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.records import part_jobs
from xtok.shards.verify import damaged_parts, verify_dataset
from xtok.tokenizers import FastokensBackend, FlatTokens, load_tokenizer


def test_the_layout_is_the_published_one(tmp_path: Path, source: Path) -> None:
    manifest = build(tmp_path / "out", source, teachers=["spm_bpe", "wordpiece_lower"], **PARTS)
    numbers = range(len(manifest.parts))
    tables = ("student", "teacher=0", "teacher=1", "rejects")
    expected = {f"{table}/part-{i:05d}.parquet" for table in tables for i in numbers} | {"plan.json", "manifest.json"}
    assert set(frozen_files(tmp_path / "out")) == expected | {f"records/part-{i:05d}.json" for i in numbers}
    frame = pl.scan_parquet(tmp_path / "out" / "teacher=*/*.parquet", hive_partitioning=True)
    frame = frame.select("sample_id", "teacher", "coverage")
    assert frame.collect_schema()["teacher"] == pl.Int64
    assert frame.collect().height == 80
    joined = frame.collect().join(pl.read_parquet(tmp_path / "out" / "student" / "*.parquet"), on="sample_id")
    assert joined.height == 80
    groups = [rows for part in manifest.parts for rows in part.student_file.row_group_rows]
    assert max(groups) == 4
    assert sum(groups) == 40
    assert str(tmp_path) not in json.dumps(json.loads((tmp_path / "out" / "manifest.json").read_text()))


def test_a_relaunch_builds_only_what_is_missing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "whole", source, **PARTS)
    config = absolute_config(config_for(tmp_path / "out", source, **PARTS))
    runner = SerialRunner()
    run = plan_dataset(config, runner)
    for job in part_jobs(run, config)[:2]:
        run_part(job)
    (tmp_path / "out" / "teacher=0" / "part-00000.parquet").unlink()
    attempts = []
    real = part_module._PartBuild

    class Watched(real):
        def __init__(self, job: Any, *rest: Any) -> None:
            super().__init__(job, *rest)
            attempts.append((job.part.index, sorted(self._writers)))

    monkeypatch.setattr(part_module, "_PartBuild", Watched)
    preprocess(config, runner=runner)
    assert attempts[0] == (0, ["rejects", "teacher=0"])
    assert [index for index, _ in attempts] == [0, *range(2, len(run.plan.parts))]
    assert frozen_files(tmp_path / "out") == frozen_files(tmp_path / "whole")


@pytest.mark.parametrize("overlength", ["truncate", "reject", "split"])
def test_a_later_teacher_writes_only_its_own_folder(tmp_path: Path, source: Path, overlength: str) -> None:
    student, first, second = side("chatml_bpe", 128), side("spm_bpe", 160), side("unigram_nfkc", 300)
    changes = PARTS | {"overlength": overlength, "student": student}
    build(tmp_path / "whole", source, teachers=[first, second], **changes)
    build(tmp_path / "out", source, teachers=[first], **changes)
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in frozen_files(tmp_path / "out")}
    build(tmp_path / "out", source, teachers=[first, second], **changes)
    assert frozen_files(tmp_path / "out") == frozen_files(tmp_path / "whole")
    same = [name for name, time in before.items() if (tmp_path / "out" / name).stat().st_mtime_ns == time]
    assert {name for name in before if name.startswith(("student", "teacher=0"))} <= set(same)
    with pytest.raises(DatasetMismatchError, match="published with 2 teachers"):
        build(tmp_path / "out", source, teachers=[first], **changes)


def test_a_teacher_with_the_students_tokenizer_has_an_entry_and_no_files(tmp_path: Path, source: Path) -> None:
    build(tmp_path / "out", source, teachers=["chatml_bpe", "spm_bpe", side("chatml_bpe", 64)], **PARTS)
    assert sorted(path.name for path in (tmp_path / "out").glob("teacher=*")) == ["teacher=1", "teacher=2"]
    dataset = open_dataset(str(tmp_path / "out"))
    assert [teacher.same_as_student for teacher in dataset.manifest.teachers] == [True, False, False]
    assert dataset.manifest.coverage[0] is None
    with pytest.raises(DatasetError, match="student's tokenizer"):
        dataset.read_row_group(dataset.row_groups()[0], 0)
    with pytest.raises(DatasetError, match="teachers 0 to 2"):
        dataset.read_row_group(dataset.row_groups()[0], 3)
    assert verify_dataset(dataset) == []


def test_special_tokens_can_be_left_out_of_a_side(tmp_path: Path, source: Path) -> None:
    build(tmp_path / "out", source, teachers=[side("spm_bpe", add_special_tokens=False), "spm_bpe"])
    dataset = open_dataset(str(tmp_path / "out"))
    bare, wrapped = (side_frame(dataset, index)["input_ids"].to_list() for index in (0, 1))
    adapter = load_tokenizer(str(TOKENIZERS / "spm_bpe"))
    assert [[*adapter.prefix_ids.tolist(), *ids, *adapter.suffix_ids.tolist()] for ids in bare] == wrapped
    assert verify_dataset(dataset) == []


def test_a_backend_that_differs_makes_the_part_anew(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = PARTS | {"student": "chatml_bpe", "teachers": ["spm_bpe"], "proof_every": 1}
    manifest = build(tmp_path / "honest", source, **shared)
    if manifest.student.backend != "fastokens":
        pytest.fail("the bundled byte-level tokenizer should load in the fast backend")
    real = FastokensBackend.encode_flat
    texts = [row["text"] for row in udhr_rows(40)]

    def lies(backend: FastokensBackend, batch: list[str]) -> FlatTokens:
        tokens = real(backend, batch)
        if texts[-1] not in batch:
            return tokens
        ids = tokens.ids.copy()
        ids[tokens.offsets[batch.index(texts[-1])]] ^= 1
        return FlatTokens(ids, tokens.offsets)

    config = absolute_config(config_for(tmp_path / "out", source, **shared))
    run = plan_dataset(config, SerialRunner())
    monkeypatch.setattr(FastokensBackend, "encode_flat", lies)
    entries = build_parts(run, config, SerialRunner())
    assert [entry.student.num_backend_fallbacks for entry in entries] == [0] * (len(entries) - 1) + [1]
    assert "fastokens gave" in str(entries[-1].student.backend_difference)
    honest = manifest.parts
    assert [entry.student_file for entry in entries] == [part.student_file for part in honest]
    assert [entry.teacher_files for entry in entries] == [part.teacher_files for part in honest]


def test_reading_an_unpublished_or_damaged_dataset(tmp_path: Path, source: Path) -> None:
    with pytest.raises(UnpublishedDatasetError, match=r"manifest\.json"):
        open_dataset(str(tmp_path / "nothing"))
    build(tmp_path / "out", source, **PARTS)
    dataset = open_dataset(str(tmp_path / "out"))
    table = dataset.read_row_group(dataset.row_groups()[1], 0, ["idx"])
    assert table.column_names == ["idx"]
    file = tmp_path / "out" / "student" / "part-00001.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    ref = next(ref for ref in dataset.row_groups() if ref.part == 1)
    with pytest.raises(DamagedPartError, match=r"student/part-00001\.parquet"):
        dataset.read_row_group(ref)
    (tmp_path / "out" / "manifest.json").write_text('{"format_version": 1}')
    with pytest.raises(DamagedPartError, match=r"manifest\.json"):
        open_dataset(str(tmp_path / "out"))


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "record"])
@pytest.mark.parametrize("table", ["student", "teacher=0", "rejects"])
def test_damage_is_found_and_rebuilt_alone(tmp_path: Path, source: Path, table: str, damage: str) -> None:
    build(tmp_path / "out", source, **PARTS)
    sound = frozen_files(tmp_path / "out")
    file = tmp_path / "out" / table / "part-00001.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    match damage:
        case "flip":
            file.write_bytes(data)
        case "cut":
            file.write_bytes(data[:-7])
        case "delete":
            file.unlink()
        case "record":
            file.unlink()
            (tmp_path / "out" / "records" / "part-00001.json").unlink()
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in sound if "00001" not in name}
    findings = verify_dataset(open_dataset(str(tmp_path / "out")))
    assert {(finding.part, finding.path) for finding in findings} == {(1, f"{table}/part-00001.parquet")}
    assert damaged_parts(findings) == [1]
    rebuild_part(config_for(tmp_path / "out", source, **PARTS), 1, runner=SerialRunner())
    assert frozen_files(tmp_path / "out") == sound
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in times} == times


def test_a_part_is_not_rebuilt_with_other_library_versions(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa

    build(tmp_path / "out", source, **PARTS)
    sound = frozen_files(tmp_path / "out")
    monkeypatch.setattr(pa, "__version__", "0.0.1")
    with pytest.raises(ConfigError, match="other library versions"):
        rebuild_part(config_for(tmp_path / "out", source, **PARTS), 1, runner=SerialRunner())
    assert frozen_files(tmp_path / "out") == sound
    # A whole run builds everything anew, and says so in plan and manifest.
    manifest = build(tmp_path / "out", source, **PARTS)
    assert manifest.environment == {"pyarrow": "0.0.1"}
    assert verify_dataset(open_dataset(str(tmp_path / "out"))) == []


def test_verify_sees_what_digests_cannot(tmp_path: Path, source: Path) -> None:
    """A file whose digest is right but whose rows break what must hold between the sides."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from schemas.manifest import Manifest
    from xtok import storage

    build(tmp_path / "out", source, teachers=["spm_bpe"])
    path = tmp_path / "out" / "teacher=0" / "part-00000.parquet"
    table = pq.read_table(path)
    manifest = Manifest.model_validate_json((tmp_path / "out" / "manifest.json").read_text())
    chunk_ids = table["student_chunk_id"].to_pylist()
    gap = [[chunk + (chunk > 2) for chunk in row] for row in chunk_ids]
    breaks = {
        "student_chunk_id of": table.set_column(4, table.schema.field(4), pa.array(gap, table.schema.field(4).type)),
        "sample_id differs": table.take([1, 0, *range(2, table.num_rows)]),
        "token_mask and input_ids": table.set_column(
            3, table.schema.field(3), pa.array([[True]] * table.num_rows, table.schema.field(3).type)
        ),
        "null in some columns": table.set_column(8, table.schema.field(8), pa.nulls(table.num_rows, pa.string())),
    }
    for hint, broken in breaks.items():
        pq.write_table(broken, path, row_group_size=512)
        part = manifest.parts[0]
        file = part.teacher_files[0]
        assert file is not None
        update = {"sha256": storage.sha256(str(path)), "num_bytes": storage.size(str(path))}
        changed = part.model_copy(update={"teacher_files": (file.model_copy(update=update),)})
        dataset = open_dataset(str(tmp_path / "out"))
        dataset = type(dataset)(manifest.model_copy(update={"parts": (changed,)}), dataset.url)
        findings = verify_dataset(dataset)
        assert len(findings) >= 1, hint
        assert hint in findings[0].message


def test_coverage_is_of_supervised_ordinary_student_tokens(tmp_path: Path, source: Path) -> None:
    build(tmp_path / "out", source, student="spm_bpe", teachers=[side("chatml_bpe", 60)])
    dataset = open_dataset(str(tmp_path / "out"))
    adapter = load_tokenizer(str(TOKENIZERS / "spm_bpe"))
    rows = zip(side_frame(dataset)["input_ids"].to_list(), side_frame(dataset, 0).to_dicts(), strict=True)
    covered = total = 0
    for ids, teacher in rows:
        counts = [not adapter.table.is_special[token] for token in ids]
        inside = [count and chunk >= 0 for count, chunk in zip(counts, teacher["student_chunk_id"], strict=True)]
        assert teacher["coverage"] == np.float32(sum(inside) / sum(counts))
        covered, total = covered + sum(inside), total + sum(counts)
    totals = dataset.manifest.teacher_totals[0]
    assert (totals.num_covered, totals.num_supervised) == (covered, total)
    assert 0 < covered < total
    assert dataset.manifest.coverage[0] == covered / total
