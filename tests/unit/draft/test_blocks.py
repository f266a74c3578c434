"""Block inputs, layer ids and rotary frequencies."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from xtok.draft.common import (
    AcceptRatePredictor,
    create_noise_embed,
    create_position_ids,
    extract_context_feature,
    pin_rope_inv_freq_fp32,
    validate_target_layer_ids,
)
from xtok.draft.rope import RotaryEmbedding, apply_rotary

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_features_are_taken_after_the_named_layers() -> None:
    states = tuple(torch.full((1, 2, 3), float(i)) for i in range(5))
    got = extract_context_feature(states, [-1, 2])
    assert got.shape == (1, 2, 6)
    assert got[0, 0].tolist() == [0.0] * 3 + [3.0] * 3
    for wrong in ([], [4], [-2]):
        with pytest.raises(ValueError, match="do not fit 5 hidden states"):
            extract_context_feature(states, wrong)


def test_features_equal_the_layers_of_a_real_target() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    hidden = model(torch.arange(5)[None], output_hidden_states=True).hidden_states
    assert torch.equal(extract_context_feature(hidden, [-1]), model.model.embed_tokens(torch.arange(5)[None]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([0, 0], "strictly increasing"),
        ([3, 1], "strictly increasing"),
        ([1, 9], r"\[9\] do not exist in a target of 6 layers"),
        ([-2, 1], r"\[-2\] do not exist"),
        ([1.0], "must be integers"),
    ],
)
def test_bad_layer_ids(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_target_layer_ids(ids, 6)


def test_layer_ids_that_engines_cannot_capture_warn() -> None:
    for ids in ([-1, 2], [2, 5]):
        with pytest.warns(UserWarning, match="cannot be captured by serving engines"):
            validate_target_layer_ids(ids, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate_target_layer_ids([0, 2, 4], 6)


def test_position_ids() -> None:
    anchors = torch.tensor([[0, 4]])
    assert create_position_ids(anchor_positions=anchors, block_size=3).tolist() == [[0, 1, 2, 4, 5, 6]]
    documents = torch.tensor([[0, 1, 2, 0, 1]])
    assert create_position_ids(anchor_positions=anchors, block_size=2, doc_positions=documents).tolist() == [[0, 1, 1, 2]]


def test_noise_embedding_shows_only_the_anchor_token() -> None:
    embed = torch.nn.Embedding(20, 4)
    got = create_noise_embed(
        input_ids=torch.tensor([[5, 6, 7]]),
        anchor_positions=torch.tensor([[1, 0]]),
        block_keep_mask=torch.tensor([[True, False]]),
        mask_token_id=9,
        block_size=2,
        embed_tokens=embed,
    )
    assert torch.equal(got, embed(torch.tensor([[6, 9, 9, 9]])))


def test_accept_rate_predictor_returns_logits() -> None:
    head = AcceptRatePredictor(6)
    features = torch.randn(2, 3, 6)
    assert torch.equal(head(features), torch.nn.functional.linear(features, head.proj.weight, head.proj.bias)[..., 0])


@pytest.mark.parametrize(("config", "model"), [(LlamaConfig, LlamaForCausalLM), (Gemma3TextConfig, Gemma3ForCausalLM)])
def test_pinning_restores_rounded_frequencies(config: type, model: type) -> None:
    target = model(config(**TINY))
    before = {name: buffer.clone() for name, buffer in target.named_buffers() if name.endswith("inv_freq")}
    target.to(torch.bfloat16)
    assert any(not torch.equal(target.get_buffer(name).float(), value) for name, value in before.items())
    pin_rope_inv_freq_fp32(target)
    assert before
    for name, value in before.items():
        assert target.get_buffer(name).dtype == torch.float32
        assert torch.equal(target.get_buffer(name), value)


def test_pinning_refuses_what_it_cannot_recompute() -> None:
    module = torch.nn.Module()
    module.register_buffer("inv_freq", torch.rand(4))
    pin_rope_inv_freq_fp32(module)
    with pytest.raises(ValueError, match="does not say how to recompute"):
        pin_rope_inv_freq_fp32(module.to(torch.bfloat16))


def test_rotary_survives_casts_and_far_positions() -> None:
    rotary = RotaryEmbedding(16, theta=10000.0)
    exact = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    cast = torch.nn.Sequential(rotary).to(torch.bfloat16)[0]
    assert cast.inv_freq.dtype == torch.float32
    cos, sin = cast(torch.tensor([[0, 30000, 262144]]))
    angles = torch.tensor([0, 30000, 262144], dtype=torch.float64)[:, None] * exact
    assert torch.isfinite(cos).all()
    # fp32 frequencies at position 262144: an angle error of about 262144 * 2^-24.
    torch.testing.assert_close(cos[0, :, :8].double(), angles.cos(), atol=0.03, rtol=0)
    torch.testing.assert_close(sin[0, :, 8:].double(), angles.sin(), atol=0.03, rtol=0)


def test_rotary_scores_depend_on_distance_only() -> None:
    rotary = RotaryEmbedding(8, theta=100.0)
    states = torch.randn(1, 1, 1, 8).expand(1, 1, 6, 8)
    rotated = apply_rotary(states, *rotary(torch.arange(6)[None]))[0, 0]
    scores = rotated @ rotated.T
    for distance in range(6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_scaled_rotary_equals_the_targets() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    config = LlamaConfig(**TINY, max_position_embeddings=512, rope_parameters={**scaling, "rope_theta": 500000.0})
    rotary = RotaryEmbedding(16, theta=500000.0, scaling=scaling, max_positions=512)
    assert torch.equal(rotary.inv_freq, LlamaForCausalLM(config).model.rotary_emb.inv_freq)
    with pytest.raises(ValueError, match="rope_scaling type 'spiral' is unknown"):
        RotaryEmbedding(16, theta=1.0, scaling={"rope_type": "spiral"})
