"""Training over real ranks: one loss curve on every layout, exact resuming, faults that name their rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from schemas.train_config import ParallelSettings
from tests.dist.harness import ranks
from tests.dist.training_runs import run_in_rank
from tests.unit.train.support import make_config, read_metrics, shared_world
from xtok.errors import TrainingError
from xtok.train.runtime import start_runtime, stop_runtime

pytestmark = pytest.mark.slow
TIMEOUT = 240.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared_world(tmp_path_factory.mktemp)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Runs of one process are run in this one."""
    start_runtime(ParallelSettings(device="cpu"))
    yield
    stop_runtime()


def config_of(world: dict[str, Any], output: Path, **changes: Any) -> dict[str, Any]:
    """Every objective, four or five rows a step: enough for four ranks, or three micro-batches, to have some each."""
    evaluation = {"dataset": world["held_out"], "every_steps": 5, "max_rows": 4}
    return make_config(world, output, **{"batch_tokens": 330, "evaluation": evaluation, **changes})


def train(document: dict[str, Any], *, num_ranks: int = 1, tp: int = 1) -> list[dict[str, Any]]:
    document = {**document, "parallel": {"device": "cpu", "processes": num_ranks, "tensor_parallel": tp}}
    if num_ranks == 1:
        run_in_rank(None, document)
    else:
        ranks(num_ranks).values(run_in_rank, document, timeout_seconds=TIMEOUT)
    return read_metrics(Path(document["output"]))


def resumed(document: dict[str, Any], checkpoints: Path, **layout: int) -> list[dict[str, Any]]:
    """The steps after the fifth, from the checkpoint of another run."""
    shutil.copytree(checkpoints / "step-00000005", Path(document["output"]) / "checkpoints/step-00000005")
    got = train(document, **layout)
    assert [line["step"] for line in got] == [6, 7, 8, 9, 10]
    return got


@pytest.fixture(scope="module")
def one_process(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The undisturbed run that the others are held against: cross-tokenizer teacher, same-tokenizer teacher and draft at once."""
    output = tmp_path_factory.mktemp("one") / "run"
    return output, train(config_of(world, output))


@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 1), (2, 2), (4, 2)], ids=["dp2", "tp2", "dp2-tp2"])
def test_loss_curves_agree(world: dict[str, Any], one_process: Any, tmp_path: Path, num_ranks: int, tp: int) -> None:
    output = tmp_path / "run"
    got = train(config_of(world, output), num_ranks=num_ranks, tp=tp)
    want = one_process[1]
    assert len(got) == len(want) == 10
    for name in ("loss", "kd_loss", "ce_loss", "draft_loss", "kd_loss_0", "kd_loss_1", "grad_norm"):
        for left, right in zip(got, want, strict=True):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-4), (name, left["step"])
    assert want[-1]["loss"] < want[0]["loss"]
    for left, right in zip(read_metrics(output, "evaluation"), read_metrics(one_process[0], "evaluation"), strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
    exported = load_file(output / "export/student/model.safetensors")
    for name, tensor in load_file(one_process[0] / "export/student/model.safetensors").items():
        torch.testing.assert_close(exported[name], tensor, rtol=2e-3, atol=2e-3)
    assert (output / "export/draft/model.safetensors").exists()
    if num_ranks == 4:  # what two times two ranks saved, one process goes on with
        for left, right in zip(resumed(config_of(world, tmp_path / "one"), output / "checkpoints"), got[5:], strict=True):
            assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)


def test_accumulation_changes_nothing(world: dict[str, Any], one_process: Any, tmp_path: Path) -> None:
    got = train(config_of(world, tmp_path / "run", accumulation=3, evaluation=None))
    for left, right in zip(got, one_process[1], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)


def test_a_step_with_fewer_rows_than_ranks(world: dict[str, Any], tmp_path: Path) -> None:
    """One row a step: a rank without rows still takes part in every collective, with teachers in shards, and whichever is selected."""
    changes: dict[str, Any] = {"batch_tokens": 2, "steps": 3, "evaluation": None, "checkpoint": {"every_steps": None}}
    changes["distillation"] = {"vocab_topk": None, "teacher_combination": "select_teacher"}
    whole = config_of(world, tmp_path / "one", **changes)
    want = train(whole)
    teachers = [{**teacher, "shard": True} for teacher in whole["teachers"]]
    got = train({**whole, "output": str(tmp_path / "two"), "teachers": teachers, "accumulation": 2}, num_ranks=2)
    for name in ("loss", "kd_loss", "draft_loss", "grad_norm"):
        assert [line[name] for line in got] == pytest.approx([line[name] for line in want], rel=1e-4), name


def test_bfloat16_with_activation_checkpointing_on_every_layout(world: dict[str, Any], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": "bfloat16", "activation_checkpointing": True, "steps": 2, "evaluation": None}
    want = train(config_of(world, tmp_path / "one", **changes))
    got = train(config_of(world, tmp_path / "four", **changes, accumulation=2), num_ranks=4, tp=2)
    assert [line["loss"] for line in got] == pytest.approx([line["loss"] for line in want], rel=1e-2)


def test_resumed_equals_uninterrupted(world: dict[str, Any], one_process: Any, tmp_path: Path) -> None:
    checkpoints = one_process[0] / "checkpoints"
    for left, right in zip(resumed(config_of(world, tmp_path / "same"), checkpoints), one_process[1][5:], strict=True):
        assert left["loss"] == right["loss"]  # bit for bit on one layout
    other = resumed(config_of(world, tmp_path / "other"), checkpoints, num_ranks=2)
    for left, right in zip(other, one_process[1][5:], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)


def test_checkpoints_hold_no_pickle_and_are_pruned(one_process: Any) -> None:
    folder = one_process[0] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best.json", "step-00000005", "step-00000010"]
    for path in folder.rglob("*"):
        assert path.is_dir() or path.suffix in (".safetensors", ".json"), path
    state = json.loads((folder / "step-00000010/state.json").read_text())
    assert state["step"] == 10
    assert state["best_step"] == json.loads((folder / "best.json").read_text())["step"] == 10


def test_a_loss_that_is_not_finite_stops_and_names_the_rows(world: dict[str, Any], one_process: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    optimizer = {"learning_rate": 1e30, "schedule": "constant", "clip_norm": None}
    objectives = {"distill": None, "ce": 1.0, "draft": None}
    document = make_config(world, output, objectives=objectives, optimizer=optimizer, checkpoint={"every_steps": 1})
    document["parallel"] = {"device": "cpu", "processes": 2}
    errors = ranks(2).errors(run_in_rank, document, timeout_seconds=TIMEOUT)
    assert all("loss" in message and "(idx)" in message and kind == "TrainingError" for kind, message in errors), errors
    assert any((output / "checkpoints").glob("step-*/state.json"))  # what was good is kept


def test_another_configuration_does_not_continue_a_run(world: dict[str, Any], one_process: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(one_process[0] / "checkpoints", output / "checkpoints")
    with pytest.raises(TrainingError, match="another training configuration"):
        train(config_of(world, output, batch_tokens=700))
