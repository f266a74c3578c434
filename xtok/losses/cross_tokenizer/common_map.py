"""Gold and H-KL: KL over the tokens both vocabularies have, and an L1 between the sorted rest.

Equal models give 0. Their gradient is 0 on one-token chunks (what equal tokenizers give); on longer ones the mean log-probability is no
distribution, and plain KL terms keep a small gradient.

Shapes: R student rows and S teacher rows of a tile, C its chunks, V_s student columns (this shard's), V_t teacher columns,
M common pairs. Under tensor parallelism a tile needs three reductions (normalizer MAX, SUM; common SUM), one gather, and one SUM backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xtok.errors import ProjectionError
from xtok.losses.cross_tokenizer.chunks import ChunkTable, ChunkTile
from xtok.losses.cross_tokenizer.collectives import gather_last_dim, max_over_shards, sum_over_shards
from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig
from xtok.losses.cross_tokenizer.logits import LogitsRows, LogitsSource
from xtok.losses.cross_tokenizer.sparse import kl_terms, segment_mean
from xtok.projection.projection import Projection

__all__ = ["CommonKL", "CommonMap", "common_map"]

STRICT_WEIGHT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class CommonMap:
    """Pairs of ids that mean the same: student `[M]` ascending, teacher `[M]`, int64."""

    student: Tensor
    teacher: Tensor


def common_map(projection: Projection, *, strict: bool, threshold: float) -> CommonMap:
    """The one-to-one part of a projection.

    strict (gold): rows with one entry of weight 1. Relaxed (H-KL): the largest weight of a row, if ≥ threshold. Of several students
    that claim one teacher id the largest weight wins, ties to the lowest student id. Raises ProjectionError when nothing is common.
    """
    entry = (projection.indices >= 0) & (projection.weights > 0)
    weights = torch.where(entry, projection.weights, torch.zeros_like(projection.weights))
    best = weights.amax(dim=1, keepdim=True)
    last_id = projection.teacher_vocab_size
    candidates = torch.where(
        entry & (weights == best), projection.indices.long(), torch.full_like(projection.indices, last_id).long()
    )
    teacher, weight = candidates.amin(dim=1), best[:, 0]
    if strict:
        claims = (entry.sum(dim=1) == 1) & ((weight - 1).abs() < STRICT_WEIGHT_TOLERANCE)
    else:
        claims = entry.any(dim=1) & (weight >= threshold)
    student = claims.nonzero().flatten()
    teacher, weight = teacher[student], weight[student]
    order = torch.argsort(weight, descending=True, stable=True)
    student, teacher = student[order], teacher[order]
    by_teacher = torch.argsort(teacher, stable=True)
    sorted_teacher = teacher[by_teacher]
    first = torch.ones_like(sorted_teacher, dtype=torch.bool)
    first[1:] = sorted_teacher[1:] != sorted_teacher[:-1]
    winners = by_teacher[first]
    student, teacher = student[winners], teacher[winners]
    if student.numel() == 0:
        raise ProjectionError(
            "the two vocabularies have no token in common, so gold and H-KL have nothing to compare "
            f"(student {projection.student_fingerprint}, teacher {projection.teacher_fingerprint}): use mode p_kl or alm"
        )
    ascending = torch.argsort(student)
    return CommonMap(student[ascending], teacher[ascending])


class CommonKL:
    """The gold or H-KL term of one teacher (a `TileTerm`); `agreement` counts chunks whose best common token is the same."""

    columns: Tensor | None = None

    def __init__(
        self,
        config: CrossTokenizerDistillationConfig,
        pairs: CommonMap,
        student: LogitsSource,
        teacher: LogitsRows,
        chunks: ChunkTable,
    ) -> None:
        self.config, self.student, self.teacher, self.chunks = config, student, teacher, chunks
        local = pairs.student - student.start
        owned = (local >= 0) & (local < student.num_columns)
        self._student_common, self._teacher_common = local[owned], pairs.teacher[owned]
        self._student_rest = _rest(student.num_columns, self._student_common)
        self._teacher_rest = _rest(teacher.num_columns, pairs.teacher)
        num_student_rest = student.vocab_size - pairs.student.shape[0]
        self._length = min(config.uncommon_topk, max(num_student_rest, self._teacher_rest.shape[0]))
        self.agreement = torch.zeros((), dtype=torch.float64, device=student.device)

    def tiles(self) -> Iterable[tuple[Tensor, ChunkTile]]:
        """Runs of whole chunks."""
        return self._tiles()

    def _tiles(self) -> Iterator[tuple[Tensor, ChunkTile]]:
        for tile in self.chunks.tiles(self.config.token_tile_size):
            yield tile.student_rows, tile

    def tile_loss(self, logits: Tensor, tile: ChunkTile) -> Tensor:
        """Σ over the tile's chunks of weight · T² · (common KL + L1 of the sorted rest)."""
        raw = self.teacher.rows(tile.teacher_rows) / self.config.temperature
        log_q = segment_mean(torch.log_softmax(raw, dim=1), tile.teacher_chunk, tile.num_chunks)
        log_p = segment_mean(self._log_softmax(logits), tile.student_chunk, tile.num_chunks)
        common_p, common_q = log_p.index_select(1, self._student_common), log_q.index_select(1, self._teacher_common)
        terms = kl_terms(common_q, common_p, reverse=self.config.reverse_kl).sum(dim=1)
        divergence = sum_over_shards(terms, self.student.group)
        rest_p = self._sorted(log_p.index_select(1, self._student_rest).exp(), self.student)
        rest_q = _largest(log_q.index_select(1, self._teacher_rest).exp(), self._length)
        weights = tile.weights.to(divergence.dtype)
        self._count_agreement(common_p, common_q, tile)
        return (weights * (divergence + (rest_p - rest_q).abs().sum(dim=1))).sum() * self.config.temperature**2

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """log softmax over all shards of `logits / T`, `[R, V]`."""
        scaled = logits / self.config.temperature
        if self.student.group is None:
            return torch.log_softmax(scaled, dim=1)
        local_max = scaled.amax(dim=1) if scaled.shape[1] else scaled.new_full((scaled.shape[0],), -torch.inf)
        highest = max_over_shards(local_max, self.student.group)
        total = sum_over_shards((scaled - highest[:, None]).exp().sum(dim=1), self.student.group, used_by_columns=True)
        return scaled - (highest + total.log())[:, None]

    def _sorted(self, probabilities: Tensor, source: LogitsSource) -> Tensor:
        """The largest uncommon student probabilities of all shards in falling order, padded with zeros, `[C, length]`."""
        return _largest(gather_last_dim(_largest(probabilities, self._length), source.group), self._length)

    @torch.no_grad()
    def _count_agreement(self, common_p: Tensor, common_q: Tensor, tile: ChunkTile) -> None:
        """A chunk agrees when the student's and the teacher's best common token are one pair (over all shards)."""
        best_p, place_p = _best(common_p, self._teacher_common)
        best_q, place_q = _best(common_q, self._teacher_common)
        top_p, top_q = (max_over_shards(best, self.student.group) for best in (best_p, best_q))
        id_p = max_over_shards(torch.where(best_p == top_p, place_p, -1), self.student.group)
        id_q = max_over_shards(torch.where(best_q == top_q, place_q, -1), self.student.group)
        self.agreement += (tile.weights * (id_p == id_q)).double().sum()


def _best(log_probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Highest value of each row `[C]` and the id of its column."""
    if log_probs.shape[1] == 0:
        size = log_probs.shape[0]
        return log_probs.new_full((size,), -torch.inf), torch.full((size,), -1, dtype=torch.int64, device=log_probs.device)
    best = log_probs.max(dim=1)
    return best.values, ids[best.indices]


def _rest(size: int, taken: Tensor) -> Tensor:
    """Ids in [0, size) that are not in `taken`, ascending."""
    free = torch.ones(size, dtype=torch.bool, device=taken.device)
    free[taken] = False
    return free.nonzero().flatten()


def _largest(values: Tensor, length: int) -> Tensor:
    """The `length` largest of each row in falling order, padded with zeros."""
    top = values.topk(min(length, values.shape[1]), dim=1, sorted=True).values
    return torch.nn.functional.pad(top, (0, length - top.shape[1]))
