"""What `verify` says of damage that no digest of the manifest tells, and that `repair` mends it or refuses, never guesses."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from schemas.config import PreprocessConfig
from tests.unit.shards.support import config_for, frozen_files, udhr_rows, write_lines
from xtok import storage
from xtok.cli import main
from xtok.errors import DamagedPartError, DatasetMismatchError, StorageError
from xtok.shards.pipeline import preprocess, rebuild_parts, restore_manifest
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.verify import verify_dataset

PARTS = {"part_bytes": 16_000, "row_group_rows": 4}
RUNNER = SerialRunner()
RECORD = "records/part-00001.json"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and its dataset out/."""
    folder = tmp_path_factory.mktemp("published")
    source = write_lines(folder / "in.jsonl", [*udhr_rows(40), b"junk"])
    preprocess(config_for(folder / "out", source, **PARTS), runner=RUNNER)
    return folder


@pytest.fixture
def dataset(published: Path, tmp_path: Path) -> Path:
    """A copy of the dataset, to be damaged; its source is copied too."""
    shutil.copytree(published / "out", tmp_path / "out")
    shutil.copy(published / "in.jsonl", tmp_path / "in.jsonl")
    return tmp_path / "out"


def config_of(dataset: Path) -> PreprocessConfig:
    return config_for(dataset, dataset.parent / "in.jsonl", workers=1, **PARTS)


def findings(dataset: Path) -> set[tuple[int | None, str]]:
    return {(finding.part, finding.path) for finding in verify_dataset(open_dataset(str(dataset)))}


@pytest.mark.parametrize("field", ["num_rows", "sha256", "row_group_rows"])
def test_an_edited_record_is_blamed_not_the_manifest(dataset: Path, field: str) -> None:
    sound = frozen_files(dataset)
    record = json.loads((dataset / RECORD).read_text())
    record["student_file"][field] = {"num_rows": 1, "sha256": "0" * 64, "row_group_rows": [1]}[field]
    (dataset / RECORD).write_text(json.dumps(record))
    assert findings(dataset) == {(1, RECORD)}
    rebuild_parts(config_of(dataset), [1], runner=RUNNER)
    assert frozen_files(dataset) == sound


@pytest.mark.parametrize("data", [None, b"", b"{}", b"\xff{", b"[1, 2]"])
def test_a_record_that_is_gone_or_unreadable(dataset: Path, data: bytes | None) -> None:
    sound = frozen_files(dataset)
    (dataset / RECORD).unlink()
    if data is not None:
        (dataset / RECORD).write_bytes(data)
    assert findings(dataset) == {(1, RECORD)}
    rebuild_parts(config_of(dataset), [1], runner=RUNNER)
    assert frozen_files(dataset) == sound


def test_swapped_parts_are_both_found(dataset: Path) -> None:
    sound = frozen_files(dataset)
    for table in ("student", "teacher=0"):
        first, second = (dataset / table / f"part-0000{index}.parquet" for index in (0, 1))
        held = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(held)
    found = findings(dataset)
    assert found == {(part, f"{table}/part-0000{part}.parquet") for part in (0, 1) for table in ("student", "teacher=0")}
    rebuild_parts(config_of(dataset), [0, 1], runner=RUNNER)
    assert frozen_files(dataset) == sound


def test_files_that_are_not_the_datasets(dataset: Path) -> None:
    """Found where `scan_parquet("teacher=*/*.parquet")` and its like would read them; a teacher being added is no damage."""
    foreign = ["student/part-00099.parquet", "teacher=0/copy of part-00000.parquet", "rejects/more/part-00000.parquet"]
    others = [
        "notes.txt",
        "student/.DS_Store",
        "student/_metadata",
        "teacher=1/part-00000.parquet",
        "runs/student/x",
        "my/student/x",
    ]
    for path in [*foreign, *others]:
        (dataset / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(dataset / "student" / "part-00000.parquet", dataset / path)
    assert findings(dataset) == {(None, path) for path in foreign}


def edit_a_total(manifest: dict[str, Any]) -> None:
    manifest["student_totals"]["num_tokens"] += 1


def edit_a_count(manifest: dict[str, Any]) -> None:
    manifest["parts"][1]["student"]["num_tokens"] += 1


def edit_a_digest(manifest: dict[str, Any]) -> None:
    manifest["parts"][1]["teacher_files"][0]["sha256"] = "0" * 64


def edit_the_rejects(manifest: dict[str, Any]) -> None:
    manifest["parts"][1]["rejects_file"]["num_rows"] += 1


def edit_the_plan(manifest: dict[str, Any]) -> None:
    manifest["plan_sha256"] = "0" * 64


def lose_a_field(manifest: dict[str, Any]) -> None:
    del manifest["num_rows"]


def leave_the_folder(manifest: dict[str, Any]) -> None:
    manifest["parts"][0]["student_file"]["path"] = "../in.jsonl"


EDITS_OF_A_PART = [edit_a_count, edit_a_digest, edit_the_rejects]
EDITS = [*EDITS_OF_A_PART, edit_a_total, edit_the_plan, lose_a_field, leave_the_folder]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_manifest_is_blamed_and_written_anew(dataset: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    sound = frozen_files(dataset)
    manifest = json.loads(sound["manifest.json"])
    edit(manifest)
    (dataset / "manifest.json").write_text(json.dumps(manifest, indent=1))
    if edit in (lose_a_field, leave_the_folder):
        with pytest.raises(DamagedPartError, match=r"manifest\.json.*xtok repair"):
            open_dataset(str(dataset))
    else:
        assert (None, "manifest.json") in findings(dataset)
        assert not any(path.endswith(".parquet") for _, path in findings(dataset)), "the files hold"
    # Where the manifest and a record contradict each other, neither is believed, and that part is rebuilt.
    kept = [path for path in sound if path != "manifest.json" and not ("00001" in path and edit in EDITS_OF_A_PART)]
    times = {path: (dataset / path).stat().st_mtime_ns for path in kept}
    restore_manifest(config_of(dataset), runner=RUNNER)
    assert frozen_files(dataset) == sound
    assert times == {path: (dataset / path).stat().st_mtime_ns for path in times}, "nothing else was written"


def lists_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where lists with something in them stand in a JSON document; of their items the first two are entered."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    if isinstance(value, list) and value:
        yield place
    for key, item in items:
        yield from lists_of(item, (*place, key))


@pytest.mark.parametrize("path", ["manifest.json", RECORD, "plan.json"])
def test_a_list_that_lost_or_doubled_an_item_is_found(dataset: Path, path: str) -> None:
    """Found, or refused when the dataset is opened; never an error of another kind."""
    text = (dataset / path).read_text()
    tried = 0
    for place in lists_of(json.loads(text)):
        for change in (lambda items: items[:-1], lambda items: [*items, items[-1]]):
            document = json.loads(text)
            holder = reduce(lambda value, key: value[key], place[:-1], document)
            holder[place[-1]] = change(holder[place[-1]])
            (dataset / path).write_text(json.dumps(document))
            try:
                found = findings(dataset)
            except DamagedPartError:
                continue
            finally:
                tried += 1
            assert found, f"{place} of {path}"
    assert tried > 5


def test_nothing_is_repaired_from_a_source_that_changed(dataset: Path) -> None:
    config = config_of(dataset)
    broken = dataset / "student" / "part-00001.parquet"
    broken.write_bytes(broken.read_bytes()[:-1])
    source = dataset.parent / "in.jsonl"
    source.write_text(source.read_text().replace("human", "humam", 1))
    before = frozen_files(dataset)
    with pytest.raises(DatasetMismatchError, match=r"source in\.jsonl changed"):
        rebuild_parts(config, [1], runner=RUNNER)
    manifest = dataset / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(DatasetMismatchError, match=r"source in\.jsonl changed"):
        restore_manifest(config, runner=RUNNER)
    manifest.write_bytes(before["manifest.json"])
    assert frozen_files(dataset) == before, "nothing was written"


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_source_that_changes_during_the_run_is_never_published(dataset: Path, scheme: str) -> None:
    """Of the same size, so that every part can still be read."""
    text = (dataset.parent / "in.jsonl").read_text()
    source = f"{scheme}{dataset.parent}/in.jsonl"
    storage.write_atomic(source, text.encode())
    output = dataset.parent / "other"

    def change(stage: str, done: int, total: int) -> None:
        if stage == "build parts" and done == 1:
            storage.write_atomic(source, text.replace("human", "humam").encode())

    with pytest.raises(StorageError, match=r"in\.jsonl changed while this run read it"):
        preprocess(config_for(output, source, **PARTS), runner=RUNNER, progress=change)
    assert not (output / "manifest.json").exists()


def test_a_manifest_is_not_written_from_a_record_that_contradicts_it(dataset: Path) -> None:
    """Both are damaged: what is right is known from the source alone."""
    sound = frozen_files(dataset)
    manifest, record = (json.loads(sound[path]) for path in ("manifest.json", RECORD))
    manifest["num_rows"] += 1
    record["student"]["num_tokens"] += 1
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    (dataset / RECORD).write_text(json.dumps(record))
    restore_manifest(config_of(dataset), runner=RUNNER)
    assert frozen_files(dataset) == sound


def test_the_command_mends_manifest_and_part_together(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = frozen_files(dataset)
    (dataset / "runs" / "config.json").write_text(config_of(dataset).model_dump_json())
    (dataset / "manifest.json").write_bytes(b"{")
    (dataset / "rejects" / "part-00000.parquet").unlink()
    assert main(["repair", str(dataset)]) == 0
    assert "manifest.json: written anew" in capsys.readouterr().out
    assert frozen_files(dataset) == sound
    assert hashlib.sha256(sound["plan.json"]).hexdigest() == open_dataset(str(dataset)).manifest.plan_sha256
