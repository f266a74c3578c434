"""Published layouts: exact names and shapes, strict round trips, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.draft.tiny import QWEN3_8B, random_batch, tiny_dflash, tiny_dspark, tiny_target
from xtok.draft.dflash import DFlashConfig, DFlashDraftModel
from xtok.draft.dspark import DSparkConfig, DSparkDraftModel
from xtok.draft.export import export_draft, load_draft, main
from xtok.draft.training import DraftStepSettings, draft_step
from xtok.errors import ConfigError, StorageError

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
        (
            lambda t: t.update({"model.fc.weight": t.pop("fc.weight")}),
            r"missing fc.weight \(24, 48\); unexpected model.fc.weight",
        ),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight is torch.int8: quantized drafts"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "damaged: norm.weight holds NaN or infinity"),
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
    "damage", [lambda b: b[:-10], lambda b: b"", lambda b: b"version https://git-lfs", lambda b: b"\xff" * 8 + b]
)
def test_files_that_are_not_whole_are_named(damage: Any, tmp_path: Path) -> None:
    export_draft(tiny_dflash(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ConfigError, match=r"model\.safetensors is no whole safetensors file"):
        load_draft(tmp_path)


@pytest.mark.parametrize(("text", "message"), [(b"{", "is no JSON"), (b"\xff\xfe{}", "is no JSON"), (b"[]", "object, not list")])
def test_a_config_that_is_none_is_named(text: bytes, message: str, tmp_path: Path) -> None:
    export_draft(tiny_dflash(), tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=f"config.json .*{message}"):
        load_draft(tmp_path)


def split_in_two(folder: Path) -> dict[str, str]:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        safetensors.torch.save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    return places


def test_several_files_with_an_index_are_one_draft(tmp_path: Path) -> None:
    model = tiny_dspark()
    export_draft(model, tmp_path, dtype=torch.float32)
    places = split_in_two(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    loaded = load_draft(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="model-00002-of-00002"):
        load_draft(tmp_path)
    for wrong in ({"weight_map": {"fc.weight": "../model.safetensors"}}, {"weight_map": [1]}, {}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="has no weight_map of tensor names to file names"):
            load_draft(tmp_path)


def test_nothing_of_a_draft_is_narrowed_or_passed_over(tmp_path: Path) -> None:
    export_draft(tiny_dflash(), tmp_path, dtype=torch.float32)
    rewrite(tmp_path, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items() if "norm" in name}))
    assert {tensor.dtype for tensor in load_draft(tmp_path).state_dict().values()} == {torch.float32}
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"mask_embedding.pt: a mask embedding apart"):
        load_draft(tmp_path)


def test_a_draft_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    model = tiny_dflash()
    model.fc.weight.data.fill_(1e5)  # beyond float16
    with pytest.raises(ConfigError, match=r"in torch.float16: fc.weight holds NaN or infinity"):
        export_draft(model, tmp_path / "draft", dtype=torch.float16)
    assert not (tmp_path / "draft").exists()
    for call in (lambda: export_draft(model, ""), lambda: load_draft("")):
        with pytest.raises(ConfigError, match="empty name"):
            call()


def test_sharded_weights_are_gathered(tmp_path: Path) -> None:
    model = tiny_dflash()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        export_draft(model, tmp_path, dtype=torch.float32)
    finally:
        torch.distributed.destroy_process_group()
    loaded = load_draft(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


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
