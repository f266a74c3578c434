"""Dense oracle of the DSpark objective: every logit at once, plain autograd, fp64. For tests only.

Shapes: T rows, V vocabulary, H hidden size, r width of the bias features, B_ bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["DenseDSpark", "dense_dspark"]


@dataclass(frozen=True, slots=True)
class DenseDSpark:
    """Binned sums [B_] of each term, binned counts [B_], and per-row overlap and argmaxes [T]."""

    cross_entropy: Tensor
    l1_distance: Tensor
    confidence: Tensor | None
    counts: Tensor
    overlap: Tensor
    student_tokens: Tensor
    teacher_tokens: Tensor


def dense_dspark(
    *,
    student_hidden: Tensor,
    output_weight: Tensor,
    teacher_logits: Tensor,
    target_ids: Tensor,
    mask: Tensor,
    bin_ids: Tensor,
    num_bins: int,
    bias_features: Tensor | None = None,
    bias_weight: Tensor | None = None,
    confidence_logits: Tensor | None = None,
) -> DenseDSpark:
    """All rows [T, ...], teacher logits already gathered [T, V]; masked rows must be finite here."""
    logits = student_hidden.double() @ output_weight.double().T
    if bias_features is not None and bias_weight is not None:
        logits = logits + bias_features.double() @ bias_weight.double().T
    student, teacher = logits.softmax(-1), teacher_logits.double().softmax(-1)
    mask = mask.double()

    def binned(values: Tensor) -> Tensor:
        return torch.stack([(values * mask)[bin_ids == b].sum() for b in range(num_bins)])

    overlap = torch.minimum(student, teacher).sum(-1).detach()
    confidence = None
    if confidence_logits is not None:
        confidence = binned(F.binary_cross_entropy_with_logits(confidence_logits.double(), overlap, reduction="none"))
    return DenseDSpark(
        cross_entropy=binned(F.cross_entropy(logits, target_ids, reduction="none")),
        l1_distance=binned((student - teacher).abs().sum(-1)),
        confidence=confidence,
        counts=binned(torch.ones_like(mask)),
        overlap=overlap,
        student_tokens=logits.argmax(-1),
        teacher_tokens=teacher_logits.argmax(-1),
    )
