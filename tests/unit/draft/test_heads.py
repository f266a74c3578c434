"""Markov and confidence heads: sequential equals teacher-forced, a zero bias is no bias, the starting bias is small."""

from __future__ import annotations

import pytest
import torch

from tests.unit.draft.tiny import HIDDEN, VOCAB, tiny_dspark
from xtok.draft.common import AcceptRatePredictor

KINDS = ["vanilla", "gated", "rnn"]


@pytest.mark.parametrize("kind", KINDS)
def test_sequential_equals_teacher_forced(kind: str) -> None:
    head = tiny_dspark(markov_head_type=kind).markov_head
    hidden, previous = torch.randn(2, 3, 4, HIDDEN), torch.randint(0, VOCAB, (2, 3, 4))
    features, embeddings = head(hidden, previous)
    assert features.shape == embeddings.shape == (2, 3, 4, 5)
    for b in range(2):
        for a in range(3):
            state = head.start(hidden[b, a, 0])
            for k in range(4):
                slot, state = head.step(hidden[b, a, k], head.markov_w1(previous[b, a, k]), state)
                torch.testing.assert_close(slot, features[b, a, k])


def test_heads_compute_their_formulas() -> None:
    hidden, previous = torch.randn(1, 3, HIDDEN), torch.randint(0, VOCAB, (1, 3))
    vanilla, gated, recurrent = (tiny_dspark(markov_head_type=kind).markov_head for kind in KINDS)
    e = vanilla.markov_w1.weight[previous]
    assert torch.equal(vanilla(hidden, previous)[0], e)
    e = gated.markov_w1.weight[previous]
    gate = torch.cat([hidden, e], -1) @ gated.gate_proj.weight.T + gated.gate_proj.bias
    torch.testing.assert_close(gated(hidden, previous)[0], torch.sigmoid(gate) * e)
    e, state, expected = recurrent.markov_w1.weight[previous], torch.zeros(5), []
    for k in range(3):
        z = recurrent.joint_proj.weight @ torch.cat([state, e[0, k], hidden[0, k]]) + recurrent.joint_proj.bias
        state = torch.sigmoid(z[:5]) * state + (1 - torch.sigmoid(z[:5])) * torch.tanh(z[5:10])
        expected.append(torch.tanh(z[10:]))
    torch.testing.assert_close(recurrent(hidden, previous)[0][0], torch.stack(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_bias_matrix_leaves_the_base(kind: str) -> None:
    head = tiny_dspark(markov_head_type=kind).markov_head
    torch.nn.init.zeros_(head.markov_w2.weight)
    features, _ = head(torch.randn(4, HIDDEN), torch.arange(4))
    assert features.abs().sum() > 0
    assert head.markov_w2(features).eq(0).all()


def test_initial_weights() -> None:
    model = tiny_dspark(init_std=0.02, markov_rank=32, markov_head_type="gated")
    bias = model.markov_head.markov_w2(model.markov_head.markov_w1.weight)
    assert bias.std() < 0.01
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.25), name
    same = tiny_dspark(init_std=0.02, markov_rank=32, markov_head_type="gated")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_confidence_reads_hidden_and_markov_features() -> None:
    model = tiny_dspark()
    assert isinstance(model.confidence_head, AcceptRatePredictor)
    hidden, embeddings = torch.randn(2, HIDDEN), torch.randn(2, 5)
    expected = torch.cat([hidden, embeddings], -1) @ model.confidence_head.proj.weight[0] + model.confidence_head.proj.bias
    torch.testing.assert_close(model.confidence(hidden, embeddings), expected)
    alone = tiny_dspark(confidence_head_with_markov=False)
    expected = hidden @ alone.confidence_head.proj.weight[0] + alone.confidence_head.proj.bias
    torch.testing.assert_close(alone.confidence(hidden, embeddings), expected)
    assert tiny_dspark(enable_confidence_head=False).confidence(hidden, embeddings) is None
