"""DFlash: a block of slots drafted in one pass, each from the target's features before the anchor.

At-position layout: slot 0 is the anchor token itself, slot k predicts the token at anchor + k, so K slots draft K - 1 tokens.

Shapes: B samples, A anchors a row, K block slots, Q = A·K, S context rows, H hidden size, T tapped layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.draft.attention import Attend
from xtok.draft.body import ContextCache, DraftBody
from xtok.draft.config import DFlashConfig
from xtok.draft.model import BlockStates, split_blocks

__all__ = ["DFlashConfig", "DFlashDraftModel"]


class DFlashDraftModel(DraftBody):
    """Draft body alone: exactly 11 tensors a layer and 3 more. Embedding and head are the target's.

    Args:
        config: dimensions and wiring.
        generator: draws the initial weights; None uses the global one.
    """

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config)
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
        """All slots of all blocks; arguments as in `DraftBody.run` (`previous_tokens` is not needed)."""
        hidden = self.run(
            slot_embeddings=slot_embeddings,
            slot_positions=slot_positions,
            context_features=context_features,
            context_positions=context_positions,
            attend=attend,
            cache=cache,
        )
        return BlockStates(split_blocks(hidden, self.config.block_size))
