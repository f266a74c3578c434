"""Published layouts: exact names and shapes, strict round trips, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import Qwen3Config

from tests.unit.draft.tiny import random_batch, tiny_dflash, tiny_dspark, tiny_target
from xtok.draft.dflash import DFlashConfig, DFlashDraftModel
from xtok.draft.dspark import DSparkConfig, DSparkDraftModel
from xtok.draft.engines import engine_table
from xtok.draft.export import export_draft, load_draft, main, parse_config, published_config
from xtok.draft.training import DraftStepSettings, draft_step
from xtok.errors import ConfigError, StorageError

QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
BODY = {
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (12288, 4096),
    "mlp.up_proj.weight": (12288, 4096),
    "mlp.down_proj.weight": (4096, 12288),
}
SHARED = {"fc.weight": (4096, 20480), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
SHARED |= {f"layers.{i}.{name}": shape for i in range(5) for name, shape in BODY.items()}


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_dflash_holds_exactly_the_published_tensors() -> None:
    with torch.device("meta"):
        model = DFlashDraftModel(DFlashConfig.from_target(QWEN3_8B, mask_token_id=151669))
    assert model.config.target_layer_ids == (1, 9, 17, 25, 33)
    assert shapes(model) == SHARED
    assert len(SHARED) == 11 * 5 + 3


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("vanilla", {}),
        ("gated", {"gate_proj.weight": (256, 4352), "gate_proj.bias": (256,)}),
        ("rnn", {"joint_proj.weight": (768, 4608), "joint_proj.bias": (768,)}),
    ],
)
def test_dspark_adds_its_heads(kind: str, extra: dict[str, tuple[int, ...]]) -> None:
    with torch.device("meta"):
        model = DSparkDraftModel(DSparkConfig.from_target(QWEN3_8B, mask_token_id=151669, markov_head_type=kind))
    heads = {"markov_w1.weight": (151936, 256), "markov_w2.weight": (151936, 256), **extra}
    expected = SHARED | {f"markov_head.{name}": shape for name, shape in heads.items()}
    assert shapes(model) == expected | {"confidence_head.proj.weight": (1, 4352), "confidence_head.proj.bias": (1,)}


def test_published_config_fields() -> None:
    dflash = published_config(DFlashConfig.from_target(QWEN3_8B, mask_token_id=151669))
    assert dflash["architectures"] == ["DFlashDraftModel"]
    assert dflash["block_size"] == 16
    assert dflash["dflash_config"] == {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    assert dflash["rope_theta"] == 1e6
    assert dflash["layer_types"] == ["full_attention"] * 5
    assert dflash["tie_word_embeddings"] is False
    assert (dflash["num_hidden_layers"], dflash["num_target_layers"]) == (5, 36)
    assert "auto_map" not in dflash
    dspark = published_config(DSparkConfig.from_target(QWEN3_8B, mask_token_id=151669))
    assert dspark["architectures"] == ["Qwen3DSparkModel"]
    assert dspark["model_type"] == "qwen3"
    assert dspark["target_layer_ids"] == dspark["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert dspark["mask_token_id"] == dspark["dflash_config"]["mask_token_id"] == 151669
    assert (dspark["block_size"], dspark["markov_rank"], dspark["markov_head_type"]) == (7, 256, "vanilla")
    assert dspark["enable_confidence_head"] is dspark["confidence_head_with_markov"] is dspark["sample_from_anchor"] is True
    assert dspark["dspark_bonus_anchor"] is False


def drafts() -> list[Any]:
    return [
        tiny_dflash(slot_decay=3.0),
        tiny_dflash("qwen3", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        *(tiny_dspark(markov_head_type=kind) for kind in ("vanilla", "gated", "rnn")),
        tiny_dspark(markov_rank=0, enable_confidence_head=False),
        tiny_dspark(confidence_head_with_markov=False),
    ]


@pytest.mark.parametrize("number", range(7))
def test_round_trip(number: int, tmp_path: Path) -> None:
    model = drafts()[number]
    folder = str(tmp_path / "draft")
    export_draft(model, folder, dtype=torch.float32)
    target = tiny_target("qwen3" if number == 1 else "llama")
    loaded = load_draft(folder, target=target)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert list(loaded.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    settings = DraftStepSettings(num_anchors=3)
    got = draft_step(loaded, target, random_batch(1, 10), settings).loss()
    assert torch.equal(got, draft_step(model, target, random_batch(1, 10), settings).loss())
    stored = safetensors.torch.load_file(tmp_path / "draft" / "model.safetensors")
    assert not any(name.startswith("model.") or "rotary" in name for name in stored)


def test_export_casts_and_load_widens(tmp_path: Path) -> None:
    model = tiny_dflash()
    export_draft(model, str(tmp_path))
    assert load_draft(str(tmp_path)).fc.weight.dtype == torch.bfloat16
    wide = load_draft(str(tmp_path), dtype=torch.float32)
    assert torch.equal(wide.fc.weight, model.fc.weight.bfloat16().float())
    assert wide.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(wide.rotary_emb.inv_freq, model.rotary_emb.inv_freq)


def rewrite(folder: Path, change: Any) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(2)}), r"unexpected extra.weight \(2,\)"),
        (lambda t: t.update({"norm.weight": torch.zeros(25)}), r"norm.weight is \(25,\), config.json says \(24,\)"),
    ],
)
def test_loading_is_strict(change: Any, message: str, tmp_path: Path) -> None:
    export_draft(tiny_dflash(), str(tmp_path), dtype=torch.float32)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_draft(str(tmp_path))


def test_stored_copies_of_the_targets_tensors_are_left_out(tmp_path: Path) -> None:
    export_draft(tiny_dspark(), str(tmp_path), dtype=torch.float32)
    rewrite(tmp_path, lambda t: t.update({"embed_tokens.weight": torch.zeros(61, 24), "lm_head.weight": torch.zeros(61, 24)}))
    assert "lm_head.weight" not in load_draft(str(tmp_path)).state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no draft known here"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"draft_vocab_size": 32}, "a reduced vocabulary"),
        ({"attention_bias": True}, "attention biases"),
        ({"dflash_config": {}}, r"lacks \['mask_token_id', 'target_layer_ids'\]"),
        ({"rope_theta": None}, r"lacks \['rope_theta'\]"),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**published_config(tiny_dflash().config), **change})


def test_top_level_ids_are_read_too() -> None:
    raw = published_config(tiny_dspark().config)
    del raw["dflash_config"]
    assert parse_config(raw)[0] == tiny_dspark().config


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    for name, settings in (("hidden_size", {"hidden_size": 16}), ("vocab_size", {"vocab_size": 77})):
        export_draft(tiny_dflash(**settings), str(tmp_path / name))
        with pytest.raises(ValueError, match=f"made for a target with {name}"):
            load_draft(str(tmp_path / name), target=tiny_target("llama"))
    with pytest.raises(StorageError):
        load_draft(str(tmp_path / "nowhere"))


def test_command_rewrites_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_draft(tiny_dflash(), str(tmp_path / "a"), dtype=torch.float32)
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert "DFlashDraftModel, 25 tensors, bfloat16" in capsys.readouterr().out
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_engine_table_names_every_id_field() -> None:
    table = engine_table()
    lines = table.splitlines()
    columns = lines[0].count("|")
    assert all(line.count("|") == columns for line in lines if line.startswith("|"))
    for field in ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "sample_from_anchor"):
        assert field in table
    assert "not run there" in table
