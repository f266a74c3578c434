"""DFlash: a block of slots drafted in one pass, each from the target's features before the anchor.

At-position layout: slot 0 is the anchor token itself, slot k predicts the token at anchor + k, so K slots draft K - 1 tokens.
"""

from __future__ import annotations

from xtok.draft.body import DraftBody
from xtok.draft.config import DFlashConfig

__all__ = ["DFlashConfig", "DFlashDraftModel"]


class DFlashDraftModel(DraftBody):
    """Draft body alone: exactly 11 tensors a layer and 3 more. Embedding and head are the target's."""

    config: DFlashConfig
