"""What one draft training forward hands to its caller.

Shapes: B samples, A anchors a row, K block slots, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["DFlashForwardOutput", "DSparkForwardOutput"]


@dataclass(slots=True, kw_only=True)
class _BlockFields:
    """Fields that both layouts share beyond the published ones; None where the caller did not ask for them."""

    draft_hidden: Tensor | None = None
    """[B, A, K, H] body output after the final norm: logits are the target's head of it (plus the Markov bias)."""
    anchor_positions: Tensor | None = None
    """int64 [B, A], ascending, 0 in dummy blocks."""
    label_indices: Tensor | None = None
    """int64 [B, A, K], the position each slot predicts; may lie beyond the row where eval_mask is False."""


@dataclass(slots=True)
class DSparkForwardOutput(_BlockFields):
    """One DSpark forward (next-token layout: slot k predicts the token at anchor + k + 1).

    The sampler keeps anchors whose first draft target is supervised. Later slots are supervised while they stay inside the row
    (and the anchor's document) and form a contiguous supervised prefix. Dummy blocks of rows with too few anchors are masked out
    by `block_keep_mask` and `eval_mask`.
    """

    draft_logits: Tensor | None
    """[B, A, K, V], or None when the forward was asked not to make them (the losses work from hidden states)."""
    target_ids: Tensor
    """int64 [B, A, K], the token each slot should predict; 0 where there is none."""
    eval_mask: Tensor
    """bool [B, A, K], supervised slots."""
    block_keep_mask: Tensor
    """bool [B, A], False for dummy blocks."""
    confidence_pred: Tensor | None = None
    """[B, A, K] acceptance logits of the confidence head, or None without one."""
    aligned_target_logits: Tensor | None = None
    """[B, A, K, V] the target's logits for the same tokens, or None when not asked for."""
    first_supervised_slot: int = 0


@dataclass(slots=True)
class DFlashForwardOutput(_BlockFields):
    """One DFlash forward (at-position layout: slot k predicts the token at anchor + k; slot 0 is given and unsupervised).

    Fields as in `DSparkForwardOutput`; DFlash has no confidence head.
    """

    draft_logits: Tensor | None
    target_ids: Tensor
    eval_mask: Tensor
    block_keep_mask: Tensor
    aligned_target_logits: Tensor | None = None
    first_supervised_slot: int = 1
