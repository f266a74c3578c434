"""Draft bodies over several targets: isolation of blocks, visibility, positions, both attention backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.draft.tiny import ARCHITECTURES, HIDDEN, random_batch, tiny_dflash, tiny_dspark, tiny_target
from xtok.draft.attention import BlockVisibility, plan_attention
from xtok.draft.body import DraftBody
from xtok.draft.reference import block_hidden
from xtok.draft.training import Blocks, DraftBatch, DraftStepSettings, build_blocks, draft_step, run_blocks

SETTINGS = DraftStepSettings(num_anchors=5, seed=3)
BUILDERS = {"dflash": tiny_dflash, "dspark": tiny_dspark}


def place_blocks(model: DraftBody, batch: DraftBatch, anchors: list[list[int]]) -> Blocks:
    """Blocks at given anchors; -1 is a dummy."""
    positions = torch.tensor(anchors)
    keep = positions >= 0
    blocks = build_blocks(model.config, batch, DraftStepSettings(num_anchors=positions.shape[1]))
    return dataclasses.replace(blocks, anchors=positions.clamp(min=0), keep=keep)


def hidden_of(model: DraftBody, architecture: str, batch: DraftBatch, anchors: list[list[int]], **changes: Any) -> Tensor:
    target = tiny_target(architecture)
    features = target.features(batch.input_ids, model.config.target_layer_ids, seq_lens=batch.seq_lens)
    features = dataclasses.replace(features, **changes)
    return run_blocks(model, target, batch, place_blocks(model, batch, anchors), features).hidden


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_packed_blocks_equal_each_block_alone(architecture: str, kind: str) -> None:
    model, target, batch = BUILDERS[kind](architecture), tiny_target(architecture), random_batch(2, 20)
    features = target.features(batch.input_ids, model.config.target_layer_ids)
    blocks = build_blocks(model.config, batch, SETTINGS)
    assert blocks.keep.all()
    got = run_blocks(model, target, batch, blocks, features).hidden
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected = torch.zeros_like(got)
    parts = []
    for b in range(2):
        for i, anchor in enumerate(blocks.anchors[b].tolist()):
            tokens = torch.full((model.config.block_size,), model.config.mask_token_id)
            tokens[0] = batch.input_ids[b, anchor]
            hidden = block_hidden(
                weights,
                model.config,
                slot_embeddings=target.embed(tokens),
                context_features=features.context[b, :anchor],
                anchor_position=anchor,
            )
            parts.append((b, i, hidden))
            expected[b, i] = hidden.detach()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    body = [name for name, _ in model.named_parameters() if "_head" not in name]
    got_gradients = torch.autograd.grad((got * upstream).sum(), [model.get_parameter(name) for name in body])
    reference = sum((hidden * upstream[b, i]).sum() for b, i, hidden in parts)
    for name, value, wanted in zip(body, got_gradients, torch.autograd.grad(reference, [weights[n] for n in body]), strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-3, atol=2e-4 * float(wanted.abs().max()) + 1e-6, msg=name)


def test_permuting_and_duplicating_blocks_permutes_outputs() -> None:
    model, batch = tiny_dflash(), random_batch(1, 20)
    plain = hidden_of(model, "llama", batch, [[2, 5, 6, 11]])
    mixed = hidden_of(model, "llama", batch, [[11, 5, 2, 6, 5]])
    torch.testing.assert_close(mixed[:, [2, 1, 3, 0]], plain)
    torch.testing.assert_close(mixed[:, 4], plain[:, 1])


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_context_is_visible_strictly_before_the_anchor(kind: str) -> None:
    model, batch, target = BUILDERS[kind](), random_batch(1, 16), tiny_target("llama")
    context = target.features(batch.input_ids, model.config.target_layer_ids).context
    plain = hidden_of(model, "llama", batch, [[3, 7]])
    for position in range(16):
        changed = context.clone()
        changed[:, position] += 1.0
        moved = hidden_of(model, "llama", batch, [[3, 7]], context=changed)
        for block, anchor in enumerate([3, 7]):
            assert torch.equal(moved[0, block], plain[0, block]) == (position >= anchor), (position, anchor)


def test_blocks_do_not_see_each_other_and_slots_see_all_of_their_block() -> None:
    model, batch = tiny_dflash(), random_batch(1, 16)
    blocks = place_blocks(model, batch, [[4, 5]])
    visibility = BlockVisibility(blocks.anchors, blocks.keep, 4, 16)
    embeddings = torch.randn(1, 8, HIDDEN)

    def run(slots: Tensor) -> Tensor:
        return model(
            slot_embeddings=slots,
            slot_positions=torch.tensor([[4, 5, 6, 7, 5, 6, 7, 8]]),
            context_features=torch.ones(1, 16, 2 * HIDDEN),
            context_positions=torch.arange(16)[None],
            attend=plan_attention(visibility, torch.device("cpu")),
        ).hidden

    plain = run(embeddings)
    changed = embeddings.clone()
    changed[:, 7] += 1.0  # last slot of the second block
    moved = run(changed)
    assert torch.equal(moved[0, 0], plain[0, 0])
    assert not torch.isclose(moved[0, 1, 0], plain[0, 1, 0]).all()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_packed_documents_equal_separate_rows(architecture: str, kind: str) -> None:
    model, target = BUILDERS[kind](architecture), tiny_target(architecture)
    rows = random_batch(2, 12, seed=4)
    lengths = [12, 9]
    packed_ids = torch.cat([rows.input_ids[0], rows.input_ids[1, :9], torch.zeros(3, dtype=torch.int64)])[None]
    packed = DraftBatch(packed_ids, (torch.arange(24) < 21).float()[None], torch.tensor([0]), torch.tensor([[12, 0, 9]]))
    features = target.features(packed_ids, model.config.target_layer_ids, seq_lens=packed.seq_lens)
    separate = target.features(rows.input_ids, model.config.target_layer_ids)
    for row, (start, length) in enumerate(zip((0, 12), lengths, strict=True)):
        torch.testing.assert_close(features.context[0, start : start + length], separate.context[row, :length])
        torch.testing.assert_close(features.final_hidden[0, start : start + length], separate.final_hidden[row, :length])
    together = run_blocks(model, target, packed, place_blocks(model, packed, [[2, 6, 12, 15]]), features)
    apart = run_blocks(model, target, rows, place_blocks(model, rows, [[2, 6], [0, 3]]), separate)
    torch.testing.assert_close(together.hidden[0], apart.hidden.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_labels_stay_inside_the_anchors_document() -> None:
    model = tiny_dspark()
    batch = DraftBatch(torch.arange(12)[None], torch.ones(1, 12), torch.tensor([0]), torch.tensor([[5, 7]]))
    blocks = build_blocks(model.config, batch, DraftStepSettings(num_anchors=20))
    assert blocks.anchors[blocks.keep].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    for anchor, labels, mask in zip(blocks.anchors[0], blocks.label_indices[0], blocks.eval_mask[0], strict=True):
        end = 5 if anchor < 5 else 12
        if mask.any():
            assert mask.tolist() == [int(label) < end for label in labels]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_first_position_and_dummy_blocks_are_finite_without_gradient(kind: str) -> None:
    model, batch = BUILDERS[kind](), random_batch(1, 12)
    hidden = hidden_of(model, "llama", batch, [[0, -1, -1]])
    assert torch.isfinite(hidden).all()
    batch = dataclasses.replace(batch, loss_mask=torch.tensor([[0.0, 1.0] + [0.0] * 10]))
    step = draft_step(model, tiny_target("llama"), batch, DraftStepSettings(num_anchors=4))
    assert step.output.block_keep_mask.tolist() == [[True, False, False, False]]
    upstream = torch.autograd.grad(step.loss(), [step.output.draft_hidden])[0]
    assert upstream[0, 1:].eq(0).all()
    assert torch.isfinite(upstream).all()
    assert upstream[0, 0].abs().sum() > 0


def test_equal_mask_slots_differ_and_far_positions_are_finite() -> None:
    model, batch = tiny_dflash(), random_batch(1, 12)
    hidden = hidden_of(model, "llama", batch, [[6]])
    assert (hidden[0, 0, 1] - hidden[0, 0, 2]).abs().max() > 1e-3
    far = model(
        slot_embeddings=torch.randn(1, 4, HIDDEN),
        slot_positions=torch.arange(262144, 262148)[None],
        context_features=torch.randn(1, 3, 2 * HIDDEN),
        context_positions=torch.tensor([[0, 1, 262143]]),
        attend=plan_attention(None, torch.device("cpu")),
    )
    assert torch.isfinite(far.hidden).all()
    cast = tiny_dflash().to(torch.bfloat16)
    assert cast.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(cast.rotary_emb.inv_freq, model.rotary_emb.inv_freq)
    assert cast.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("packed", [False, True])
def test_flex_and_sdpa_agree(packed: bool) -> None:
    target, batch = tiny_target("llama"), random_batch(2, 20)
    if packed:
        batch = dataclasses.replace(batch, seq_lens=torch.tensor([[8, 12], [20, 0]]))
    model = tiny_dflash(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model.requires_grad_(False)  # FlexAttention has no backward on CPU
    features = target.features(batch.input_ids, model.config.target_layer_ids, seq_lens=batch.seq_lens)
    blocks = place_blocks(model, batch, [[2, 9, -1], [0, 5, 17]])
    dense = run_blocks(model, target, batch, blocks, features, "sdpa").hidden
    flex = run_blocks(model, target, batch, blocks, features, "flex").hidden
    torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)


def test_visibility_matches_loops() -> None:
    anchors, keep = torch.tensor([[0, 3, 4, 0]]), torch.tensor([[True, True, True, False]])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    mask = BlockVisibility(anchors, keep, 2, 6, documents).dense()
    assert mask.shape == (1, 1, 8, 14)
    for query in range(8):
        for key in range(14):
            block = query // 2
            if key < 6:
                anchor = int(anchors[0, block])
                wanted = bool(keep[0, block]) and key < anchor and documents[0, key] == documents[0, anchor]
            else:
                wanted = (key - 6) // 2 == block
            assert bool(mask[0, 0, query, key]) == wanted
    assert mask.any(-1).all()
