"""Stages of a part: own time only, adding up to the whole; nothing outside of a measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.shards.support import PARTS, build, udhr_rows, write_lines
from xtok.shards.timing import OTHER, measured, read_timings, stage, staged_items, write_timings

PAUSE = 0.02


def test_a_stage_inside_another_counts_for_the_inner_one_alone() -> None:
    began = time.perf_counter()
    with measured() as seconds:
        time.sleep(PAUSE)
        with stage("outer"):
            time.sleep(PAUSE)
            with stage("inner"):
                time.sleep(3 * PAUSE)
            time.sleep(PAUSE)
    elapsed = time.perf_counter() - began
    assert seconds[OTHER] >= PAUSE
    assert seconds["outer"] >= 2 * PAUSE
    assert seconds["inner"] >= 3 * PAUSE
    assert seconds["outer"] <= elapsed - 4 * PAUSE, "the inner stage's time is not the outer's"
    assert sum(seconds.values()) == pytest.approx(elapsed, abs=PAUSE / 4)


def test_an_error_closes_its_stages() -> None:
    with measured() as seconds:
        with pytest.raises(KeyError), stage("broken"):
            raise KeyError
        time.sleep(PAUSE)
    assert seconds[OTHER] >= PAUSE > seconds["broken"]


def test_producing_an_item_counts_and_using_it_does_not() -> None:
    def slow() -> Iterator[int]:
        time.sleep(PAUSE)
        yield from (1, 2)

    with measured() as seconds:
        assert list(staged_items("read", slow())) == [1, 2]
        for _ in staged_items("quick", [1]):
            time.sleep(PAUSE)
    assert seconds["read"] >= PAUSE > seconds["quick"]


def test_nothing_happens_outside_of_a_measurement() -> None:
    with stage("alone"):
        pass
    with measured() as seconds:
        pass
    with stage("after"):
        pass
    assert set(seconds) == {OTHER}


def test_every_built_part_leaves_its_stages(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", udhr_rows(40))
    manifest = build(tmp_path / "out", source, **PARTS)
    assert len(manifest.parts) > 1
    for part in manifest.parts:
        seconds = read_timings(str(tmp_path / "out"), part.index)
        assert {"read", "tokenize", "align", "write", "check", OTHER} <= seconds.keys()
        assert all(value >= 0 for value in seconds.values())


def test_timings_that_cannot_be_written_or_read_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder is needed")
    write_timings(str(tmp_path), 0, {"read": 1.0})
    assert read_timings(str(tmp_path), 0) == {}
