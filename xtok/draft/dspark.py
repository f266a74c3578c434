"""DSpark: a block drafted in one pass, with a Markov bias from the token before each slot and a confidence per slot.

Next-token layout: slot k predicts the token at anchor + k + 1, so K slots draft K tokens, slot 0 among them.

Shapes: B samples, A anchors a row, K block slots, Q = A·K, S context rows, H hidden size, V vocabulary size, r Markov rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.draft.attention import Attend
from xtok.draft.body import ContextCache, DraftBody
from xtok.draft.config import DSparkConfig
from xtok.draft.heads import MARKOV_HEADS, AcceptRatePredictor
from xtok.draft.model import BlockStates, split_blocks

__all__ = ["DSparkConfig", "DSparkDraftModel"]


class DSparkDraftModel(DraftBody):
    """Draft body, Markov head and confidence head, each present where the configuration asks for it.

    Args:
        config: dimensions and wiring.
        generator: draws the initial weights; None uses the global one.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head: AcceptRatePredictor | None = None
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = AcceptRatePredictor(config.hidden_size + extra)
        self.initialize(generator)

    def forward(
        self,
        *,
        slot_embeddings: Tensor,
        slot_positions: Tensor,
        context_features: Tensor,
        context_positions: Tensor,
        attend: Attend,
        previous_tokens: Tensor | None = None,
        cache: ContextCache | None = None,
    ) -> BlockStates:
        """All slots of all blocks, heads teacher-forced; arguments as in `DraftBody.run`.

        Args:
            previous_tokens: int64 [B, Q] the token before each slot's prediction, token[anchor + k]; None leaves the heads out
                (the decoding loop runs them slot by slot).
        """
        slots = self.run(
            slot_embeddings=slot_embeddings,
            slot_positions=slot_positions,
            context_features=context_features,
            context_positions=context_positions,
            attend=attend,
            cache=cache,
        )
        hidden = split_blocks(slots, self.config.block_size)
        if previous_tokens is None:
            return BlockStates(hidden)
        features = embeddings = weight = None
        if self.markov_head is not None:
            features, embeddings = self.markov_head(hidden, previous_tokens.view(hidden.shape[:-1]))
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
