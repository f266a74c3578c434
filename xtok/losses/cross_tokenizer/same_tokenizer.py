"""KL to a teacher that shares the student's tokenizer: position by position, no projection.

Shapes: R supervised rows of a tile, K compared columns (the same ids on both sides; this shard's part of them on the student's side).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.chunks import SupervisedTokens
from xtok.losses.cross_tokenizer.collectives import max_over_shards, sum_over_shards
from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig
from xtok.losses.cross_tokenizer.logits import LogitsRows, LogitsSource
from xtok.losses.cross_tokenizer.sparse import kl_terms

__all__ = ["SameTokenizerKL"]

Tile = tuple[Tensor, Tensor]


class SameTokenizerKL:
    """The KL term of a same-tokenizer teacher (a `TileTerm`); `agreement` sums the weight of tokens whose best column is the same."""

    def __init__(
        self,
        config: CrossTokenizerDistillationConfig,
        student: LogitsSource,
        teacher: LogitsRows,
        tokens: SupervisedTokens,
        *,
        compared: Tensor | None,
    ) -> None:
        self.config, self.student, self.teacher, self.tokens, self.compared = config, student, teacher, tokens, compared
        self.agreement = torch.zeros((), dtype=torch.float64, device=student.device)
        everything = torch.arange(student.vocab_size, device=student.device) if compared is None else compared
        local = everything - student.start
        owned = (local >= 0) & (local < student.num_columns)
        self.columns: Tensor | None = local[owned]
        self._owned = owned.nonzero().flatten()  # places of this shard's columns among the compared ones

    def tiles(self) -> Iterable[tuple[Tensor, Tile]]:
        """Runs of supervised rows."""
        return self._tiles()

    def _tiles(self) -> Iterator[tuple[Tensor, Tile]]:
        size = self.config.token_tile_size
        for at in range(0, self.tokens.rows.shape[0], size):
            rows, weights = self.tokens.rows[at : at + size], self.tokens.weights[at : at + size]
            yield rows, (rows, weights)

    def tile_loss(self, logits: Tensor, tile: Tile) -> Tensor:
        """Σ over the tile's tokens of weight · T² · KL."""
        rows, weights = tile
        group = self.student.group
        log_q = torch.log_softmax(self.teacher.rows(rows, self.compared) / self.config.temperature, dim=1)
        scaled = logits / self.config.temperature
        local_max = scaled.amax(dim=1) if scaled.shape[1] else scaled.new_full((scaled.shape[0],), -torch.inf)
        highest = max_over_shards(local_max, group)
        total = sum_over_shards((scaled - highest[:, None]).exp().sum(dim=1), group, used_by_columns=True)
        log_p = scaled - (highest + total.log())[:, None]
        terms = kl_terms(log_q.index_select(1, self._owned), log_p, reverse=self.config.reverse_kl)
        divergence = sum_over_shards(terms.sum(dim=1), group)
        self._count_agreement(local_max, highest, scaled, log_q, weights)
        return (weights.to(divergence.dtype) * divergence).sum() * self.config.temperature**2

    @torch.no_grad()
    def _count_agreement(self, local_max: Tensor, highest: Tensor, scaled: Tensor, log_q: Tensor, weights: Tensor) -> None:
        best = torch.full_like(weights, -1, dtype=torch.int64)
        if scaled.shape[1]:
            best = torch.where(local_max == highest, self._owned[scaled.argmax(dim=1)], best)
        best = max_over_shards(best, self.student.group)
        self.agreement += (weights * (best == log_q.argmax(dim=1))).double().sum()
