"""DSpark: a block drafted in one pass, with a Markov bias from the token before each slot and a confidence per slot.

Next-token layout: slot k predicts the token at anchor + k + 1, so K slots draft K tokens, slot 0 among them.

Shapes: B samples, A anchors a row, K block slots, H hidden size, V vocabulary size, r Markov rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.draft.body import DraftBody
from xtok.draft.config import DSparkConfig
from xtok.draft.heads import MARKOV_HEADS, AcceptRatePredictor, MarkovHead
from xtok.draft.model import BlockStates

__all__ = ["DSparkConfig", "DSparkDraftModel"]


class DSparkDraftModel(DraftBody):
    """Draft body, Markov head and confidence head, each present where the configuration asks for it."""

    config: DSparkConfig
    markov_head: MarkovHead | None
    confidence_head: AcceptRatePredictor | None

    def build_heads(self) -> None:
        config = self.config
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = None
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = AcceptRatePredictor(config.hidden_size + extra)

    def with_heads(self, hidden: Tensor, previous_tokens: Tensor) -> BlockStates:
        features = embeddings = weight = None
        if self.markov_head is not None:
            features, embeddings = self.markov_head(hidden, previous_tokens)
            weight = self.markov_head.markov_w2.weight
        return BlockStates(hidden, features, weight, self.confidence(hidden, embeddings))

    def confidence(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor | None:
        """Acceptance logits [...] from hidden [..., H] and W1[previous] [..., r]; None without a confidence head."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov and embeddings is not None:
            hidden = torch.cat([hidden, embeddings], dim=-1)
        logits: Tensor = self.confidence_head(hidden)
        return logits
