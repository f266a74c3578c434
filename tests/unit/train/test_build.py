"""Mistakes are told before the first step, with the value and the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from schemas.train_config import ParallelSettings, TrainConfig
from tests.unit.train.support import BUNDLED, make_config
from xtok.errors import ConfigError, DamagedPartError, FingerprintMismatchError, TrainingError, UnpublishedDatasetError, XtokError
from xtok.train.build import check_dataset
from xtok.train.config_file import load_train_config
from xtok.train.loop import run_training
from xtok.train.runtime import Runtime, start_runtime

CE_ONLY = {"objectives": {"distill": None, "ce": 1.0}}


def refused(document: dict[str, Any], runtime: Runtime, error: type[XtokError], *words: str) -> None:
    """The run ends with `error` before it writes a metric."""
    with pytest.raises(error) as caught:
        run_training(TrainConfig.model_validate(document), runtime)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not (Path(document["output"]) / "metrics.jsonl").exists()


def test_a_dataset_of_other_tokenizers(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    swapped = make_config(world, tmp_path, student={"model": world["teachers"][0]})
    refused(swapped, runtime, FingerprintMismatchError, "the student's tokenizer", "teacher0", "chatml_bpe", "fingerprint")
    teachers = [{"model": world["student"]}, {"model": world["teachers"][1]}]
    refused(make_config(world, tmp_path, teachers=teachers), runtime, FingerprintMismatchError, "teacher 0")


def test_a_held_out_dataset_of_other_tokenizers(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    shutil.copytree(world["held_out"], tmp_path / "other")
    manifest = tmp_path / "other/manifest.json"
    text = manifest.read_text()
    fingerprint = check_dataset(TrainConfig.model_validate(make_config(world, tmp_path)))[0].student.content_fingerprint
    manifest.write_text(text.replace(fingerprint, "0" * 64))
    document = make_config(world, tmp_path / "run", evaluation={"dataset": str(tmp_path / "other")})
    refused(document, runtime, FingerprintMismatchError, str(tmp_path / "other"), "0" * 64)


def test_a_teacher_that_the_dataset_lacks(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    teachers = [{"model": model} for model in (*world["teachers"], world["teachers"][0])]
    refused(make_config(world, tmp_path, teachers=teachers), runtime, ConfigError, "has 2 teachers", "the configuration 3")


def test_an_unpublished_dataset(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    refused(make_config(world, tmp_path / "run", dataset=str(tmp_path)), runtime, UnpublishedDatasetError, "no manifest.json")


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_dataset(world: dict[str, Any], runtime: Runtime, tmp_path: Path, damage: str) -> None:
    shutil.copytree(world["dataset"], tmp_path / "damaged")
    file = tmp_path / "damaged/teacher=0/part-00000.parquet"
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:-9])
    document = make_config(world, tmp_path / "run", dataset=str(tmp_path / "damaged"))
    refused(document, runtime, DamagedPartError, "part-00000.parquet", "xtok repair")


def test_a_world_size_that_the_layout_cannot_divide(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel 2 does not divide the world size 1"):
        start_runtime(ParallelSettings(device="cpu", processes=2, tensor_parallel=2))
    with pytest.raises(ValueError, match="does not divide the 3 ranks"):
        ParallelSettings(processes=3, tensor_parallel=2)


def test_models_that_do_not_fit(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(world["teachers"][0], small)
    config = AutoConfig.from_pretrained(small)
    config.vocab_size = 100
    AutoModelForCausalLM.from_config(config).save_pretrained(small)
    document = make_config(
        world,
        tmp_path / "run",
        teachers=[{"model": str(small), "tokenizer": world["teachers"][0]}, {"model": world["teachers"][1]}],
    )
    refused(document, runtime, ConfigError, "100 head rows")

    config.vocab_size, config.max_position_embeddings = 5000, 40
    AutoModelForCausalLM.from_config(config).save_pretrained(small)
    refused(document, runtime, ConfigError, "40 positions", "96 tokens")

    document = make_config(world, tmp_path / "run", student={"model": str(tmp_path / "none")})
    refused(document, runtime, XtokError, str(tmp_path / "none"))


def test_a_model_folder_that_is_damaged(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    """Nothing is filled up with random weights in silence, and whatever the libraries below raise names the model."""
    folder = tmp_path / "student"
    shutil.copytree(world["student"], folder)
    document = make_config(world, tmp_path / "run", **CE_ONLY, student={"model": str(folder)})
    file, config = folder / "model.safetensors", folder / "config.json"
    whole, text = load_file(file), config.read_text()
    damages: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: tensor for name, tensor in whole.items() if "layers.1." not in name}, "lacks 9 of its weights (model.layers.1."),
        ({**whole, "model.norm.weight": torch.ones(7)}, "cannot load the model"),
        ({**whole, "model.norm.weight": torch.full((16,), float("nan"))}, "no finite numbers, first in model.norm.weight"),
    ]
    for tensors, words in damages:
        save_file(tensors, file, metadata={"format": "pt"})
        refused(document, runtime, ConfigError, str(folder), words)
    file.write_bytes(file.read_bytes()[:-50])
    refused(document, runtime, ConfigError, str(folder), "SafetensorError")
    config.write_text(text.replace('"num_attention_heads": 2', '"num_attention_heads": 0'))
    document["student"]["random_weights"] = True
    refused(document, runtime, ConfigError, str(folder), "ZeroDivisionError")


def test_held_out_rows_that_the_models_cannot_be_shown(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    """Longer than the models' positions, or aligned for a teacher with the student's own tokens where training has others."""
    for name, change, error, words in (
        ("long", ('"context_length":96', '"context_length":4096'), ConfigError, ("128 positions", "4096 tokens")),
        ("same", ('"same_as_student":true', '"same_as_student":false'), FingerprintMismatchError, ("teacher 1 is not shown",)),
    ):
        shutil.copytree(world["held_out"], tmp_path / name)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        text = json.dumps(manifest, separators=(",", ":"))
        assert change[0] in text
        (tmp_path / name / "manifest.json").write_text(text.replace(*change))
        document = make_config(world, tmp_path / "run", evaluation={"dataset": str(tmp_path / name)})
        refused(document, runtime, error, *words)


def test_settings_of_the_parts_are_told_as_mistakes(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    def wrong(*words: str, **changes: Any) -> None:
        refused(make_config(world, tmp_path / "run", **changes), runtime, ConfigError, *words)

    wrong("teacher_weights [0.0, 0.0] leave nothing", distillation={"teacher_weights": [0, 0]})
    wrong("mode lists 1 entries for 2 teachers", distillation={"mode": ["p_kl"]})
    wrong("distillation", "nonsense", distillation={"nonsense": 1})
    wrong("hidden_size 8", draft={"mask_token_id": 5, "settings": {"hidden_size": 8}})
    wrong("target_layer_ids [77]", draft={"mask_token_id": 5, "settings": {"target_layer_ids": [77]}})
    (tmp_path / "draft").mkdir()
    for text in ("[]", "{}", "{"):
        (tmp_path / "draft/config.json").write_text(text)
        wrong("draft", draft={"mask_token_id": 5, "load": str(tmp_path / "draft")})


def test_a_mask_token_that_means_something(world: dict[str, Any], runtime: Runtime, tmp_path: Path) -> None:
    tokenizer = check_dataset(TrainConfig.model_validate(make_config(world, tmp_path)))[1]
    document = make_config(world, tmp_path / "run", draft={"mask_token_id": tokenizer.pad_token_id})
    refused(document, runtime, ConfigError, "padding token")
    refused(make_config(world, tmp_path / "run", draft={"mask_token_id": 10**6}), runtime, ConfigError, "mask_token_id 1000000")


def test_a_student_that_caps_its_logits_trains_its_draft_only(
    world: dict[str, Any], runtime: Runtime, tmp_path: Path, run: Any
) -> None:
    torch.manual_seed(4)
    vocab_size = AutoConfig.from_pretrained(world["student"]).vocab_size
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=vocab_size, num_key_value_heads=1, head_dim=8, max_position_embeddings=128, **sizes)
    capped = tmp_path / "capped"
    Gemma2ForCausalLM(config).save_pretrained(capped)
    side = {"model": str(capped), "tokenizer": str(BUNDLED / "tokenizers/chatml_bpe")}
    refused(make_config(world, tmp_path / "run", student=side), runtime, ConfigError, "caps its logits")
    draft_only = {"objectives": {"distill": None, "ce": None, "draft": 1.0}, "teachers": [], "steps": 2}
    result = run(make_config(world, tmp_path / "run", student=side, **draft_only))
    assert list(result["exported"]) == ["draft"]


def test_another_dataset_is_another_run(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    document = make_config(world, tmp_path / "run", **CE_ONLY, steps=1)
    run(document)
    with pytest.raises(TrainingError, match=r"another training configuration or dataset \(manifest_sha256 was .* and is "):
        run({**document, "dataset": world["held_out"]})
    with pytest.raises(TrainingError, match=r"another training configuration or dataset \(steps was 1 and is 2\)"):
        run({**document, "steps": 2})


def test_results_that_are_gone_are_exported_anew(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    document = make_config(world, tmp_path / "run", **CE_ONLY, steps=1)
    run(document)
    weights = tmp_path / "run/export/student/model.safetensors"
    written = weights.read_bytes()
    shutil.rmtree(tmp_path / "run/export")
    assert run(document)["resumed_from"] == 1
    assert weights.read_bytes() == written


def test_a_configuration_file_is_explained_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("student: {model: m, modle: 3}\ndataset: d\nsteps: 0\nobjectives: {distill: null, ce: null}\n")
    with pytest.raises(ConfigError) as caught:
        load_train_config(str(file))
    message = str(caught.value)
    for part in (str(file), "student.modle: there is no such field", "output: required", "steps", "leave nothing to train"):
        assert part in message
    with pytest.raises(ConfigError, match="cannot be read"):
        load_train_config(str(tmp_path / "none.yaml"))
    both = [{"model": "m", "offload": True, "shard": True}]
    with pytest.raises(ConfigError, match="offload or shard"):
        load_train_config({"student": {"model": "m"}, "teachers": both, "dataset": "d", "output": "o"})
    with pytest.raises(ConfigError, match="host:port"):
        load_train_config(
            {"student": {"model": "m"}, "dataset": "d", "output": "o", "parallel": {"num_nodes": 2, "rendezvous": "node"}}
        )
