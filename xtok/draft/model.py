"""What a draft model returns for its blocks.

Shapes: B samples, A anchors a row, K block slots, Q = A·K, H hidden size, V vocabulary size, r Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["BlockStates", "split_blocks"]


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Output of a draft's forward; logits are head(hidden) + bias_features · bias_weightᵀ."""

    hidden: Tensor  # [B, A, K, H]
    bias_features: Tensor | None = None  # [B, A, K, r]
    bias_weight: Tensor | None = None  # [V, r]
    confidence: Tensor | None = None  # [B, A, K] logits


def split_blocks(slots: Tensor, block_size: int) -> Tensor:
    """[B, Q, ...] -> [B, A, K, ...]."""
    return slots.reshape(slots.shape[0], -1, block_size, *slots.shape[2:])
