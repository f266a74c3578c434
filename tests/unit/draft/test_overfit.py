"""A draft that has learned a few sequences is accepted in full by the decoding loop; one that learned shuffled targets is not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.draft.tiny import TARGET_CONFIGS, tiny_dflash, tiny_dspark
from xtok.draft.decoding import plain_decode, speculative_decode, tau
from xtok.draft.drafter import ModelDrafter
from xtok.draft.target import FrozenTarget, TargetFeatures
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step

PROMPTS = [[5, 9, 33, 14], [41, 8, 17, 29]]
NEW = 12
MOST_STEPS = 600
LEARNING_RATE = 1e-2


def sharp_target(architecture: str) -> FrozenTarget:
    """A random target with clear preferences: its greedy continuations vary and have few near-ties."""
    config = copy.deepcopy(TARGET_CONFIGS[architecture])
    config.initializer_range = 0.5
    with torch.random.fork_rng():
        torch.manual_seed(17)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    return FrozenTarget(model)


def own_continuations(target: FrozenTarget) -> DraftBatch:
    rows = [prompt + plain_decode(target, prompt, max_new_tokens=NEW + 8) for prompt in PROMPTS]
    ids = torch.tensor(rows)
    return DraftBatch(ids, (torch.arange(ids.shape[1]) >= len(PROMPTS[0])).float().expand(ids.shape), torch.arange(len(rows)))


def train(
    model: Any, target: FrozenTarget, batch: DraftBatch, features: TargetFeatures, num_steps: int, **term_weights: float
) -> int:
    """Train until every slot of every anchor is accepted, at most `num_steps`; returns the steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / num_steps)
        look = step % 25 == 24
        settings = DraftStepSettings(num_anchors=64 if look else 16, epoch=step, with_metrics=look)
        result = draft_step(model, target, batch, settings, features=features)
        if look and bool((result.metrics["greedy_acceptance_by_slot"].value() == 1.0).all()):
            return step
        optimizer.zero_grad()
        result.loss(**term_weights).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return num_steps


def accepted(model: Any, target: FrozenTarget, batch: DraftBatch) -> tuple[torch.Tensor, float]:
    """(greedy acceptance by slot over all anchors, tau of the loop)."""
    metrics = draft_step(model, target, batch, DraftStepSettings(num_anchors=64)).metrics
    loop = [speculative_decode(target, ModelDrafter(model, target), prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    for prompt, result in zip(PROMPTS, loop, strict=True):
        assert result.tokens == plain_decode(target, prompt, max_new_tokens=NEW)
    return metrics["greedy_acceptance_by_slot"].value(), tau(loop)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "architecture"), [(tiny_dflash, "llama"), (tiny_dspark, "mistral")])
def test_overfitting_reaches_the_maximum_and_shuffled_targets_do_not(build: Callable[..., Any], architecture: str) -> None:
    target = sharp_target(architecture)
    batch = own_continuations(target)
    features = target.features(batch.input_ids, (0, 2))
    model = build(architecture, init_std=0.1, intermediate_size=128)
    maximum = model.config.num_draft_slots + 1
    before, tau_before = accepted(model, target, batch)
    assert before.max() < 0.6
    assert tau_before < maximum - 1
    num_steps = train(model, target, batch, features, MOST_STEPS)
    after, tau_after = accepted(model, target, batch)
    assert after.min() > 0.95, after
    assert tau_after == maximum

    order = torch.randperm(batch.input_ids.shape[1], generator=torch.Generator().manual_seed(1))
    shuffled = dataclasses.replace(features, final_hidden=features.final_hidden[:, order])
    wrong = build(architecture, init_std=0.1, intermediate_size=128)
    # The sampled tokens themselves would still be right: DSpark learns from the shuffled distributions alone.
    train(wrong, target, batch, shuffled, max(num_steps, 200), **({"ce_weight": 0.0} if build is tiny_dspark else {}))
    by_slot, tau_wrong = accepted(wrong, target, batch)
    assert by_slot.max() < 0.6, by_slot
    assert tau_wrong < maximum - 1
