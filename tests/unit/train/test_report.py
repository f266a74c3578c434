"""What a run leaves for people, and what the run folder remembers between launches."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.train_config import TrainConfig
from tests.unit.train.support import make_config
from xtok.errors import ConfigError, TrainingError
from xtok.train.child import TrainingProcess, _Follower, typed_error
from xtok.train.config_file import absolute_train_config, load_bundled_train_config
from xtok.train.launch import torchrun_arguments
from xtok.train.plot import draw_plot
from xtok.train.report import metrics_table, read_metrics, train_report_markdown
from xtok.train.run_record import begin_run, finish_run, nothing_to_do

CE_ONLY = {"objectives": {"distill": None, "ce": 1.0}}


def lines(num_steps: int = 100) -> list[dict[str, Any]]:
    training = [
        {
            "step": step,
            "kind": "train",
            "loss": 9.0 / step,
            "ce_loss": 8.0 / step,
            "tau": 1.5,
            "tokens": 10,
            "tokens_per_s": 100.0,
        }
        | {"draft_greedy_acceptance_by_slot": [0.5, None]}
        for step in range(1, num_steps + 1)
    ]
    return [
        {"step": 0, "kind": "evaluation", "loss": 9.5, "ce_loss": 9.4, "tau": 1.0},
        *training,
        {"step": num_steps, "kind": "evaluation", "loss": 1.0, "ce_loss": None, "tau": 2.0},
    ]


def test_the_table_has_evaluations_and_a_choice_of_steps() -> None:
    table = metrics_table(lines())
    assert [row["step"] for row in table if row["kind"] == "evaluation"] == [0, 100]
    steps = [row["step"] for row in table if row["kind"] == "train"]
    assert len(steps) == 20
    assert (steps[0], steps[-1]) == (1, 100)
    assert "KD" not in table[0], "a column without a value is left out"
    assert table[1]["accepted by slot"] == "0.50 -"
    assert metrics_table([]) == []
    assert len(metrics_table(lines(3))) == 5


def test_the_report_says_what_was_trained_and_where_it_lies(world: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig.model_validate(make_config(world, tmp_path))
    report = train_report_markdown(config, lines(), exported={"draft": "out/draft"}, seconds=61.0, plot="training.png")
    for part in (
        "distill 1, ce 0.2, draft 0.5",
        "| loss | 9.5 | 1 |",
        "![losses and acceptance](training.png)",
        "- draft: `out/draft`",
    ):
        assert part in report
    assert "| CE | 9.4 |" not in report, "an evaluation without that value is not compared"
    empty = train_report_markdown(config, [], exported={}, seconds=1.0, plot=None)
    assert "No step was logged." in empty
    assert "xtok[train]" in empty


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    assert draw_plot(lines(), str(tmp_path / "a.png"))
    assert draw_plot([line for line in lines() if line.pop("tau")], str(tmp_path / "b.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert not draw_plot([], str(tmp_path / "c.png"))


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    assert read_metrics(str(tmp_path)) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(str(tmp_path)) == [{"step": 1}, {"step": 2}]


def test_a_manifest_is_trained_on_once(world: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(world["dataset"], tmp_path / "dataset")
    document = make_config(world, tmp_path / "run", dataset=str(tmp_path / "dataset"), **CE_ONLY)
    config = TrainConfig.model_validate(document)
    assert nothing_to_do(config) is None
    begin_run(config)
    weights = tmp_path / "run/export/student/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    assert nothing_to_do(config) is None, "it was not finished"
    finish_run(config)
    assert "no new manifest was published" in str(nothing_to_do(config))
    assert nothing_to_do(TrainConfig.model_validate({**document, "steps": 11})) is None, (
        "another configuration is something to do"
    )

    manifest = tmp_path / "dataset/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))  # another digest
    assert nothing_to_do(config) is None
    begin_run(config)
    [earlier] = (tmp_path / "run/earlier").iterdir()
    assert sorted(path.name for path in earlier.iterdir()) == ["export", "metrics.jsonl"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "earlier", "run.json"]
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    finish_run(config)
    assert nothing_to_do(config) is not None
    begin_run(config)
    manifest.write_text(manifest.read_text() + "\n")  # published while that run trains
    finish_run(config)
    assert nothing_to_do(config) is None, "nothing was trained on the newest manifest yet"
    (tmp_path / "run/run.json").write_text("{")
    assert nothing_to_do(config) is None


def test_a_run_whose_results_are_gone_is_not_done(world: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig.model_validate(make_config(world, tmp_path / "run", **CE_ONLY))
    weights = tmp_path / "run/export/student/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    begin_run(config)
    finish_run(config)
    assert nothing_to_do(config) is not None
    weights.write_bytes(b"we")
    assert nothing_to_do(config) is None
    shutil.rmtree(tmp_path / "run/export")
    assert nothing_to_do(config) is None
    finish_run(config.model_copy(update={"export_student": False}))
    assert nothing_to_do(config.model_copy(update={"export_student": False})) is not None
    assert nothing_to_do(config) is None, "the student is wanted now"


def test_paths_are_made_whole_and_hub_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").mkdir()
    teachers = [{"model": "org/model"}]
    config = TrainConfig.model_validate({"student": {"model": "student"}, "teachers": teachers, "dataset": "d", "output": "o"})
    whole = absolute_train_config(config)
    assert whole.student.model == str(tmp_path / "student")
    assert whole.teachers[0].model == "org/model"
    assert (whole.dataset, whole.output) == (str(tmp_path / "d"), str(tmp_path / "o"))


def test_the_bundled_example_finds_its_model_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_bundled_train_config()
    assert (Path(config.student.model) / "config.json").exists()
    assert Path(str(config.student.tokenizer)).is_dir()


def test_torchrun_is_told_the_layout() -> None:
    base = {"student": {"model": "m"}, "teachers": [{"model": "t"}], "dataset": "d", "output": "o"}
    alone = torchrun_arguments(TrainConfig.model_validate({**base, "parallel": {"processes": 3}}), "c.yaml")
    assert "--standalone" in alone
    assert alone[alone.index("--nproc-per-node") + 1] == "3"
    assert alone[-4:] == ["-m", "xtok.train", "--config", "c.yaml"]
    parallel = {"processes": 2, "num_nodes": 2, "rendezvous": "node0:29500"}
    several = torchrun_arguments(TrainConfig.model_validate({**base, "parallel": parallel}), "c.yaml")
    assert several[several.index("--rdzv-endpoint") + 1] == "node0:29500"
    assert several[several.index("--nnodes") + 1] == "2"


def test_a_failure_of_the_child_gets_its_type_back() -> None:
    error = typed_error("ConfigError: teachers: too many\n")
    assert type(error) is ConfigError
    assert str(error) == "teachers: too many"
    assert type(typed_error("ZeroDivisionError: no")) is TrainingError
    assert str(typed_error("Signal 9")) == "Signal 9"


def test_a_child_that_was_interrupted_interrupts_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches both, the child often first: that is no failure of the training."""
    interrupted = tmp_path / "python"
    interrupted.write_text("#!/bin/sh\nexit 130\n")
    interrupted.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interrupted))
    document = {"student": {"model": "m"}, "objectives": {"distill": None}, "dataset": "d", "output": str(tmp_path / "run")}
    with TrainingProcess(TrainConfig.model_validate(document)) as child:
        assert list(child.lines()) == []
        with pytest.raises(KeyboardInterrupt):
            child.result()


def test_lines_are_followed_across_a_rewrite(tmp_path: Path) -> None:
    """A resumed run replaces the file: what an earlier launch wrote is never shown, each new line once."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "time": 2.0}\n')
    follower = _Follower(str(file))
    assert follower.fresh() == []
    now = time.time() + 1
    draft = tmp_path / "draft"
    draft.write_text(f'{{"step": 1, "time": 1.0}}\n{{"step": 2, "time": {now}}}\n{{"st')
    draft.replace(file)
    assert [line["step"] for line in follower.fresh()] == [2]
    with file.open("a") as stream:
        stream.write(f'ep": 3, "time": {now}}}\n')
    assert [line["step"] for line in follower.fresh()] == [3]
    assert follower.fresh() == []
    assert _Follower(str(tmp_path / "none")).fresh() == []
