"""The DSpark objective: cross-entropy on sampled tokens, L1 distance to the target's distribution, and confidence.

    L = ce_weight · CE + l1_weight · Σ_v |p_draft - p_target| + confidence_weight · BCE(confidence, Σ_v min(p_draft, p_target))

Each term comes back as bins (one per block slot) to be reduced over data- and context-parallel ranks outside; the kernel and its
memory choice are described in `dspark_kernel`, the dense oracle is `dspark_reference`.

Shapes: [...] leading dims (T rows once flattened), Vl vocabulary columns of this rank, H hidden size, r bias feature width,
M teacher rows, B_ bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from xtok.losses.draft import DEFAULT_DRAFT_TOKEN_CHUNK_SIZE
from xtok.losses.dspark_inputs import DSparkInputs, check_inputs
from xtok.losses.dspark_kernel import DSparkProblem, DSparkSums
from xtok.losses.stats import DraftLossStats

__all__ = ["DSparkLossStats", "dspark_projected_vocab_parallel_loss", "dspark_slot_weights"]


@dataclass(frozen=True, slots=True)
class DSparkLossStats:
    """The three terms as bins, and what each supervised row showed (detached, rows in their input order)."""

    cross_entropy: DraftLossStats
    """CE against `target_ids`."""
    l1_distance: DraftLossStats
    """Σ_v |p_draft - p_target|, in [0, 2]: twice the total variation distance."""
    confidence: DraftLossStats | None
    """BCE of the confidence logits against the overlap; None without confidence logits."""
    overlap: Tensor
    """[...] Σ_v min(p_draft, p_target) in [0, 1], the chance that a sampled draft is accepted; 0 where the mask is 0."""
    draft_tokens: Tensor
    """int64 [...] argmax of the draft; -1 where the mask is 0."""
    teacher_tokens: Tensor
    """int64 [...] argmax of the target; -1 where the mask is 0."""

    def combined(
        self,
        *,
        normalization_counts: Tensor,
        ce_weight: float = 0.1,
        l1_weight: float = 0.9,
        confidence_weight: float = 1.0,
    ) -> Tensor:
        """The weighted objective, each term divided by Σ normalization_counts · weights.

        `l1_weight` multiplies the raw sum Σ|p_draft - p_target|; the defaults equal DeepSpec's published 0.1 / 0.9 / 1.0, which
        are on the raw sum. NeMo-RL's published total-variation weight of 0.9 is on half of that sum: pass l1_weight=0.45 for it.

        Args:
            normalization_counts: [B_] counts summed over ranks by the caller.

        Returns:
            Scalar; exactly 0 when no token is supervised anywhere.
        """
        total = ce_weight * self.cross_entropy.normalized(normalization_counts=normalization_counts)
        total = total + l1_weight * self.l1_distance.normalized(normalization_counts=normalization_counts)
        if self.confidence is not None:
            total = total + confidence_weight * self.confidence.normalized(normalization_counts=normalization_counts)
        return total


def dspark_slot_weights(num_slots: int, *, slot_decay: float = 4.0, device: torch.device | None = None) -> Tensor:
    """fp32 [num_slots] weights exp(-k / slot_decay) of slots k = 0.. in the next-token layout.

    Raises:
        ValueError: no slot, or a decay that is not positive and finite. TypeError: not an int, not a number.
    """
    if isinstance(num_slots, bool) or not isinstance(num_slots, int):
        raise TypeError(f"num_slots must be an int of at least 1, got {num_slots!r}")
    if isinstance(slot_decay, bool) or not isinstance(slot_decay, int | float):
        raise TypeError(f"slot_decay must be a number, got {slot_decay!r}")
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    if not (slot_decay > 0 and math.isfinite(slot_decay)):
        raise ValueError(f"slot_decay must be positive and finite, got {slot_decay}")
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32, device=device) / slot_decay)


def dspark_projected_vocab_parallel_loss(
    *,
    student_hidden: Tensor,
    output_weight: Tensor,
    target_ids: Tensor,
    mask: Tensor,
    teacher_logits: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    token_chunk_size: int = DEFAULT_DRAFT_TOKEN_CHUNK_SIZE,
    teacher_rows: Tensor | None = None,
    bias_features: Tensor | None = None,
    bias_weight: Tensor | None = None,
    confidence_logits: Tensor | None = None,
    bin_ids: Tensor | None = None,
    weights: Tensor | None = None,
    logit_softcap: float | None = None,
) -> DSparkLossStats:
    """DSpark's three terms as bins, from draft hidden rows, tile by tile.

    Gradients reach `student_hidden`, `bias_features`, `bias_weight` and `confidence_logits`; never the head or the teacher. Rows
    with mask 0 cost nothing and may hold anything. All reductions are fp32 (fp64 for fp64 inputs).

    Args:
        student_hidden: [..., H], floating.
        output_weight: [Vl, H] of the same dtype, this rank's contiguous (possibly uneven) vocabulary shard, in rank order.
        target_ids: int64 [...], ids of the whole vocabulary.
        mask: [...] boolean or fractional (finite, at least 0); scales numerators and counts alike.
        teacher_logits: [..., Vl] one row each, or [M, Vl] with `teacher_rows`; any floating dtype.
        teacher_hidden: instead of logits, the teacher's final hidden states [..., H] or [M, H] under the same head, in its dtype:
            its logits then exist a tile at a time too, for one more matmul in forward and one in backward.
        tp_group: ranks that share the vocabulary; all other inputs are equal on them.
        token_chunk_size: rows a tile. At most this many supervised rows: their logits are kept for backward, else recomputed.
        teacher_rows: int64 [...], row of the teacher for each row; read where the mask is not 0, gathered per tile.
        bias_features, bias_weight: [..., r] and [Vl, r] (this rank's shard) add features · weightᵀ to the logits (Markov head).
        confidence_logits: [...] logits trained towards the detached overlap.
        bin_ids: int64 [...] bin of each row; needed with more than one weight.
        weights: [B_] real bin weights, handed through to the result; default one bin of weight 1.
        logit_softcap: c where the head's logits are c·tanh(x/c), before the bias.

    Returns:
        `DSparkLossStats`; bins [B_] are rank-local over data, whole over the vocabulary.

    Raises:
        ValueError, TypeError: inputs that do not fit; IndexError: a supervised target id or teacher row outside its range. On all
            ranks of `tp_group` alike, before any work.
    """
    inputs = check_inputs(
        DSparkInputs(
            student_hidden=student_hidden,
            output_weight=output_weight,
            teacher_logits=teacher_logits,
            teacher_hidden=teacher_hidden,
            target_ids=target_ids,
            mask=mask,
            teacher_rows=teacher_rows,
            bias_features=bias_features,
            bias_weight=bias_weight,
            confidence_logits=confidence_logits,
            bin_ids=bin_ids,
            weights=weights,
            token_chunk_size=token_chunk_size,
            logit_softcap=logit_softcap,
        ),
        tp_group,
    )
    active = inputs.active
    problem = DSparkProblem(
        head=output_weight.detach(),
        teacher=inputs.teacher,
        teacher_is_hidden=teacher_logits is None,
        teacher_rows=inputs.teacher_rows[active],
        target_ids=target_ids.reshape(-1)[active],
        row_weights=inputs.row_weights[active],
        bin_ids=inputs.bin_ids[active],
        num_bins=len(inputs.weights),
        token_chunk_size=token_chunk_size,
        vocab_start=inputs.vocab_start,
        softcap=logit_softcap,
        tp_group=tp_group,
    )
    hidden = student_hidden.reshape(-1, student_hidden.shape[-1])[active]
    features = None if bias_features is None else bias_features.reshape(-1, bias_features.shape[-1])[active]
    ce_sums, l1_sums, overlap, draft_tokens, teacher_tokens = DSparkSums.apply(  # type: ignore[no-untyped-call]
        hidden, features, bias_weight, problem
    )
    counts = ce_sums.new_zeros(problem.num_bins).index_add(0, problem.bin_ids, problem.row_weights).detach()
    weights = inputs.weights.to(counts.dtype)

    confidence = None
    if confidence_logits is not None:
        rows = F.binary_cross_entropy_with_logits(
            confidence_logits.reshape(-1)[active].to(counts.dtype), overlap, reduction="none"
        )
        sums = rows.new_zeros(problem.num_bins).index_add(0, problem.bin_ids, problem.row_weights * rows)
        confidence = DraftLossStats(numerators=sums, counts=counts, weights=weights)

    def scattered(values: Tensor, fill: float) -> Tensor:
        full = torch.full((inputs.num_rows,), fill, dtype=values.dtype, device=values.device)
        full[active] = values
        return full.view(mask.shape)

    return DSparkLossStats(
        cross_entropy=DraftLossStats(numerators=ce_sums, counts=counts, weights=weights),
        l1_distance=DraftLossStats(numerators=l1_sums, counts=counts, weights=weights),
        confidence=confidence,
        overlap=scattered(overlap, 0.0),
        draft_tokens=scattered(draft_tokens, -1),
        teacher_tokens=scattered(teacher_tokens, -1),
    )
