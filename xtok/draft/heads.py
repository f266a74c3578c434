"""Heads of a DSpark draft: Markov bias on the logits, and the confidence that a slot will be accepted.

A Markov head turns the token before a slot into features [r]; W2 · features is added to the slot's logits. The loss takes the
features and W2 apart, so that the [slots, V] bias never exists.

Shapes: [...] any leading dims, K block slots, H hidden size, V vocabulary size, r Markov rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xtok.draft.config import DSparkConfig

__all__ = ["MARKOV_HEADS", "AcceptRatePredictor", "GatedMarkovHead", "MarkovHead", "RecurrentMarkovHead"]


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


class MarkovHead(nn.Module):
    """Vanilla Markov head: features are the embedding W1[previous token]. Base of the gated and the recurrent one."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """State before slot 0: [..., r] zeros, for hidden states [..., H] of one slot."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def step(self, hidden: Tensor, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: hidden [..., H], W1[previous] [..., r], state [..., r] -> (features [..., r], next state)."""
        return embedding, state

    def forward(self, hidden: Tensor, previous_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced: hidden [..., K, H], int64 previous tokens [..., K] -> (features, W1[previous]), each [..., K, r]."""
        embeddings: Tensor = self.markov_w1(previous_tokens)
        return self.step(hidden, embeddings, self.start(hidden))[0], embeddings


class GatedMarkovHead(MarkovHead):
    """features = sigmoid(G [h; e]) · e."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank, bias=True)

    def step(self, hidden: Tensor, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, state


class RecurrentMarkovHead(MarkovHead):
    """A gated recurrence over the block's slots: z = [s; e; h], J z -> gate, candidate, output; features = tanh(output)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank, bias=True)

    def step(self, hidden: Tensor, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1.0 - keep) * torch.tanh(candidate)

    def forward(self, hidden: Tensor, previous_tokens: Tensor) -> tuple[Tensor, Tensor]:
        embeddings: Tensor = self.markov_w1(previous_tokens)
        state, features = self.start(hidden[..., 0, :]), []
        for slot in range(hidden.shape[-2]):
            slot_features, state = self.step(hidden[..., slot, :], embeddings[..., slot, :], state)
            features.append(slot_features)
        return torch.stack(features, dim=-2), embeddings


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
