"""The cross-tokenizer distillation loss: one call, several teachers, any of the modes, and the student's own cross-entropy.

Nothing here is `[T, V]` when the sides come as `HiddenLogits`: every part of the loss walks over tiles of tokens. Collectives exist only
over `tp_group` and depend on shapes and valid chunks that all its ranks share; normalizers come from outside, so the loss is the same
under accumulation, data- and tensor-parallel layout (with fixed weights, no dynamic scaling and all reachable columns; otherwise the
compared columns and the weights belong to the micro-batch).

Collectives over tp_group: cross-entropy and ALM two forward, one backward (hidden states) whatever the number of tiles; P-KL, gold, H-KL
and same-tokenizer KL a fixed number a tile, since their log stands over a sum of the shards that exists only tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtok.draft.metrics import MetricSum
from xtok.losses.cross_tokenizer.chunk_likelihood import chunk_likelihood_loss
from xtok.losses.cross_tokenizer.chunks import ChunkTable, SupervisedTokens, supervised_tokens, valid_chunks
from xtok.losses.cross_tokenizer.collectives import max_over_shards
from xtok.losses.cross_tokenizer.common_map import CommonKL, CommonMap, common_map
from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig, DistillationMode
from xtok.losses.cross_tokenizer.label_log_probs import label_log_probs, row_statistics
from xtok.losses.cross_tokenizer.logits import HiddenLogits, LogitsRows, LogitsSource
from xtok.losses.cross_tokenizer.p_kl import ProjectedKL, largest_columns
from xtok.losses.cross_tokenizer.same_tokenizer import SameTokenizerKL
from xtok.losses.cross_tokenizer.teachers import (
    average_teachers,
    check_one_vocabulary,
    teacher_supervised_tokens,
    teacher_weights,
)
from xtok.losses.cross_tokenizer.tiled import tiled_loss
from xtok.projection.projection import Projection

__all__ = ["CrossTokenizerDistillationLoss", "ValidCounts"]

Logits = Tensor | HiddenLogits
Count = Tensor | float | int


@dataclass(frozen=True)
class ValidCounts:
    """This batch's part of the normalizers, float64 scalars: to be summed over ranks and accumulation steps by the caller.

    num_valid_tokens: N_t. num_valid_chunks: N_c of each teacher, None for a same-tokenizer teacher.
    """

    num_valid_tokens: Tensor
    num_valid_chunks: list[Tensor | None]


@dataclass(frozen=True)
class _Student:
    """What every teacher's loss needs of the student's side."""

    source: LogitsSource
    tokens: SupervisedTokens
    log_probs: Tensor | None


class CrossTokenizerDistillationLoss:
    """Distillation of one student from teachers whose tokenizers may differ.

    projections: one a teacher; None for a teacher with the student's tokenizer (for ALM alone a projection is still what says where the
    teacher's vocabulary ends and that its tokenizer is another). student_vocab_size: ids of the student's tokenizer; default: from the
    projections, else all columns are tokens.

    Raises ValueError when lists disagree with the number of teachers, when projections disagree on the student, or when
    `averaged_logits` meets several vocabularies; ProjectionError when gold or H-KL would have no common token.
    """

    def __init__(
        self,
        config: CrossTokenizerDistillationConfig,
        projections: Sequence[Projection | None],
        *,
        student_vocab_size: int | None = None,
    ) -> None:
        if not projections:
            raise ValueError("projections is empty: give one entry a teacher (None for a same-tokenizer teacher)")
        if config.teacher_weights is not None and len(config.teacher_weights) != len(projections):
            raise ValueError(f"teacher_weights lists {len(config.teacher_weights)} entries for {len(projections)} teachers")
        students = {(p.student_fingerprint, p.student_vocab_size) for p in projections if p is not None}
        if len(students) > 1:
            raise ValueError(f"the projections start from different students: {sorted(students)}")
        self.config = config
        self.projections = list(projections)
        self.modes: list[DistillationMode] = config.modes(len(self.projections))
        self.student_vocab_size = student_vocab_size or next((size for _, size in students), None)
        if config.teacher_combination == "averaged_logits":
            check_one_vocabulary(self.projections)
        self._maps = [self._common_map(p, mode) for p, mode in zip(self.projections, self.modes, strict=True)]

    def _common_map(self, projection: Projection | None, mode: DistillationMode) -> CommonMap | None:
        if projection is None or mode not in ("gold", "h_kl"):
            return None
        return common_map(projection, strict=mode == "gold", threshold=self.config.relaxed_threshold)

    def count_valid(self, batch: Mapping[str, Any]) -> ValidCounts:
        """Local N_t and N_c of a batch. Needs no logits and no collective."""
        chunks = [None if p is None else self._chunks(batch, i) for i, p in enumerate(self.projections)]
        return ValidCounts(supervised_tokens(batch).count, [None if c is None else c.count for c in chunks])

    def _chunks(self, batch: Mapping[str, Any], teacher_index: int) -> ChunkTable:
        return valid_chunks(batch, teacher_index, exact_match_only=self.config.exact_match_only)

    def __call__(
        self,
        *,
        student_logits: Logits,
        teacher_logits: Sequence[Logits],
        batch: Mapping[str, Any],
        num_valid_tokens: Count,
        num_valid_chunks: Sequence[Count | None],
        tp_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, dict[str, MetricSum]]:
        """Total loss (a scalar; gradient to the student only) and metrics as unreduced pairs.

        student_logits: `[B, T, V]`, or this rank's columns of it when `tp_group` is given (hidden states replicated, head sharded).
        teacher_logits: one a teacher, `[B, U, V_t]`, whole on every rank. num_valid_tokens, num_valid_chunks: N_t and N_c over all ranks
        and accumulation steps; 0 gives a part of exactly 0.

        Metrics (`value()` after summing over ranks): "kd_loss_{i}", "ce_loss", "coverage_{i}" (supervised tokens in a valid chunk),
        "top1_agreement_{i}", "num_valid_chunks_{i}" (over 1), P-KL: "teacher_mass_outside_{i}", "empty_chunks_{i}"; "teacher_weight_{i}".
        """
        num_teachers = len(self.projections)
        if len(teacher_logits) != num_teachers or len(num_valid_chunks) != num_teachers:
            raise ValueError(
                f"{num_teachers} teachers, but {len(teacher_logits)} teacher_logits and {len(num_valid_chunks)} num_valid_chunks"
            )
        student = self._student(student_logits, batch, tp_group)
        weights, teachers = self._teachers(teacher_logits, batch, tp_group)
        metrics: dict[str, MetricSum] = {}
        kd = student.source.values.new_zeros((), dtype=student.source.dtype)
        for index, teacher in teachers:
            count = num_valid_tokens if self.projections[index] is None else num_valid_chunks[index]
            value = self._teacher_loss(index, student, teacher, batch, metrics)
            metrics[f"kd_loss_{index}"] = _pair(value, self._denominator(index, student, metrics))
            metrics[f"teacher_weight_{index}"] = _pair(weights[index], 1.0)
            scale = weights[index] if self.config.teacher_combination == "sum" else torch.ones_like(weights[index])
            if self._is_off(index):
                continue  # a weight of 0 keeps an infinite loss out; 0 · inf would not
            kd = kd + scale * _divide(value, count, f"num_valid_chunks[{index}]")
        ce_sum = self._cross_entropy(student)
        metrics["ce_loss"] = _pair(ce_sum, student.tokens.count)
        ce = _divide(ce_sum, num_valid_tokens, "num_valid_tokens")
        return self._total(kd, ce), metrics

    def _is_off(self, index: int) -> bool:
        weights = self.config.teacher_weights
        return self.config.teacher_combination == "sum" and weights is not None and weights[index] == 0

    def _student(self, logits: Logits, batch: Mapping[str, Any], tp_group: dist.ProcessGroup | None) -> _Student:
        source = LogitsSource(logits, vocab_size=self.student_vocab_size, group=tp_group, name="student_logits")
        tokens = supervised_tokens(batch)
        self._check_rows(source, batch, "input_ids", "student_logits")
        _check_labels(tokens.labels, source.vocab_size, "input_ids")
        needs_log_probs = self.config.ce_weight > 0 or self.config.dynamic_scaling or "alm" in self.modes
        log_probs = (
            label_log_probs(source, tokens.rows, tokens.labels, tile_size=self.config.token_tile_size)
            if needs_log_probs
            else None
        )
        return _Student(source, tokens, log_probs)

    def _check_rows(self, source: LogitsRows, batch: Mapping[str, Any], key: str, name: str) -> None:
        if key in batch and source.leading != tuple(batch[key].shape):
            raise ValueError(f"{name} are for {source.leading} tokens, but batch[{key!r}] is {tuple(batch[key].shape)}")

    def _teachers(
        self, teacher_logits: Sequence[Logits], batch: Mapping[str, Any], tp_group: dist.ProcessGroup | None
    ) -> tuple[Tensor, list[tuple[int, LogitsRows]]]:
        """Weights `[N]` and the (teacher index, logits) that take part: all, the selected one, or the average as teacher 0."""
        sources = []
        for index, (logits, projection) in enumerate(zip(teacher_logits, self.projections, strict=True)):
            size = self.student_vocab_size if projection is None else projection.teacher_vocab_size
            sources.append(LogitsSource(_detached(logits), vocab_size=size, group=None, name=f"teacher_logits[{index}]"))
            self._check_rows(
                sources[-1],
                batch,
                "input_ids" if projection is None else f"teacher_{index}_input_ids",
                f"teacher_logits[{index}]",
            )
        dynamic = self.config.teacher_combination == "select_teacher" or self.config.teacher_weighting != "fixed"
        tokens = [
            teacher_supervised_tokens(batch, i, same_tokenizer=p is None) if dynamic else None
            for i, p in enumerate(self.projections)
        ]
        weights = teacher_weights(self.config, sources, tokens, tp_group=tp_group)
        if self.config.teacher_combination == "averaged_logits":
            return weights, [(0, average_teachers(sources, weights, batch, self.projections))]
        if self.config.teacher_combination == "select_teacher":
            chosen = int(weights.argmax())
            return weights, [(chosen, sources[chosen])]
        return weights, list(enumerate(sources))

    def _teacher_loss(
        self, index: int, student: _Student, teacher: LogitsRows, batch: Mapping[str, Any], metrics: dict[str, MetricSum]
    ) -> Tensor:
        """Unnormalized KD of one teacher, and its metrics."""
        projection = self.projections[index]
        if projection is None:
            return self._same_tokenizer(index, student, teacher, metrics)
        chunks = self._chunks(batch, index)
        covered = chunks.weights[chunks.student_chunk].double().sum()
        metrics[f"coverage_{index}"] = _pair(covered, student.tokens.count)
        metrics[f"num_valid_chunks_{index}"] = _pair(chunks.count, 1.0)
        tile_size = self.config.token_tile_size
        _check_labels(chunks.teacher_labels, teacher.vocab_size, f"teacher_{index}_input_ids")
        if self.modes[index] == "alm":
            assert student.log_probs is not None
            own = student.log_probs[student.tokens.row_place[chunks.student_rows]]
            theirs = row_statistics(teacher, chunks.teacher_rows, chunks.teacher_labels, tile_size=tile_size).label_log_prob
            return chunk_likelihood_loss(self.config, chunks, own, theirs)
        pairs = self._maps[index]
        if pairs is not None:
            common = CommonKL(self.config, pairs, student.source, teacher, chunks)
            value = tiled_loss(student.source, common)
            metrics[f"top1_agreement_{index}"] = _pair(common.agreement, chunks.count)
            return value
        return self._projected(index, projection, student.source, teacher, chunks, metrics)

    def _projected(
        self,
        index: int,
        projection: Projection,
        student: LogitsSource,
        teacher: LogitsRows,
        chunks: ChunkTable,
        metrics: dict[str, MetricSum],
    ) -> Tensor:
        statistics = row_statistics(
            teacher, chunks.teacher_rows, chunks.teacher_labels, tile_size=self.config.token_tile_size, details=True
        )
        column_max = max_over_shards(statistics.column_max, student.group)
        compared = largest_columns(projection.reachable_columns(), column_max, self.config.vocab_topk)
        term = ProjectedKL(
            self.config, projection, student, teacher, chunks, compared=compared, teacher_log_normalizer=statistics.log_normalizer
        )
        value = tiled_loss(student, term)
        metrics[f"top1_agreement_{index}"] = _pair(term.agreement, chunks.count)
        metrics[f"empty_chunks_{index}"] = _pair(term.empty, chunks.count)
        metrics[f"teacher_mass_outside_{index}"] = _pair(term.outside, term.num_teacher_tokens)
        return value

    def _same_tokenizer(self, index: int, student: _Student, teacher: LogitsRows, metrics: dict[str, MetricSum]) -> Tensor:
        source, tokens = student.source, student.tokens
        compared = None
        if self.config.vocab_topk is not None and self.config.vocab_topk < teacher.num_columns:
            statistics = row_statistics(teacher, tokens.rows, tokens.labels, tile_size=self.config.token_tile_size, details=True)
            everything = torch.arange(teacher.num_columns, device=teacher.device)
            compared = largest_columns(everything, max_over_shards(statistics.column_max, source.group), self.config.vocab_topk)
        term = SameTokenizerKL(self.config, source, teacher, tokens, compared=compared)
        value = tiled_loss(source, term)
        metrics[f"coverage_{index}"] = _pair(tokens.count, tokens.count)
        metrics[f"top1_agreement_{index}"] = _pair(term.agreement, tokens.count)
        return value

    def _denominator(self, index: int, student: _Student, metrics: dict[str, MetricSum]) -> Tensor:
        if self.projections[index] is None:
            return student.tokens.count
        return metrics[f"num_valid_chunks_{index}"].numerator

    def _cross_entropy(self, student: _Student) -> Tensor:
        """Σ of weight · −log p over supervised tokens; 0 when neither the total nor a metric of it is wanted."""
        if student.log_probs is None:
            return student.source.values.new_zeros((), dtype=student.source.dtype)
        return -(student.log_probs * student.tokens.weights.to(student.log_probs.dtype)).sum()

    def _total(self, kd: Tensor, ce: Tensor) -> Tensor:
        if self.config.dynamic_scaling:
            size = kd.detach().abs()
            scale = torch.where(
                size > 0, ce.detach().abs() / torch.where(size > 0, size, torch.ones_like(size)), torch.ones_like(size)
            )
            return scale * kd + ce
        return self.config.kd_weight * kd + self.config.ce_weight * ce


def _detached(logits: Logits) -> Logits:
    if isinstance(logits, HiddenLogits):
        return HiddenLogits(logits.hidden.detach(), logits.weight.detach())
    return logits.detach()


def _check_labels(labels: Tensor, vocab_size: int, name: str) -> None:
    if labels.numel() and (int(labels.max()) >= vocab_size or int(labels.min()) < 0):
        worst = int(labels.max()) if int(labels.max()) >= vocab_size else int(labels.min())
        raise ValueError(f"batch[{name!r}] holds token id {worst}, outside the {vocab_size} ids of its vocabulary")


def _pair(numerator: Tensor, denominator: Tensor | float) -> MetricSum:
    top = numerator.detach().double()
    return MetricSum(top, torch.as_tensor(denominator, dtype=torch.float64, device=top.device).detach())


def _divide(value: Tensor, count: Count | None, name: str) -> Tensor:
    """`value / count`, exactly 0 (with the graph kept) when the count is 0."""
    if count is None:
        raise ValueError(f"{name} is None, but this teacher has another tokenizer: hand in its global number of valid chunks")
    total = torch.as_tensor(count, dtype=torch.float64, device=value.device)
    if total.ndim != 0 or not bool(torch.isfinite(total)) or bool(total < 0):
        raise ValueError(f"{name} must be one finite, non-negative number, got {count}")
    inverse = torch.where(total > 0, 1.0 / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(total))
    return value * inverse.to(value.dtype)
