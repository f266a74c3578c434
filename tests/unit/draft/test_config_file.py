"""The published config.json: every field written, every field that matters read or refused; the table of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import xtok.draft
from tests.unit.draft.tiny import QWEN3_8B, tiny_dflash, tiny_dspark
from xtok.draft.config import DFlashConfig, DSparkConfig
from xtok.draft.config_file import parse_config, published_config
from xtok.draft.engines import TABLE_FILE, engine_table
from xtok.errors import ConfigError


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


def change(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`raw` with fields replaced; None removes one, a dotted name is one of `dflash_config`."""
    raw = {**raw, "dflash_config": dict(raw["dflash_config"])}
    for name, value in changes.items():
        place = raw["dflash_config"] if "." in name else raw
        place[name.rpartition(".")[2]] = value
        if value is None:
            del place[name.rpartition(".")[2]]
    return raw


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no draft known here"),
        ({"architectures": "DFlashDraftModel"}, "is no draft known here"),
        ({"architectures": [["DFlashDraftModel"]]}, "is no draft known here"),
        ({"dflash_config": [1]}, r"dflash_config must be an object, not \[1\]"),
        ({"rope_scaling": "linear"}, "rope_parameters or rope_scaling must be an object"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*'sliding_attention'"),
        ({"layer_types": 3}, "layer_types 3"),
        ({"layer_types": None, "use_sliding_window": True}, "sliding-window layers"),
        ({"dflash.use_swa": True}, "sliding-window layers"),
        ({"draft_vocab_size": 32}, "a reduced vocabulary"),
        ({"attention_bias": True}, "attention biases"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"is_causal": True}, "causal attention inside a block"),
        ({"is_neox_style": False}, "interleaved rotary pairs"),
        ({"rope_is_neox_style": False}, "interleaved rotary pairs"),
        ({"dflash.attention_sink_bias": True}, "attention sinks"),
        ({"dflash.sample_from_anchor": True}, "the next-token layout under DFlashDraftModel"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a part of each head"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "depends on the length"),
        ({"sample_from_anchor": True}, "the next-token layout under DFlashDraftModel"),
        ({"dflash.mask_token_id": None, "dflash.target_layer_ids": None}, r"lacks \['mask_token_id', 'target_layer_ids'\]"),
        ({"rope_theta": None}, r"lacks \['rope_theta'\]"),
        ({"block_size": None}, r"lacks \['block_size'\]"),
        ({"head_dim": None}, r"lacks \['head_dim'\]"),
        ({"dflash.mask_token_id": "<mask>"}, "folder/config.json is wrong"),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(changes: dict[str, Any], message: str) -> None:
    raw = published_config(tiny_dflash().config)
    raw = {**raw, **changes} if "dflash_config" in changes else change(raw, changes)
    with pytest.raises(ConfigError, match=message):
        parse_config(raw, place="folder/config.json")


@pytest.mark.parametrize("changes", [{"sample_from_anchor": False}, {"dspark_bonus_anchor": True}])
def test_dspark_of_the_other_layout_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the at-position layout under Qwen3DSparkModel"):
        parse_config(change(published_config(tiny_dspark().config), changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_size": None, "dflash.block_size": 5}, {"block_size": 5}),
        ({"num_target_layers": None, "dflash.num_target_layers": 9}, {"num_target_layers": 9}),
        ({"mask_token_id": 7}, {"mask_token_id": 60}),
        ({"sample_from_anchor": False, "use_sliding_window": False}, {}),
        (
            {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {"rope_theta": 5.0},
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}},
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_fields_are_found_where_published_files_keep_them(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = tiny_dflash().config
    parsed, _ = parse_config(change(published_config(config), changes))
    assert parsed == config.model_copy(update=expected)


def test_top_level_ids_are_read_too() -> None:
    raw = published_config(tiny_dspark().config)
    del raw["dflash_config"]
    assert parse_config(raw)[0] == tiny_dspark().config


def test_engine_table_says_every_field_that_is_written() -> None:
    table = engine_table()
    lines = table.splitlines()
    columns = lines[0].count("|")
    rows = [line for line in lines if line.startswith("|")]
    assert all(line.count("|") == columns for line in rows)
    named = " ".join(row.split("|")[1] for row in rows)
    written = published_config(tiny_dflash().config).keys() | published_config(tiny_dspark().config).keys()
    assert [field for field in sorted(written - {"dflash_config"}) if f"`{field}`" not in named] == []
    assert "not run there" in table


def test_the_page_of_engines_is_the_table() -> None:
    page = Path(xtok.draft.__file__).with_name(TABLE_FILE).read_text(encoding="utf-8")
    assert engine_table() in page
