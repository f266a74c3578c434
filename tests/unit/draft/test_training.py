"""The training forward: labels, losses against dense logits, metrics, and batches with nothing to learn from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.unit.draft.tiny import ARCHITECTURES, HIDDEN, VOCAB, random_batch, tiny_dflash, tiny_dspark, tiny_target
from xtok.draft.common import DFlashForwardOutput, DSparkForwardOutput
from xtok.draft.metrics import acceptance_metrics
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step
from xtok.errors import ConfigError

SETTINGS = DraftStepSettings(num_anchors=6, seed=3, token_chunk_size=7, materialize_logits=True)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_labels_and_teacher_rows_on_counted_tokens(kind: str) -> None:
    """Tokens equal positions, so a label off by one shows as a number."""
    model = tiny_dflash() if kind == "dflash" else tiny_dspark()
    offset = 0 if kind == "dflash" else 1
    batch = DraftBatch(torch.arange(20)[None], torch.ones(1, 20), torch.tensor([0]))
    target = tiny_target("llama")
    output = draft_step(model, target, batch, dataclasses.replace(SETTINGS, num_anchors=19)).output
    slots = torch.arange(model.config.block_size)
    expected = output.anchor_positions[..., None] + slots + offset
    assert torch.equal(output.target_ids[output.eval_mask], expected[output.eval_mask])
    assert output.eval_mask.sum() == sum(
        len([k for k in slots.tolist() if k + offset >= 1 and a + k + offset < 20]) for a in range(19)
    )
    logits = target.model(batch.input_ids).logits[0]
    for b, a, k in output.eval_mask.nonzero().tolist():
        row = int(output.anchor_positions[b, a]) + k + offset - 1
        torch.testing.assert_close(output.aligned_target_logits[b, a, k], logits[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dflash_loss_equals_dense(architecture: str) -> None:
    model, target, batch = tiny_dflash(architecture), tiny_target(architecture), random_batch(2, 14, supervised_from=4)
    step = draft_step(model, target, batch, SETTINGS)
    output = step.output
    assert isinstance(output, DFlashForwardOutput)
    rows = -(output.aligned_target_logits.softmax(-1) * output.draft_logits.log_softmax(-1)).sum(-1)
    weights = torch.exp(-(torch.arange(4) - 1.0) / 4 / (4 / 8))  # block size 4 scales the published constant of 8 slots
    weights = (weights * output.eval_mask).where(output.eval_mask, 0.0)
    expected = (rows * weights).sum() / weights.sum()
    assert not output.eval_mask[..., 0].any()
    torch.testing.assert_close(step.loss(), expected, rtol=1e-5, atol=1e-6)
    _assert_same_gradients(model, step.loss(), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gemma2"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_dspark_loss_equals_dense(architecture: str, head: str | None) -> None:
    heads: dict[str, Any] = {"markov_head_type": head} if head else {"markov_rank": 0, "confidence_head_with_markov": False}
    model, target = tiny_dspark(architecture, **heads), tiny_target(architecture)
    step = draft_step(model, target, random_batch(2, 14, supervised_from=4), SETTINGS)
    output = step.output
    assert isinstance(output, DSparkForwardOutput)
    mask = output.eval_mask
    draft, teacher = output.draft_logits.softmax(-1), output.aligned_target_logits.softmax(-1)
    distance = (draft - teacher).abs().sum(-1)
    ce = F.cross_entropy(output.draft_logits.flatten(0, 2), output.target_ids.flatten(), reduction="none").view(mask.shape)
    bce = F.binary_cross_entropy_with_logits(output.confidence_pred, (1 - distance / 2).detach(), reduction="none")
    weights = torch.exp(-torch.arange(3.0) / 4) * mask
    expected = ((0.1 * ce + 0.9 * distance + bce) * weights).sum() / weights.sum()
    torch.testing.assert_close(step.loss(), expected, rtol=1e-5, atol=1e-6)
    _assert_same_gradients(model, step.loss(), expected)


def _assert_same_gradients(model: torch.nn.Module, loss: torch.Tensor, expected: torch.Tensor) -> None:
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    wanted = torch.autograd.grad(expected, list(parameters.values()), retain_graph=True)
    for name, value, reference in zip(parameters, got, wanted, strict=True):
        torch.testing.assert_close(value, reference, rtol=2e-3, atol=1e-4 * float(reference.abs().max()) + 1e-7, msg=name)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_metrics_equal_the_outputs(kind: str) -> None:
    model = tiny_dflash() if kind == "dflash" else tiny_dspark(markov_rank=0, confidence_head_with_markov=False)
    step = draft_step(model, tiny_target("llama"), random_batch(3, 14, supervised_from=4), SETTINGS)
    output = step.output
    draft, teacher = output.draft_logits.softmax(-1), output.aligned_target_logits.softmax(-1)
    accepts = {"greedy": draft.argmax(-1) == teacher.argmax(-1), "overlap": torch.minimum(draft, teacher).sum(-1)}
    for name, accept in accepts.items():
        expected = acceptance_metrics(
            accept=accept, eval_mask=output.eval_mask, first_supervised_slot=output.first_supervised_slot
        )
        torch.testing.assert_close(step.metrics[f"tau_{name}"].value(), expected["tau"].value(), rtol=1e-5, atol=1e-5)
        got = step.metrics[f"{name}_acceptance_by_slot"]
        torch.testing.assert_close(got.value(), expected["acceptance_by_slot"].value(), rtol=1e-5, atol=1e-5)
        assert got.value().shape == (model.config.num_draft_slots,)
    if kind == "dflash":
        torch.testing.assert_close(step.metrics["loss"].value().float(), step.loss().detach())
    assert draft_step(model, tiny_target("llama"), random_batch(1, 14), DraftStepSettings(4, with_metrics=False)).metrics == {}


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_batch_without_anchors_gives_zero_loss_tied_to_all_parameters(architecture: str, kind: str) -> None:
    model = tiny_dflash(architecture) if kind == "dflash" else tiny_dspark(architecture)
    batch = dataclasses.replace(random_batch(2, 10), loss_mask=torch.zeros(2, 10))
    step = draft_step(model, tiny_target(architecture), batch, DraftStepSettings(num_anchors=3))
    assert step.counts.eq(0).all()
    assert step.loss() == 0
    step.loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.eq(0).all(), name


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_target_gets_no_gradient(kind: str) -> None:
    model = tiny_dflash() if kind == "dflash" else tiny_dspark()
    target = tiny_target("llama")
    target.model.requires_grad_(True)
    step = draft_step(model, target, random_batch(2, 12), SETTINGS)
    (step.loss() + step.output.draft_logits.square().mean()).backward()  # nor through the logits made for inspection
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert not any("target" in name or "embed" in name or "lm_head" in name for name in model.state_dict())


def test_equal_logits_are_accepted_in_full() -> None:
    """A draft whose hidden rows are the target's: confidence target 1 in every slot, tau = K + 1."""
    model, target = tiny_dspark(markov_rank=0, confidence_head_with_markov=False), tiny_target("llama")
    batch = random_batch(1, 12)
    plain = draft_step(model, target, batch, SETTINGS)
    rows = (plain.output.label_indices - 1).clamp(max=11)
    perfect = target.features(batch.input_ids, model.config.target_layer_ids).final_hidden[0, rows]

    class Perfect(torch.nn.Module):
        config = model.config

        def forward(self, **inputs: Any) -> Any:
            return dataclasses.replace(model(**inputs), hidden=perfect)

    step = draft_step(Perfect(), target, batch, SETTINGS)
    full = step.output.eval_mask.all(-1)
    assert full.any()
    assert (1 + step.output.eval_mask.sum(-1))[full].eq(model.config.block_size + 1).all()
    overlap = step.losses.stats.overlap[step.output.eval_mask]
    torch.testing.assert_close(overlap, torch.ones_like(overlap))
    assert step.metrics["greedy_acceptance_by_slot"].value().eq(1).all()
    lengths = 1 + step.output.eval_mask.sum(-1).double()
    torch.testing.assert_close(
        step.metrics["tau_overlap"].value(), lengths[step.output.eval_mask.any(-1)].mean(), rtol=1e-5, atol=0
    )


def test_draws_follow_seed_epoch_and_sample() -> None:
    model, target, batch = tiny_dflash(), tiny_target("llama"), random_batch(3, 30)
    plain = draft_step(model, target, batch, SETTINGS).output.anchor_positions
    again = draft_step(model, target, batch, SETTINGS).output.anchor_positions
    later = draft_step(model, target, batch, dataclasses.replace(SETTINGS, epoch=1)).output.anchor_positions
    part = DraftBatch(batch.input_ids[1:], batch.loss_mask[1:], batch.idx[1:])
    assert torch.equal(plain, again)
    assert not torch.equal(plain, later)
    assert torch.equal(draft_step(model, target, part, SETTINGS).output.anchor_positions, plain[1:])


def test_chunks_change_nothing() -> None:
    for model in (tiny_dflash(), tiny_dspark()):
        steps = [
            draft_step(model, tiny_target("llama"), random_batch(2, 14), dataclasses.replace(SETTINGS, token_chunk_size=size))
            for size in (1, 5, 1000)
        ]
        gradients = [torch.autograd.grad(step.loss(), list(model.parameters())) for step in steps]
        for step, gradient in zip(steps[1:], gradients[1:], strict=True):
            torch.testing.assert_close(step.loss(), steps[0].loss())
            for got, expected in zip(gradient, gradients[0], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_packed_documents_give_the_loss_of_separate_rows(architecture: str, kind: str) -> None:
    """Every anchor taken, so that both draw the same: sums, counts and gradients by slot."""
    model = tiny_dflash(architecture) if kind == "dflash" else tiny_dspark(architecture)
    target, rows = tiny_target(architecture), random_batch(2, 11)
    ids, lengths = rows.input_ids, [11, 6]
    packed = DraftBatch(
        torch.cat([ids[0], ids[1, :6], ids.new_zeros(4)])[None],
        torch.ones(1, 21),
        torch.tensor([0]),
        torch.tensor([[0, *lengths]]),
    )
    apart = [DraftBatch(ids[i : i + 1, :n], torch.ones(1, n), torch.tensor([i])) for i, n in enumerate(lengths)]
    settings = DraftStepSettings(num_anchors=30)
    together = draft_step(model, target, packed, settings)
    steps = [draft_step(model, target, batch, settings) for batch in apart]
    assert torch.equal(together.counts, steps[0].counts + steps[1].counts)
    expected = sum(step.loss(together.counts) for step in steps)
    torch.testing.assert_close(together.loss(), expected, rtol=1e-5, atol=1e-6)
    _assert_same_gradients(model, together.loss(), expected)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize(
    ("loss_mask", "block_size", "supervised"),
    [([1.0], 4, 0), ([1.0, 1.0], 4, 1), ([0.0, 0.0, 0.0, 1.0], 2, 1), ([0.0, 1.0, 0.0, 1.0], 4, 2), ([1.0] * 3, 20, 3)],
)
def test_rows_shorter_than_a_block_and_lonely_tokens(kind: str, loss_mask: list[float], block_size: int, supervised: int) -> None:
    model = (tiny_dflash if kind == "dflash" else tiny_dspark)(block_size=block_size)
    batch = dataclasses.replace(random_batch(1, len(loss_mask)), loss_mask=torch.tensor([loss_mask]))
    step = draft_step(model, tiny_target("llama"), batch, DraftStepSettings(num_anchors=5))
    assert step.counts.sum() == supervised
    step.loss().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_half_precision_target_with_fp32_draft() -> None:
    target = tiny_target("llama", torch.bfloat16)
    model = tiny_dflash()
    step = draft_step(model, target, random_batch(2, 12), SETTINGS)
    step.loss().backward()
    assert step.losses.stats.numerators.dtype == torch.float32
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


IDS, IDX = torch.full((2, 3), 5), torch.arange(2)


def step_of(ids: torch.Tensor, seq_lens: torch.Tensor | None = None, **inputs: Any) -> Any:
    return draft_step(tiny_dflash(), tiny_target("llama"), DraftBatch(ids, torch.ones(2, 3), IDX, seq_lens), **inputs)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DraftBatch(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2)), ValueError, "must both be"),
        (lambda: DraftBatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3)), ValueError, r"idx must be \[2\]"),
        (lambda: DraftBatch(IDS[:, :0], torch.zeros(2, 0), IDX), ValueError, r"a batch needs a token, got \[2, 0\]"),
        (lambda: DraftBatch(IDS[:0], torch.zeros(0, 3), IDX[:0]), ValueError, r"a batch needs a token, got \[0, 3\]"),
        (lambda: DraftBatch(IDS.int(), torch.zeros(2, 3), IDX), TypeError, "input_ids must be int64, got torch.int32"),
        (lambda: DraftBatch(IDS, torch.zeros(2, 3), IDX.float()), TypeError, "idx must be integers, got torch.float32"),
        (lambda: DraftBatch(IDS, torch.zeros(2, 3), IDX, IDX), ValueError, r"seq_lens must be \[2, D\], got \(2,\)"),
        (lambda: DraftBatch(IDS, torch.zeros(2, 3), IDX, IDS[:1]), ValueError, r"seq_lens must be \[2, D\], got \(1, 3\)"),
        (lambda: DraftBatch(IDS, torch.zeros(2, 3), IDX, IDS.float()), TypeError, "seq_lens must be integers"),
        (lambda: step_of(IDS, torch.tensor([[2, 2], [1, 1]])), ValueError, "documents of 4 tokens do not fit a row of 3"),
        (lambda: step_of(IDS, torch.tensor([[4, -1], [1, 1]])), ValueError, "seq_lens must be"),
        (lambda: step_of(IDS - 100), ValueError, "token ids -95..-95 go beyond the target's 61 embedding rows"),
        (lambda: step_of(IDS + 56), ValueError, "token ids 61..61 go beyond"),
        (lambda: step_of(IDS, features=tiny_target("llama").features(IDS, (1,))), ValueError, r"context must be \(2, 3, 48\)"),
        (lambda: step_of(IDS, features=tiny_target("llama").features(IDS[:1], (0, 2))), ValueError, r"got \(1, 3, 48\)"),
        (
            lambda: draft_step(tiny_dflash(hidden_size=16), tiny_target("llama"), random_batch(1, 4)),
            ConfigError,
            "hidden_size 16",
        ),
        (lambda: DraftStepSettings(num_anchors=0), ValueError, "at least 1, got 0"),
        (lambda: draft_step(torch.nn.Linear(1, 1), tiny_target("llama"), random_batch(1, 4)), TypeError, "no draft model"),
        (lambda: draft_step(tiny_dflash(), tiny_target("llama"), random_batch(1, 9)).loss(ce_weight=1.0), TypeError, "one term"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_context_width_of_the_tiny_draft() -> None:
    features = tiny_target("qwen3").features(torch.arange(5)[None], (0, 2))
    assert features.context.shape == (1, 5, 2 * HIDDEN)
    assert tiny_target("qwen3").logits(features.final_hidden).shape == (1, 5, VOCAB)
    assert math.isclose(tiny_dflash().config.effective_slot_decay, 2.0)
