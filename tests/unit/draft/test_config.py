"""Draft configurations: what a target gives, and mistakes said before the first step."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from transformers import GPT2Config, GraniteConfig, GraniteForCausalLM, LlamaConfig, OPTConfig, OPTForCausalLM

from tests.unit.draft.tiny import ARCHITECTURES, MASK_TOKEN, TARGET_CONFIGS, tiny_dflash, tiny_target
from xtok.draft.config import DFlashConfig, DSparkConfig, default_target_layer_ids
from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError


def test_default_layers() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(36, 1) == (18,)
    assert default_target_layer_ids(30, 2) == (1, 27)
    for layers in range(2, 40):
        for drafts in range(1, 9):
            ids = default_target_layer_ids(layers, drafts)
            assert ids == tuple(sorted(set(ids)))
            assert 0 <= ids[0] <= ids[-1] <= layers - 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dimensions_come_from_the_target(architecture: str) -> None:
    config = DFlashConfig.from_target(TARGET_CONFIGS[architecture], mask_token_id=MASK_TOKEN, num_draft_layers=2)
    target = tiny_target(architecture)
    target.check_draft(config)
    target.check_head()
    assert config.block_size == 16
    assert config.rope_scaling is None
    assert config.rope_theta == 1e6 if architecture == "gemma3" else config.rope_theta == 10000.0


def test_published_decays() -> None:
    shared: dict[str, Any] = {"target_config": TARGET_CONFIGS["llama"], "mask_token_id": MASK_TOKEN}
    for block_size, decay in ((16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (32, 14.0)):
        assert DFlashConfig.from_target(**shared, block_size=block_size).effective_slot_decay == decay
    assert DSparkConfig.from_target(**shared).effective_slot_decay == 4.0
    assert DSparkConfig.from_target(**shared, slot_decay=2.5).effective_slot_decay == 2.5


def test_layouts() -> None:
    shared: dict[str, Any] = {"target_config": TARGET_CONFIGS["llama"], "mask_token_id": MASK_TOKEN, "block_size": 6}
    flash, spark = DFlashConfig.from_target(**shared), DSparkConfig.from_target(**shared)
    assert (flash.num_draft_slots, flash.first_supervised_slot, flash.label_offset) == (5, 1, 0)
    assert (spark.num_draft_slots, spark.first_supervised_slot, spark.label_offset) == (6, 0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "block_size must be at least 2, got 1"),
        ({"target_layer_ids": [2, 2]}, "strictly increasing"),
        ({"target_layer_ids": [1, 4]}, r"\[4\] do not exist in a target of 4 layers"),
        ({"target_layer_ids": []}, "empty"),
        ({"mask_token_id": 61}, "mask_token_id 61 is beyond the target's 61 embedding rows"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "must be even"),
        ({"slot_decay": 0.0}, "greater than 0"),
        ({"slot_decay": float("inf")}, "finite number"),
        ({"slot_decay": 1e-4}, "slot_decay 0.0001 leaves no weight"),
        ({"rope_theta": float("inf")}, "finite number"),
        ({"target_layer_ids": "02"}, "valid tuple"),
        ({"target_layer_ids": [False, True]}, "valid integer"),
        ({"mask_token_id": 2}, "mask_token_id 2 is the target's eos_token_id"),
        ({"mask_token_id": 0}, "mask_token_id 0 is the target's pad_token_id"),
        ({"rope_scaling": {"factor": 2.0}}, "does not say its rope_type"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is unknown"),
        ({"rope_scaling": {"rope_type": "linear"}}, "Missing required keys"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "depends on the length of the sequence"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates a part of head_dim 6"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.34}}, "rotates a part of head_dim 6"),
        ({"layers": 3}, "Extra inputs"),
    ],
)
@pytest.mark.parametrize("kind", [DFlashConfig, DSparkConfig])
def test_mistakes_are_named(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.from_target(TARGET_CONFIGS["llama"], **{"mask_token_id": MASK_TOKEN, "num_draft_layers": 2, **settings})


def test_numbers_and_older_names_are_understood() -> None:
    shared: dict[str, Any] = {"target_config": TARGET_CONFIGS["llama"], "mask_token_id": MASK_TOKEN}
    assert DFlashConfig.from_target(**shared, target_layer_ids=list(numpy.arange(0, 3, 2))).target_layer_ids == (0, 2)
    older = DFlashConfig.from_target(**shared, rope_scaling={"type": "linear", "factor": 2.0})
    assert older.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_targets_with_layers_of_their_own_sizes_and_targets_that_are_none() -> None:
    class Mixed(LlamaConfig):
        """As transformers' configurations whose layers differ: the common value is refused."""

        def __getattribute__(self, name: str) -> Any:
            if name == "head_dim" and object.__getattribute__(self, "__dict__").get("guarded"):
                raise RuntimeError("'head_dim' is a per-layer attribute")
            return super().__getattribute__(name)

        def to_dict(self) -> dict[str, Any]:
            return {"head_dim": 16}

    config = Mixed(**TARGET_CONFIGS["llama"].to_dict())
    config.guarded = True
    assert DFlashConfig.from_target(config, mask_token_id=MASK_TOKEN).head_dim == 16
    with pytest.raises(ConfigError, match="GPT2Config has no intermediate_size"):
        DFlashConfig.from_target(GPT2Config(), mask_token_id=MASK_TOKEN)


def test_confidence_needs_its_markov_features() -> None:
    with pytest.raises(ValueError, match="needs markov_rank >= 1"):
        DSparkConfig.from_target(TARGET_CONFIGS["llama"], mask_token_id=MASK_TOKEN, markov_rank=0)


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 16), ("vocab_size", 99), ("num_target_layers", 8)])
def test_a_target_of_other_dimensions_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"made for a target with {name} {value}, LlamaForCausalLM has"):
        tiny_target("llama").check_draft(tiny_dflash(**{name: value}).config)


def test_unsupported_targets_are_refused() -> None:
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="no config"):
        FrozenTarget(torch.nn.Linear(2, 2))
    opt = OPTForCausalLM(OPTConfig(**small, ffn_dim=16, word_embed_proj_dim=16))
    with pytest.raises(ValueError, match="no decoder `norm` found in OPTForCausalLM"):
        FrozenTarget(opt)
    granite = GraniteForCausalLM(GraniteConfig(**small, intermediate_size=16, num_key_value_heads=1, logits_scaling=4.0))
    with pytest.raises(ValueError, match="does more to its logits than head and softcap"):
        FrozenTarget(granite).check_head()
