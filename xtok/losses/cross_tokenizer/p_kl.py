"""P-KL: the student's distribution carried through the projection, against the teacher's, chunk by chunk.

Shapes: R student rows and S teacher rows of a tile, C its chunks, N student columns that reach a compared teacher column, K compared
teacher columns. Under tensor parallelism N is this shard's part; the projected rows `[R, K]` are summed over the shards, tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.chunks import ChunkTable, ChunkTile
from xtok.losses.cross_tokenizer.collectives import max_over_shards, sum_over_shards
from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig
from xtok.losses.cross_tokenizer.logits import LogitsRows, LogitsSource
from xtok.losses.cross_tokenizer.sparse import SparseColumns, kl_terms, segment_mean
from xtok.projection.projection import Projection

__all__ = ["LOG_FLOOR", "ProjectedKL", "largest_columns"]

PROBABILITY_FLOOR = 1e-30
LOG_FLOOR = -69.07755278982137  # log(1e-30)


def largest_columns(candidates: Tensor, column_max: Tensor, topk: int | None) -> Tensor:
    """The `topk` of `candidates` (int64, ascending) with the largest `column_max` `[V]`; ties to the lowest id; ascending."""
    if topk is None or topk >= candidates.shape[0]:
        return candidates
    order = torch.sort(column_max[candidates], descending=True, stable=True).indices[:topk]
    return torch.sort(candidates[order]).values


class ProjectedKL:
    """The P-KL term of one teacher (a `TileTerm`), and the metrics it gathers on the way.

    Metrics (float64 scalars, weighted by sample mask): `agreement` chunks whose two best columns are the same; `empty` chunks without
    student mass; `outside` teacher probability outside the compared columns, summed over teacher tokens, with `num_teacher_tokens`.
    """

    def __init__(
        self,
        config: CrossTokenizerDistillationConfig,
        projection: Projection,
        student: LogitsSource,
        teacher: LogitsRows,
        chunks: ChunkTable,
        *,
        compared: Tensor,
        teacher_log_normalizer: Tensor,
    ) -> None:
        self.config, self.student, self.teacher, self.chunks = config, student, teacher, chunks
        self.compared = compared
        # float64 places by row of the flattened teacher logits, so that a tile can look its rows up
        self._log_normalizer = torch.zeros(teacher.leading[0] * teacher.leading[1], dtype=teacher.dtype, device=teacher.device)
        self._log_normalizer[chunks.teacher_rows] = teacher_log_normalizer
        self._columns, self._matrix = self._shard_matrix(projection)
        zero = torch.zeros((), dtype=torch.float64, device=student.device)
        self.agreement, self.empty, self.outside, self.num_teacher_tokens = zero, zero.clone(), zero.clone(), zero.clone()

    def _shard_matrix(self, projection: Projection) -> tuple[Tensor | None, SparseColumns]:
        """This shard's student columns that reach a compared column, and the projection between the two.

        `nemo` needs the whole softmax, so all columns take part.
        """
        row, column, weight = projection.entries()
        place = torch.full((projection.teacher_vocab_size,), -1, dtype=torch.int64, device=row.device)
        place[self.compared] = torch.arange(self.compared.shape[0], device=row.device)
        local = row - self.student.start
        keep = (place[column] >= 0) & (local >= 0) & (local < self.student.num_columns)
        local, column, weight = local[keep], place[column[keep]], weight[keep]
        if self.config.chunk_reduction == "nemo":
            columns, number, width = None, local, self.student.num_columns
        else:
            columns, number = torch.unique(local, return_inverse=True)
            width = columns.shape[0]
        return columns, SparseColumns(number, column, weight, (width, self.compared.shape[0]), self.student.dtype)

    @property
    def columns(self) -> Tensor | None:
        """This shard's student columns that the term reads."""
        return self._columns

    def tiles(self) -> Iterable[tuple[Tensor, ChunkTile]]:
        """Runs of whole chunks."""
        return self._tiles()

    def _tiles(self) -> Iterator[tuple[Tensor, ChunkTile]]:
        for tile in self.chunks.tiles(self.config.token_tile_size):
            yield tile.student_rows, tile

    def tile_loss(self, logits: Tensor, tile: ChunkTile) -> Tensor:
        """Σ over the tile's chunks of weight · T² · KL."""
        log_teacher = self._teacher_side(tile)
        log_student, has_mass = self._student_side(logits, tile)
        divergence = kl_terms(log_teacher, log_student, reverse=self.config.reverse_kl).sum(dim=1)
        divergence = torch.where(has_mass, divergence, torch.zeros_like(divergence))
        weights = tile.weights.to(divergence.dtype)
        with torch.no_grad():
            same = (log_student.argmax(dim=1) == log_teacher.argmax(dim=1)) & has_mass
            self.agreement += (weights * same).double().sum()
            self.empty += (weights * ~has_mass).double().sum()
        return (weights * divergence).sum() * self.config.temperature**2

    def _teacher_side(self, tile: ChunkTile) -> Tensor:
        """Chunk log-probabilities of the teacher over the compared columns, `[C, K]`."""
        raw = self.teacher.rows(tile.teacher_rows, self.compared)
        inside = (torch.logsumexp(raw, dim=1) - self._log_normalizer[tile.teacher_rows]).exp().clamp(max=1.0)
        token_weight = tile.weights[tile.teacher_chunk].double()
        self.outside += (token_weight * (1 - inside.double())).sum()
        self.num_teacher_tokens += token_weight.sum()
        if self.config.chunk_reduction == "nemo":
            log_q = torch.log_softmax(raw.div_(self.config.temperature), dim=1).clamp_min_(LOG_FLOOR)
            return segment_mean(log_q, tile.teacher_chunk, tile.num_chunks)
        q = torch.softmax(raw.div_(self.config.temperature), dim=1).clamp_min_(PROBABILITY_FLOOR)
        return self._reduce(q, tile.teacher_chunk, tile.num_chunks)

    def _student_side(self, logits: Tensor, tile: ChunkTile) -> tuple[Tensor, Tensor]:
        """Chunk log-probabilities of the projected student `[C, K]`, and which chunks have any mass there `[C]`."""
        scaled = logits / self.config.temperature if self.config.temperature != 1 else logits
        local_max = scaled.amax(dim=1) if scaled.shape[1] else scaled.new_full((scaled.shape[0],), -torch.inf)
        highest = max_over_shards(local_max, self.student.group)
        highest = torch.where(torch.isfinite(highest), highest, torch.zeros_like(highest))
        weights = (scaled - highest[:, None]).exp()
        projected = sum_over_shards(self._matrix.product(weights), self.student.group)
        mass = projected.sum(dim=1)
        if self.config.chunk_reduction == "nemo":
            normalizer = sum_over_shards(weights.sum(dim=1), self.student.group)
            mean = segment_mean(projected / normalizer[:, None], tile.student_chunk, tile.num_chunks)
            total = mean.sum(dim=1, keepdim=True)
            safe = torch.where(total > 0, total, torch.ones_like(total))
            return (mean / safe).clamp_min(PROBABILITY_FLOOR).log(), total[:, 0] > 0
        safe_mass = torch.where(mass > 0, mass, torch.ones_like(mass))
        floored = (projected / safe_mass[:, None]).clamp_min(PROBABILITY_FLOOR)
        has_mass = (
            torch.zeros(tile.num_chunks, dtype=mass.dtype, device=mass.device).index_add(0, tile.student_chunk, mass.detach()) > 0
        )
        return self._reduce(floored, tile.student_chunk, tile.num_chunks), has_mass

    def _reduce(self, probabilities: Tensor, chunk: Tensor, num_chunks: int) -> Tensor:
        """Token probabilities `[·, K]`, floored, to chunk log-probabilities `[C, K]`: mixture or geometric."""
        if self.config.chunk_reduction == "mixture":
            return segment_mean(probabilities, chunk, num_chunks).log()
        return torch.log_softmax(segment_mean(probabilities.log(), chunk, num_chunks), dim=1)
