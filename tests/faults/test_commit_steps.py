"""Storage fails, or the process ends, at every single step that makes something visible; a relaunch gives the undisturbed bytes."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.faults.harness import Died, count_steps
from tests.unit.shards.support import config_for, frozen_files, side
from xtok import storage
from xtok.errors import StorageError
from xtok.shards.pipeline import preprocess, rebuild_part
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.verify import verify_dataset

PARTS = {"part_bytes": 16_000, "row_group_rows": 4}
RUNNER = SerialRunner()


def as_if_dead(output: Path) -> None:
    """What this process left in the staging folder now belongs to a process that is gone."""
    staging = output / "runs" / "staging"
    if staging.is_dir():
        for path in staging.iterdir():
            path.rename(path.with_name(path.name.replace(f".{os.getpid()}.", f".{2**22 + 1}.")))


def failure(step: str, how: str, run: Callable[[], object]) -> BaseException | None:
    """How the run ended. Only what stands in runs/timings/ may fail without a word: it is for people, and the part is whole."""
    if how == "full" and step.startswith("timings/"):
        run()
        return None
    with pytest.raises(StorageError if how == "full" else Died) as caught:
        run()
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "before", "after"])
def test_every_step_of_a_run(tmp_path: Path, source: Path, how: str) -> None:
    config = config_for(tmp_path / "whole", source, **PARTS)
    with count_steps() as steps:
        preprocess(config, runner=RUNNER)
    whole = frozen_files(tmp_path / "whole")
    assert steps.done[:2] == ["remove manifest.json", "plan.json"]
    assert steps.done[-1] == "manifest.json"
    for number, name in enumerate(steps.done):
        place = f"step {number}, {name}, {how}"
        output = tmp_path / f"{how}-{number}"
        config = config_for(output, source, **PARTS)
        with count_steps(number, how) as broken:
            error = failure(name, how, partial(preprocess, config, runner=RUNNER))
        if how == "full":
            staging = output / "runs" / "staging"
            assert not staging.is_dir() or not list(staging.iterdir()), place
        if error is not None:
            if how == "full":
                assert re.search(rf"cannot (write|remove) .*{name.rsplit('/', 1)[-1].split()[-1]}.*no space left", str(error)), (
                    place
                )
            is_published = how == "after" and name == "manifest.json"
            assert (output / "manifest.json").exists() == is_published, place
            assert broken.done == steps.done[: number + (how == "after")], place
        as_if_dead(output)
        with count_steps() as relaunch:
            preprocess(config, runner=RUNNER)
        assert frozen_files(output) == whole, place
        finished = {step for step in broken.done if step.startswith("records/")}
        assert finished.isdisjoint(relaunch.done), f"{place}: a finished part was built again"
        assert not list((output / "runs" / "staging").iterdir()), place
        assert verify_dataset(open_dataset(str(output))) == [], place


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "after"])
def test_every_step_of_adding_a_teacher(tmp_path: Path, source: Path, how: str) -> None:
    """The published dataset stays published, and whole, until the new manifest takes its place."""
    teachers = ["spm_bpe", side("unigram_nfkc")]
    preprocess(config_for(tmp_path / "whole", source, teachers=teachers, **PARTS), runner=RUNNER)
    preprocess(config_for(tmp_path / "first", source, teachers=teachers[:1], **PARTS), runner=RUNNER)
    shutil.copytree(tmp_path / "first", tmp_path / "counted")
    with count_steps() as steps:
        preprocess(config_for(tmp_path / "counted", source, teachers=teachers, **PARTS), runner=RUNNER)
    whole, first = frozen_files(tmp_path / "whole"), frozen_files(tmp_path / "first")
    for number, name in enumerate(steps.done):
        place = f"step {number}, {name}, {how}"
        output = tmp_path / f"{how}-{number}"
        shutil.copytree(tmp_path / "first", output)
        config = config_for(output, source, teachers=teachers, **PARTS)
        with count_steps(number, how):
            failure(name, how, partial(preprocess, config, runner=RUNNER))
        as_if_dead(output)
        now = frozen_files(output)
        if now["manifest.json"] == first["manifest.json"]:
            kept = [path for path in first if path.startswith(("student/", "teacher=0/"))]
            assert {path: now[path] for path in kept} == {path: first[path] for path in kept}, place
        preprocess(config, runner=RUNNER)
        assert frozen_files(output) == whole, place


@pytest.mark.parametrize("how", ["full", "before", "after"])
def test_every_step_of_a_repair(tmp_path: Path, source: Path, how: str) -> None:
    config = config_for(tmp_path / "out", source, **PARTS)
    preprocess(config, runner=RUNNER)
    sound = frozen_files(tmp_path / "out")
    broken_file = tmp_path / "out" / "teacher=0" / "part-00001.parquet"
    broken_file.unlink()
    with count_steps() as steps:
        rebuild_part(config, 1, runner=RUNNER)
    assert "records/part-00001.json" in steps.done
    for number, name in enumerate(steps.done):
        place = f"step {number}, {name}, {how}"
        broken_file.unlink()
        with count_steps(number, how):
            failure(name, how, lambda: rebuild_part(config, 1, runner=RUNNER))
        as_if_dead(tmp_path / "out")
        rebuild_part(config, 1, runner=RUNNER)
        assert frozen_files(tmp_path / "out") == sound, place
    storage.clean_staging(str(tmp_path / "out" / "runs" / "staging"))
    assert not list((tmp_path / "out" / "runs" / "staging").glob(f"*.{socket.gethostname()}.*"))
