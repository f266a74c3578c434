"""Hidden-state capture: the same tensors as Hugging Face's own, hooks gone afterwards, nothing else kept."""

from __future__ import annotations

import pytest
import torch

from tests.unit.draft.tiny import ARCHITECTURES, LAYERS, tiny_target
from xtok.draft.capture import HiddenStateCapture
from xtok.draft.common import extract_context_feature


def num_hooks(module: torch.nn.Module) -> int:
    return sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_capture_equals_the_models_own_hidden_states(architecture: str) -> None:
    target = tiny_target(architecture)
    ids = torch.randint(3, 60, (2, 9))
    layer_ids = list(range(-1, LAYERS - 1))
    before = num_hooks(target.model)
    features = target.features(ids, layer_ids)
    assert num_hooks(target.model) == before
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True)
    assert torch.equal(features.context, extract_context_feature(output.hidden_states, layer_ids))
    # Hugging Face's last entry is after the final norm: what the head reads.
    assert torch.equal(features.final_hidden, output.hidden_states[-1])
    torch.testing.assert_close(target.logits(features.final_hidden), output.logits, rtol=1e-4, atol=1e-4)
    assert not features.context.requires_grad


def test_last_layer_is_taken_before_the_final_norm() -> None:
    target = tiny_target("llama")
    ids = torch.arange(5)[None]
    features = target.features(ids, [LAYERS - 1])
    torch.testing.assert_close(target.final_norm(features.context), features.final_hidden)
    assert not torch.equal(features.context, features.final_hidden)


def test_hooks_go_even_when_the_forward_fails_and_gradients_are_cut() -> None:
    target = tiny_target("llama")
    before = num_hooks(target.model)
    with pytest.raises(IndexError), HiddenStateCapture(target.layers, target.final_norm, [0, 1]):
        target.model(input_ids=torch.tensor([[10_000]]))
    assert num_hooks(target.model) == before
    capture = HiddenStateCapture(target.layers, target.final_norm, [0])
    with capture:
        with pytest.raises(RuntimeError, match=r"target layers \[0\] were not captured"):
            capture.context_features()
        with pytest.raises(RuntimeError, match="final norm was not captured"):
            capture.final_hidden()
        target.model(input_ids=torch.arange(4)[None])  # with gradients enabled
        features = capture.context_features()
    assert not features.requires_grad
    with pytest.raises(RuntimeError, match="were not captured"):
        capture.context_features()


def test_embedding_is_the_targets_own() -> None:
    target = tiny_target("gemma3")
    ids = torch.arange(6)
    features = target.features(ids[None], [-1])
    assert torch.equal(target.embed(ids), features.context[0])
    assert not torch.equal(target.embed(ids), target.embedding.weight[ids])  # Gemma scales
