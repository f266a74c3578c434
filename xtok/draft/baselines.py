"""What a draft has to beat: the same draft before training, and a guess of one token over and over.

Shapes: T tapped layers, n context rows, H hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from xtok.draft.decoding import Proposal, Sampler
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel

__all__ = ["UnigramDrafter", "most_frequent_token", "untrained"]


class UnigramDrafter:
    """Drafts one token, whatever came before. token: its id; num_drafts: how often it is drafted a round; device: the target's."""

    layer_ids: Sequence[int] = (0,)

    def __init__(self, token: int, num_drafts: int, device: torch.device | None = None) -> None:
        self._tokens = torch.full((num_drafts,), token, device=device)

    def reset(self) -> None:
        """Nothing is remembered."""

    def observe(self, features: Tensor) -> None:
        """Nothing is looked at. features: [1, n, T * H]."""

    def propose(self, anchor_token: int, anchor_position: int, sampler: Sampler) -> Proposal:
        """The same guess everywhere."""
        return Proposal(self._tokens)


def most_frequent_token(answers: Iterable[Sequence[int]]) -> int:
    """The id that `answers` hold most often. Taken from the answers to be drafted, it is the best that a guess of one token can be."""
    return Counter(token for answer in answers for token in answer).most_common(1)[0][0]


def untrained(model: DFlashDraftModel | DSparkDraftModel, *, seed: int = 0) -> DFlashDraftModel | DSparkDraftModel:
    """A draft of the same configuration, device and dtype with fresh weights, as training would begin with."""
    generator = torch.Generator().manual_seed(seed)
    fresh = (
        DSparkDraftModel(model.config, generator=generator)
        if isinstance(model, DSparkDraftModel)
        else DFlashDraftModel(model.config, generator=generator)
    )
    return fresh.to(next(model.parameters())).eval()
