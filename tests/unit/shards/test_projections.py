"""The projections of a dataset: built once, kept, recorded, verified, mended, without torch."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.unit.shards.support import build, config_for, udhr_rows, write_lines
from xtok.projection import read_projection
from xtok.shards.pipeline import restore_projections
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.verify import verify_dataset

TEACHERS = ["spm_bpe", "chatml_bpe"]


def test_built_kept_and_recorded(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(12))
    manifest = build(tmp_path / "out", source, teachers=TEACHERS, projection=True)
    entry, same = manifest.projections
    assert same is None  # the student's own tokenizer
    assert entry is not None
    file = tmp_path / "out" / entry.path
    table = read_projection(
        str(file),
        student_fingerprint=manifest.student.content_fingerprint,
        teacher_fingerprint=manifest.teachers[0].content_fingerprint,
    )
    assert len(table.indices) == entry.num_rows
    first = file.stat().st_mtime_ns
    assert build(tmp_path / "out", source, teachers=TEACHERS, projection=True) == manifest
    assert file.stat().st_mtime_ns == first  # found, not built again
    again = build(tmp_path / "again", source, teachers=TEACHERS, projection=True)
    assert again.projections == manifest.projections
    assert build(tmp_path / "without", source, teachers=TEACHERS).projections == ()


def test_damage_is_found_and_mended(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(12))
    manifest = build(tmp_path / "out", source, projection=True)
    file = tmp_path / "out" / manifest.projections[0].path
    whole = file.read_bytes()
    dataset = open_dataset(str(tmp_path / "out"))
    assert verify_dataset(dataset) == []
    places = random.Random(0).sample(range(len(whole)), 8)  # in rows, page headers and footer
    for damage in (whole[:-9], *(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places), None):
        file.unlink() if damage is None else file.write_bytes(damage)
        assert [finding.path for finding in verify_dataset(dataset)] == [manifest.projections[0].path]
        restore_projections(config_for(tmp_path / "out", source, projection=True), runner=SerialRunner())
        assert file.read_bytes() == whole


def test_needs_no_torch() -> None:
    import subprocess

    code = "import sys, xtok.shards.projections; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
