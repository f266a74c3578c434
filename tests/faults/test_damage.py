"""Every file of a published dataset, damaged in every way: `verify` finds it, `repair` rebuilds that alone, a relaunch heals all."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.shards.support import config_for, frozen_files, side
from xtok.cli import main
from xtok.errors import DamagedPartError, DatasetError
from xtok.shards.pipeline import preprocess, rebuild_part, restore_plan
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.verify import damaged_parts, verify_dataset

PARTS = {"part_bytes": 16_000, "row_group_rows": 4, "teachers": ["spm_bpe", side("unigram_nfkc", 64)]}
RUNNER = SerialRunner()


def flip(path: Path) -> None:
    """One bit of one byte."""
    data = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(len(data))
    data[place] ^= 1 << random.Random(place).randrange(8)
    path.write_bytes(data)


def cut(path: Path) -> None:
    """The last bytes are gone."""
    path.write_bytes(path.read_bytes()[:-7])


def grow(path: Path) -> None:
    """A byte too many."""
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    """No byte is left, as after a crash of the machine."""
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [flip, cut, grow, empty, Path.unlink]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_table_and_the_plan(tmp_path: Path, source: Path, damage: Callable[[Path], None]) -> None:
    config = config_for(tmp_path / "out", source, **PARTS)
    preprocess(config, runner=RUNNER)
    sound = frozen_files(tmp_path / "out")
    last = f"part-{len(open_dataset(str(tmp_path / 'out')).manifest.parts) - 1:05d}"
    tables = [path for path in sound if path.endswith(".parquet") and ("part-00000" in path or last in path)]
    assert len(tables) == 2 * 4
    for path in ["plan.json", *tables]:
        damage(tmp_path / "out" / path)
        times = {
            name: (tmp_path / "out" / name).stat().st_mtime_ns for name in sound if name not in (path,) and "plan" not in name
        }
        dataset = open_dataset(str(tmp_path / "out"))
        findings = verify_dataset(dataset)
        assert {finding.path for finding in findings} == {path}
        if path == "plan.json":
            restore_plan(config, runner=RUNNER)
        else:
            (part,) = damaged_parts(findings)
            rebuild_part(config, part, runner=RUNNER)
        assert frozen_files(tmp_path / "out") == sound, path
        rewritten = {name for name, time in times.items() if (tmp_path / "out" / name).stat().st_mtime_ns != time}
        number = path.rsplit("/", 1)[-1].split(".")[0]
        assert all(number in name for name in rewritten), f"{path}: {rewritten}"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_relaunch_heals_everything_at_once(tmp_path: Path, source: Path, damage: Callable[[Path], None]) -> None:
    config = config_for(tmp_path / "out", source, **PARTS)
    preprocess(config, runner=RUNNER)
    sound = frozen_files(tmp_path / "out")
    for path in sound:
        if path not in ("plan.json", "manifest.json") and ("00000" in path) != ("teacher=1" in path):
            damage(tmp_path / "out" / path)
    preprocess(config, runner=RUNNER)
    assert frozen_files(tmp_path / "out") == sound


def test_every_flipped_figure_of_the_manifest_is_found(tmp_path: Path, source: Path) -> None:
    """Its numbers one by one; and what no longer reads as a manifest is told when the dataset is opened."""
    config = config_for(tmp_path / "out", source, **PARTS)
    preprocess(config, runner=RUNNER)
    path = tmp_path / "out" / "manifest.json"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    tried = 0
    for number, line in enumerate(lines):
        digits = [place for place, letter in enumerate(line) if letter.isdigit()]
        if not digits or number % 7:  # one line in seven: each costs a whole verification
            continue
        changed = line[: digits[-1]] + str((int(line[digits[-1]]) + 1) % 10) + line[digits[-1] + 1 :]
        path.write_text("".join([*lines[:number], changed, *lines[number + 1 :]]))
        tried += 1
        try:
            findings = verify_dataset(open_dataset(str(tmp_path / "out")))
        except DatasetError:
            continue  # found too: not a manifest, or not of this format version
        assert findings, f"line {number}: {line}"
    assert tried > 20
    for broken in (text[:-20], text.replace('"parts"', '"part"'), ""):
        path.write_text(broken)
        with pytest.raises(DamagedPartError, match=r"manifest\.json"):
            open_dataset(str(tmp_path / "out"))
        preprocess(config, runner=RUNNER)
        assert path.read_text() == text


def test_a_damaged_record_is_found_and_repaired(tmp_path: Path, source: Path) -> None:
    config = config_for(tmp_path / "out", source, **PARTS)
    preprocess(config, runner=RUNNER)
    sound = frozen_files(tmp_path / "out")
    path = tmp_path / "out" / "records" / "part-00001.json"
    record = json.loads(path.read_text())
    record["num_source_rows"] += 1
    path.write_text(json.dumps(record))
    findings = verify_dataset(open_dataset(str(tmp_path / "out")))
    assert [(finding.part, finding.path) for finding in findings] == [(1, "records/part-00001.json")]
    rebuild_part(config, 1, runner=RUNNER)
    assert frozen_files(tmp_path / "out") == sound


def test_the_commands(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    preprocess(config_for(output, source, **PARTS), runner=RUNNER)
    sound = frozen_files(output)
    flip(output / "student" / "part-00000.parquet")
    (output / "teacher=1" / "part-00001.parquet").unlink()
    cut(output / "plan.json")
    assert main(["verify", str(output)]) != 0
    told = "".join(capsys.readouterr())
    for path in ("student/part-00000.parquet", "teacher=1/part-00001.parquet", "plan.json"):
        assert path in told
    assert main(["repair", str(output)]) == 0
    assert "2 parts rebuilt, all is sound" in capsys.readouterr().out
    assert frozen_files(output) == sound
    moved = tmp_path / "moved"
    shutil.move(output, moved)
    assert main(["verify", str(moved)]) == 0
