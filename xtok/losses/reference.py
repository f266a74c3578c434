"""Dense fp64 oracle of the draft losses: what the fast paths must equal, written for reading, never for speed.

Shapes: T rows, V global vocabulary, H hidden size, B bins, N blocks, K block slots (gamma + 1), S teacher positions.
Everything is promoted to fp64 and materialised whole; gradients come from autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.losses.stats import DraftLossStats

__all__ = ["dense_dflash_soft_ce", "dense_projected_soft_ce", "dense_soft_ce", "dense_soft_ce_rows"]


def dense_soft_ce_rows(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy [T] of two [T, V] logit matrices, fp64: logsumexp(s) - sum(softmax(t) * s), where 0 * (-inf) counts as 0."""
    student = student_logits.double()
    teacher_probability = torch.softmax(teacher_logits.detach().double(), dim=-1)
    counted = teacher_probability != 0
    product = torch.where(counted, teacher_probability * torch.where(counted, student, torch.zeros_like(student)), 0.0)
    return torch.logsumexp(student, dim=-1) - product.sum(dim=-1)


def dense_soft_ce(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    bin_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> DraftLossStats:
    """Dense twin of `streaming_vocab_parallel_soft_ce` over the whole vocabulary; arguments [..., V] and [...]."""
    weight_vector = torch.ones(1, dtype=torch.float64) if weights is None else weights.detach().double().cpu()
    bins = torch.zeros(mask.shape, dtype=torch.int64) if bin_ids is None else bin_ids
    supervised = mask.reshape(-1) != 0
    rows = supervised.nonzero().squeeze(-1)
    vocabulary = student_logits.shape[-1]
    losses = dense_soft_ce_rows(
        student_logits.reshape(-1, vocabulary)[rows],
        teacher_logits.reshape(-1, vocabulary)[rows],
    )
    scale = mask.detach().reshape(-1)[rows].double()
    row_bins = bins.reshape(-1)[rows]
    numerators, counts = [], []
    for index in range(len(weight_vector)):
        chosen = row_bins == index
        numerators.append((losses[chosen] * scale[chosen]).sum())
        counts.append(scale[chosen].sum())
    return DraftLossStats(torch.stack(numerators), torch.stack(counts), weight_vector.to(scale.device))


def dense_projected_soft_ce(
    student_hidden: Tensor,
    output_weight: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    bin_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> DraftLossStats:
    """Dense twin of `projected_streaming_vocab_parallel_soft_ce`: the head is applied in fp64, then `dense_soft_ce`.

    Rows with mask 0 are dropped before the matmul, so that NaN in them touches nothing.
    """
    rows = (mask.reshape(-1) != 0).nonzero().squeeze(-1)
    hidden = student_hidden.reshape(-1, student_hidden.shape[-1])[rows]
    logits = hidden.double() @ output_weight.detach().double().T
    chosen_bins = None if bin_ids is None else bin_ids.reshape(-1)[rows]
    return dense_soft_ce(
        logits, teacher_logits.reshape(-1, teacher_logits.shape[-1])[rows], mask.reshape(-1)[rows], chosen_bins, weights
    )


def dense_dflash_soft_ce(
    draft_hidden: Tensor,
    output_weight: Tensor,
    teacher_logits: Tensor,
    sample_rows: Tensor,
    label_positions: Tensor,
    loss_mask: Tensor,
    position_decay: float,
) -> DraftLossStats:
    """Dense twin of `dflash_projected_vocab_parallel_soft_ce`: two plain loops over blocks and slots."""
    num_blocks, num_slots = loss_mask.shape
    numerators: list[Tensor] = [draft_hidden[:0].double().sum() for _ in range(num_slots - 1)]
    counts = torch.zeros(num_slots - 1, dtype=torch.float64)
    head = output_weight.detach().double()
    for block in range(num_blocks):
        for slot in range(1, num_slots):
            if not bool(loss_mask[block, slot]):
                continue
            # Row P - 1 of the teacher is the one that predicts the token at position P.
            teacher_row = teacher_logits[int(sample_rows[block]), int(label_positions[block, slot]) - 1]
            student_row = head @ draft_hidden[block, slot].double()
            numerators[slot - 1] = numerators[slot - 1] + dense_soft_ce_rows(student_row[None], teacher_row[None])[0]
            counts[slot - 1] += 1
    weights = torch.tensor([position_decay**slot for slot in range(num_slots - 1)], dtype=torch.float64)
    return DraftLossStats(torch.stack(numerators), counts, weights)
