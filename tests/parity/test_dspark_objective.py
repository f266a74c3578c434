"""The DSpark objective beyond its kernel: overlap, the combined loss, slot weights, and mistakes by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.test_dspark import NUM_BINS, _logit_case, call, make_case, terms
from xtok.losses.dspark import dspark_projected_vocab_parallel_loss, dspark_slot_weights


def test_equal_distributions_overlap_fully() -> None:
    logits = torch.randn(5, 12)
    stats = call(_logit_case(logits, logits))
    torch.testing.assert_close(stats.overlap, torch.ones(5))
    assert torch.equal(stats.draft_tokens, stats.teacher_tokens)


def test_combined_is_deepspecs_default_and_never_divides_by_nothing() -> None:
    case = make_case(11, 5, 20)
    arguments = case.arguments()
    stats = dspark_projected_vocab_parallel_loss(**arguments, weights=dspark_slot_weights(NUM_BINS))
    weights = torch.exp(-torch.arange(3.0) / 4)
    counts = stats.cross_entropy.counts
    scale = (counts * weights).sum() + 1e-8
    expected = sum(c * (v * weights).sum() / scale for c, v in zip((0.1, 0.9, 1.0), terms(stats), strict=True))
    torch.testing.assert_close(stats.combined(normalization_counts=counts), expected)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"student_hidden": torch.zeros(6)}, ValueError, "student_hidden must be"),
    ({"output_weight": torch.zeros(20, 4)}, ValueError, "H=5, output_weight has H=4"),
    ({"output_weight": torch.zeros(0, 5)}, ValueError, "non-empty"),
    ({"teacher_logits": torch.zeros(9, 21)}, ValueError, "teacher_logits must end in 20 columns"),
    ({"teacher_rows": None}, ValueError, "need teacher_rows"),
    ({"mask": torch.ones(5)}, ValueError, r"mask must be \(6,\), got \(5,\)"),
    ({"target_ids": torch.zeros(6, dtype=torch.int32)}, TypeError, "target_ids must be int64"),
    ({"target_ids": torch.full((6,), 20)}, IndexError, "target_ids holds 20"),
    ({"teacher_rows": torch.full((6,), -1)}, IndexError, "teacher_rows holds -1"),
    ({"bin_ids": torch.full((6,), 3)}, ValueError, "bin_ids holds 3"),
    ({"bin_ids": None}, ValueError, "3 weights need bin_ids"),
    ({"weights": torch.zeros(0)}, ValueError, "weights must be a non-empty vector"),
    ({"token_chunk_size": 0}, ValueError, "token_chunk_size is 0, must be at least 1"),
    ({"bias_weight": None}, ValueError, "belong together"),
    ({"bias_weight": torch.zeros(20, 4)}, ValueError, "bias_weight must be"),
    ({"bias_features": torch.zeros(6, 5, dtype=torch.float64)}, ValueError, "bias_features is torch.float64"),
    ({"output_weight": torch.zeros(20, 5, dtype=torch.bfloat16)}, ValueError, "must be equal"),
    ({"teacher_logits": torch.zeros(9, 20, dtype=torch.int64)}, TypeError, "teacher_logits must be floating"),
    ({"confidence_logits": torch.zeros(6, 1)}, ValueError, "confidence_logits must be"),
    ({"teacher_logits": None}, ValueError, "exactly one of teacher_logits and teacher_hidden, got 0"),
    ({"teacher_hidden": torch.zeros(9, 5)}, ValueError, "exactly one of teacher_logits and teacher_hidden, got 2"),
    ({"logit_softcap": 0.0}, ValueError, "logit_softcap must be positive"),
    ({"mask": torch.ones(6, device="meta")}, ValueError, "mask is on meta"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = make_case(6, 5, 20)
    case.tensors["mask"] = torch.ones(6)
    arguments = {"weights": torch.ones(NUM_BINS), **case.arguments(torch.float32), **change}
    with pytest.raises(error, match=message):
        dspark_projected_vocab_parallel_loss(**arguments)


def test_slot_weights() -> None:
    torch.testing.assert_close(dspark_slot_weights(3, slot_decay=2.0), torch.tensor([1.0, 0.60653066, 0.36787944]))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="slot_decay"):
            dspark_slot_weights(3, slot_decay=wrong)
    with pytest.raises(ValueError, match="num_slots"):
        dspark_slot_weights(0)
