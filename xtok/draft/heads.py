"""Heads of a DSpark draft: Markov bias on the logits, and the confidence that a slot will be accepted.

Shapes: [...] any leading dims, K block slots, H hidden size, V vocabulary size, r Markov rank.
"""

from __future__ import annotations

from torch import Tensor, nn


class AcceptRatePredictor(nn.Module):
    """Predicts, per slot, the logit of the probability that the target accepts the drafted token.

    Args:
        input_dim: width of the features (H, or H + r with Markov features).
    """

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_dim, 1, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """[..., input_dim] -> logits [...]."""
        logits: Tensor = self.proj(features)
        return logits.squeeze(-1)
