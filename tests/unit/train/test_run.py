"""Whole runs in one process: every subset of objectives, precision and memory settings, resuming, exports."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma2Config, Gemma2ForCausalLM

from schemas.train_config import TrainConfig
from tests.bench.report import figure_of
from tests.bench.training import figures
from tests.unit.train.support import make_config, read_metrics
from xtok.draft.export import load_draft
from xtok.errors import TrainingError
from xtok.tokenizers import load_tokenizer
from xtok.train.batches import StepBatches
from xtok.train.build import Training
from xtok.train.export import export_checkpoint
from xtok.train.loop import run_training
from xtok.train.runtime import Runtime
from xtok.train.step import train_step

QUICK = {"steps": 3, "batch_tokens": 300, "optimizer": {"learning_rate": 1e-3}, "checkpoint": {"every_steps": None}}


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output)]


def student_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("objectives", "names", "absent"),
    [
        ({"distill": 1.0, "ce": None, "draft": None}, {"kd_loss", "kd_loss_0", "kd_loss_1"}, {"ce_loss", "draft_loss", "tau"}),
        ({"distill": None, "ce": 1.0, "draft": None}, {"ce_loss"}, {"kd_loss", "draft_loss", "tau"}),
        ({"distill": None, "ce": None, "draft": 1.0}, {"draft_loss", "tau"}, {"kd_loss", "ce_loss"}),
        ({"distill": None, "ce": 0.5, "draft": 1.0}, {"ce_loss", "draft_loss", "tau"}, {"kd_loss"}),
    ],
    ids=["distill", "ce", "draft", "ce+draft"],
)
def test_every_subset_of_objectives(
    world: dict[str, Any], tmp_path: Path, run: Any, objectives: Any, names: set[str], absent: set[str]
) -> None:
    evaluation = {"dataset": world["held_out"], "every_steps": None, "max_rows": 6}
    result = run(make_config(world, tmp_path, objectives=objectives, evaluation=evaluation, **{**QUICK, "steps": 6}))
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert names <= set(lines[0])
    assert not absent & set(lines[0])
    first, last = read_metrics(tmp_path, "evaluation")
    assert (first["step"], last["step"]) == (0, 6)
    assert last["loss"] < first["loss"], "something was learned"
    assert last["perplexity"] == pytest.approx(torch.tensor(last["ce_loss"]).exp().item(), rel=1e-4)
    weighted = [
        (objectives[name], last.get(f"{key}_loss")) for name, key in (("distill", "kd"), ("ce", "ce"), ("draft", "draft"))
    ]
    assert last["loss"] == pytest.approx(sum(weight * value for weight, value in weighted if weight))
    assert result["evaluation"]["loss"] == last["loss"]
    trains_student = bool(objectives["distill"] or objectives["ce"])
    assert set(result["exported"]) == ({"student"} if trains_student else set()) | ({"draft"} if objectives["draft"] else set())
    tensors = load_file(next((tmp_path / "checkpoints/step-00000006").glob("*.safetensors")))
    assert any(name.startswith("student.") for name in tensors) == trains_student


def test_a_dspark_draft(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    document = make_config(world, tmp_path, objectives={"distill": None, "ce": None, "draft": 1.0}, **QUICK)
    document["draft"] = {**document["draft"], "kind": "dspark"}
    run(document)
    assert read_metrics(tmp_path)[-1]["draft_loss"] > 0
    again = {
        **document,
        "output": str(tmp_path / "again"),
        "draft": {**document["draft"], "load": str(tmp_path / "export/draft")},
    }
    run({**again, "steps": 1})
    assert type(load_draft(str(tmp_path / "again/export/draft"))).__name__ == "DSparkDraftModel"


@pytest.fixture(scope="module")
def plain(world: dict[str, Any], runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run without any special setting, done."""
    document = make_config(world, tmp_path_factory.mktemp("plain"), **QUICK)
    run_training(TrainConfig.model_validate(document), runtime)
    return document


def test_memory_settings_change_nothing(plain: dict[str, Any], tmp_path: Path, run: Any) -> None:
    teachers = [{**teacher, "offload": True} for teacher in plain["teachers"]]
    run({**plain, "output": str(tmp_path / "saving"), "teachers": teachers, "activation_checkpointing": True})
    for left, right in zip(losses(tmp_path / "saving"), losses(Path(plain["output"])), strict=True):
        assert left == pytest.approx(right, rel=1e-6)


def test_bfloat16_stays_near_float32_and_keeps_float32_weights(plain: dict[str, Any], tmp_path: Path, run: Any) -> None:
    run({**plain, "output": str(tmp_path / "half"), "precision": "bfloat16", "activation_checkpointing": True})
    half, full = losses(tmp_path / "half"), losses(Path(plain["output"]))
    assert half != full
    for left, right in zip(half, full, strict=True):
        assert left == pytest.approx(right, rel=2e-2)
    [file] = (tmp_path / "half/checkpoints/step-00000003").glob("*.safetensors")
    assert {tensor.dtype for name, tensor in load_file(file).items() if name.startswith("student.")} == {torch.float32}


def test_a_teacher_that_caps_its_logits(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    """Its logits are bounded, so it teaches less than the same weights without the cap."""
    torch.manual_seed(4)
    vocab_size = AutoConfig.from_pretrained(world["teachers"][0]).vocab_size
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    kd = []
    for cap in (None, 0.01):
        config = Gemma2Config(
            vocab_size=vocab_size,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.5,
            final_logit_softcapping=cap,
            **sizes,
        )
        torch.manual_seed(5)
        folder = tmp_path / f"teacher-{cap}"
        Gemma2ForCausalLM(config).save_pretrained(folder)
        teacher = {"model": str(folder), "tokenizer": world["teachers"][0], "dtype": "float32"}
        output = tmp_path / f"run-{cap}"
        document = make_config(world, output, objectives={"distill": 1.0, "ce": None}, **{**QUICK, "steps": 1})
        run({**document, "teachers": [teacher, document["teachers"][1]]})
        kd.append(read_metrics(output)[0]["kd_loss_0"])
    assert kd[1] < 0.2 * kd[0]


@pytest.mark.parametrize("combination", ["select_teacher", "sum"])
def test_kd_loss_sums_up_the_teachers(world: dict[str, Any], tmp_path: Path, run: Any, combination: str) -> None:
    distillation: dict[str, Any] = {"vocab_topk": None, "teacher_combination": combination}
    if combination == "sum":
        distillation["teacher_weights"] = [0.25, 2.0]
    document = make_config(world, tmp_path, objectives={"distill": 1.0, "ce": None}, distillation=distillation, **QUICK)
    run(document)
    for line in read_metrics(tmp_path):
        assert line["kd_loss"] == pytest.approx(line["loss"], rel=1e-4)


def test_the_best_is_saved_and_kept_and_exported(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    """A rate that first learns and then ruins: the best evaluation is neither the first nor the last."""
    evaluation = {"dataset": world["held_out"], "every_steps": 1, "max_rows": 6}
    optimizer = {"learning_rate": 0.05, "warmup_steps": 8, "schedule": "constant", "clip_norm": None}
    objectives = {"distill": None, "ce": 1.0}
    changes = {"evaluation": evaluation, "optimizer": optimizer, "objectives": objectives}
    document = make_config(world, tmp_path, **{**QUICK, **changes, "steps": 8})
    result = run(document)
    lines = [line for line in read_metrics(tmp_path, "evaluation") if line["step"]]
    best = min(lines, key=lambda line: line["loss"])
    assert best["step"] < 8, [line["loss"] for line in lines]
    assert json.loads((tmp_path / "checkpoints/best.json").read_text())["step"] == best["step"]
    assert (tmp_path / f"checkpoints/step-{best['step']:08d}/state.json").exists()
    config = TrainConfig.model_validate(document)
    newest = export_checkpoint(config, folder=str(tmp_path / "newest"))
    chosen = export_checkpoint(config, checkpoint="best", folder=str(tmp_path / "best"))
    at_end = student_of(Path(result["exported"]["student"]))
    for name, tensor in student_of(Path(newest["student"])).items():
        assert torch.equal(tensor, at_end[name])
    assert any(not torch.equal(tensor, at_end[name]) for name, tensor in student_of(Path(chosen["student"])).items())
    fingerprint = load_tokenizer(world["student"]).content_fingerprint
    assert load_tokenizer(chosen["student"]).content_fingerprint == fingerprint
    with pytest.raises(TrainingError, match="no checkpoint of step 99"):
        export_checkpoint(config, checkpoint="99")


def test_an_evaluation_that_is_not_finite_stops_before_it_is_saved(
    world: dict[str, Any], tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update ruins the student: what it gives is no best (nothing is left to count), and none of it is kept as a checkpoint."""

    def ruin(training: Training, *others: Any) -> dict[str, Any]:
        values = train_step(training, *others)
        if others[-1] == 1:
            next(training.student.parameters()).data.fill_(float("nan"))
        return values

    monkeypatch.setattr("xtok.train.loop.train_step", ruin)
    evaluation = {"dataset": world["held_out"], "every_steps": 1, "max_rows": 6}
    document = make_config(world, tmp_path, **{**QUICK, "evaluation": evaluation, "checkpoint": {"every_steps": 1}})
    with pytest.raises(
        TrainingError, match=rf"step 2: ce_loss.* on the held-out rows of {world['held_out']} is no finite number"
    ):
        run(document)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert [line["step"] for line in read_metrics(tmp_path, "evaluation")] == [0, 1]


def test_a_remote_dataset_is_kept_in_the_configured_cache(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    """Both datasets, in the folder that was asked for and no other; the same losses as from the local disk, with no cache too."""
    remote = fsspec.filesystem("memory")
    for name in ("dataset", "held_out"):
        remote.put(world[name], f"/training/{name}", recursive=True)
    changes = {**QUICK, "steps": 1, "objectives": {"distill": None, "ce": 1.0}}
    evaluation = {"dataset": "memory://training/held_out", "every_steps": None, "max_rows": 6}
    seen = {}
    try:
        for name, cache_bytes in (("kept", 10**9), ("none", 0)):
            cache = {"cache_folder": str(tmp_path / name), "cache_bytes": cache_bytes}
            document = make_config(world, tmp_path / f"run-{name}", **changes, **cache, evaluation=evaluation)
            run({**document, "dataset": "memory://training/dataset"})
            seen[name] = losses(tmp_path / f"run-{name}")
    finally:
        remote.rm("/training", recursive=True)
    assert sum(path.is_file() for path in (tmp_path / "kept").rglob("*")) >= 2, "a file of each"
    assert not (tmp_path / "none").exists()
    run(make_config(world, tmp_path / "local", **changes))
    assert seen["kept"] == seen["none"] == losses(tmp_path / "local")


def test_a_step_says_how_long_it_waited_for_its_batch(
    world: dict[str, Any], tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read ahead, a step waits for nothing; behind a loader that is too slow it says so, and its rate counts the wait."""
    document = make_config(world, tmp_path / "fast", **{**QUICK, "objectives": {"distill": None, "ce": 1.0}})
    run(document)
    rows = StepBatches._rows

    def slow(steps: StepBatches) -> Iterator[Any]:
        for row in rows(steps):
            time.sleep(0.1)
            yield row

    monkeypatch.setattr(StepBatches, "_rows", slow)
    run({**document, "output": str(tmp_path / "slow")})
    fast, slowed = read_metrics(tmp_path / "fast"), read_metrics(tmp_path / "slow")
    for before, after in zip(fast, slowed, strict=True):
        assert after["seconds_waiting"] > 0.1
        assert after["tokens_per_s"] < after["tokens"] / after["seconds_waiting"]
        assert before["step"] == 1 or before["seconds_waiting"] < 0.05
    total = sum(line["seconds"] + line["seconds_waiting"] for line in slowed)
    none: dict[str, float] = defaultdict(float)
    [waiting] = [
        figure_of(row) for row in figures(none, none, (total, total), slowed) if "waiting for the loader" in row["metric"]
    ]
    assert not waiting.passed, "the bench misses its limit then"


def test_a_run_that_is_done_exports_again_and_trains_no_more(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    document = make_config(world, tmp_path, objectives={"distill": None, "ce": 1.0}, **QUICK)
    run(document)
    lines, before = read_metrics(tmp_path), student_of(tmp_path / "export/student")
    shutil.rmtree(tmp_path / "export")
    result = run(document)
    assert (result["step"], result["resumed_from"]) == (3, 3)
    assert read_metrics(tmp_path) == lines
    for name, tensor in student_of(tmp_path / "export/student").items():
        assert torch.equal(tensor, before[name])


def test_metrics_have_one_line_a_step_after_a_resume(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    """Lines of steps that are run again go, and one that a kill cut short."""
    document = make_config(world, tmp_path, objectives={"distill": None, "ce": 1.0}, **QUICK)
    document |= {"checkpoint": {"every_steps": 2}, "steps": 5}
    run(document)
    whole = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/step-00000005")
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    assert run(document)["resumed_from"] == 4
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == whole


def test_tensorboard_has_every_number(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(make_config(world, tmp_path, objectives={"distill": None, "ce": 1.0}, **QUICK))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [event.value for event in events.Scalars("train/loss")]
    assert shown == pytest.approx(losses(tmp_path))
    assert {"train/tokens_per_s", "train/lr", "train/ce_loss"} <= set(events.Tags()["scalars"])
