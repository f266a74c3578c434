"""Token-tiled, vocabulary-parallel cross-entropy and L1 distance of DSpark, from hidden rows to binned sums.

A row's student logits are `cap(hidden · headᵀ) + features · feature_weightᵀ`: the second term is the Markov bias, `cap` is
c·tanh(x/c) for targets that softcap their logits (teacher logits come capped), else nothing. A tile of rows
becomes logits, is reduced and is dropped; the full [T, V] logits never exist.

Memory choice: the gradient is recomputed. Cross-entropy and L1 distance have upstream scalars of their own and the bias weight
needs a gradient, so keeping forward-made gradients would cost a [T, H + r] buffer for each term and a [V, r] buffer for each term
and bin. Backward makes each tile's logits again instead: three matmuls of T·V·H a step (two where all rows fit one tile, whose
logits are kept), and nothing but [T, H + r] gradients and three scalars a row beyond the tiles.

Collectives under tensor parallelism, whatever the number of tiles: forward four (MAX [T, 2]; SUM [T, 3]; MIN [T, 2]; SUM [T, 2]),
backward one (SUM of [T, H + r], fp32). Validation adds its own few.

Shapes: T supervised rows, Vl vocabulary columns of this rank, H hidden size, r feature width, M teacher rows, B_ bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["DSparkProblem", "DSparkSums", "back_project", "project"]

_VOCAB_BLOCK = 16384
"""Vocabulary rows of a half-precision head widened at a time where the device cannot multiply into fp32 directly."""


@dataclass(slots=True)
class DSparkProblem:
    """Inputs that carry no gradient, and how to walk them."""

    head: Tensor  # [Vl, H]
    teacher: Tensor  # [M, Vl] logits, or [M, H] final hidden states that `head` projects tile by tile
    teacher_is_hidden: bool
    teacher_rows: Tensor  # int64 [T]
    target_ids: Tensor  # int64 [T], ids of the whole vocabulary
    row_weights: Tensor  # [T] mask values, accumulation dtype
    bin_ids: Tensor  # int64 [T]
    num_bins: int
    token_chunk_size: int
    vocab_start: int
    softcap: float | None
    tp_group: dist.ProcessGroup | None

    def tiles(self) -> Iterator[slice]:
        for start in range(0, len(self.target_ids), self.token_chunk_size):
            yield slice(start, min(start + self.token_chunk_size, len(self.target_ids)))

    def teacher_logits(self, tile: slice) -> Tensor:
        """A fresh [t, Vl] in the accumulation dtype."""
        rows = self.teacher[self.teacher_rows[tile]]
        if not self.teacher_is_hidden:
            return rows.to(self.row_weights.dtype)
        logits = project(rows, self.head)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def local_targets(self, tile: slice) -> tuple[Tensor, Tensor]:
        """(column of each row's target on this rank, clamped; whether this rank owns it)."""
        column = self.target_ids[tile] - self.vocab_start
        owned = (column >= 0) & (column < self.head.shape[0])
        return column.clamp(0, max(self.head.shape[0] - 1, 0)), owned


def project(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """hidden [t, H] · weightᵀ [H, V] -> [t, V] in fp32 (fp64 for fp64 inputs), never rounded to half precision.

    With `out` the product is added to it.
    """
    if hidden.dtype in (torch.float32, torch.float64):
        return hidden @ weight.T if out is None else out.addmm_(hidden, weight.T)
    if hidden.is_cuda:
        product = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return product if out is None else out.add_(product)
    if out is None:
        out = torch.zeros(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
    wide = hidden.float()
    for start in range(0, weight.shape[0], _VOCAB_BLOCK):
        out[:, start : start + _VOCAB_BLOCK].addmm_(wide, weight[start : start + _VOCAB_BLOCK].float().T)
    return out


def back_project(gradient: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [t, H] += gradient [t, V] (accumulation dtype) · weight [V, H]."""
    if weight.dtype == gradient.dtype:
        out.addmm_(gradient, weight)
        return
    if weight.is_cuda and weight.dtype == torch.bfloat16:
        # Tensor cores: the gradient's terms are rounded independently, their sum is not.
        out.add_(torch.mm(gradient.to(weight.dtype), weight, out_dtype=torch.float32))
        return
    for start in range(0, weight.shape[0], _VOCAB_BLOCK):
        out.addmm_(gradient[:, start : start + _VOCAB_BLOCK], weight[start : start + _VOCAB_BLOCK].to(gradient.dtype))


def _student_logits(
    problem: DSparkProblem, hidden: Tensor, features: Tensor | None, feature_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(logits [t, Vl], d cap / dx [t, Vl] or None without a softcap)."""
    logits, slope = project(hidden, problem.head), None
    if problem.softcap is not None:
        ratio = logits.div_(problem.softcap).tanh_()
        slope = 1.0 - ratio * ratio
        logits = ratio.mul_(problem.softcap)
    if features is not None and feature_weight is not None:
        logits = project(features, feature_weight, out=logits)
    return logits, slope


def _max_and_sum(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, Σexp(logits - maximum) (0 for a shard of -inf only), and the column of the maximum."""
    maximum, column = logits.max(dim=-1)
    finite = maximum.where(maximum != -torch.inf, 0.0)
    return maximum, (logits - finite.unsqueeze(-1)).exp_().sum(dim=-1), column


class _Column:
    """Columns of the per-row statistics, all over the whole vocabulary.

    A probability is exp(logit - maximum) · inverse sum: subtracting the maximum first is exact for logits far from zero, where
    subtracting one rounded log-normalizer is not.
    """

    STUDENT_MAX, STUDENT_INVERSE, TEACHER_MAX, TEACHER_INVERSE, CROSS_ENTROPY, L1_DISTANCE, GRADIENT_MEAN = range(7)
    COUNT = 7


def _local_normalizers(problem: DSparkProblem, tile: slice, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """([t, 5] student max, teacher max, student sum, teacher sum, target logit; int64 [t, 2] argmax ids) of this rank's shard."""
    student_max, student_sum, student_column = _max_and_sum(student)
    teacher_max, teacher_sum, teacher_column = _max_and_sum(teacher)
    column, owned = problem.local_targets(tile)
    target = student.gather(1, column.unsqueeze(1)).squeeze(1).where(owned, 0.0)
    tokens = torch.stack([student_column, teacher_column], dim=1) + problem.vocab_start
    return torch.stack([student_max, teacher_max, student_sum, teacher_sum, target], dim=1), tokens


def _combine(problem: DSparkProblem, local: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Shard statistics of any number of rows -> ([t, 5] first columns of `_Column`, int64 [t, 2] argmax ids); 0 or 3 collectives."""
    maxima, sums = local[:, :2].clone(), local[:, 2:].clone()
    if problem.tp_group is not None:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=problem.tp_group)
        # A shard of -inf only has a sum of 0 and a maximum of -inf: exp(-inf) keeps it out.
        shift = local[:, :2] - maxima.where(maxima != -torch.inf, 0.0)
        sums[:, :2] = local[:, 2:4] * shift.exp()
        dist.all_reduce(sums, group=problem.tp_group)
        tokens = tokens.where(local[:, :2] == maxima, torch.iinfo(torch.int64).max)
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN, group=problem.tp_group)
    inverse = sums[:, :2].reciprocal()
    cross_entropy = sums[:, 0].log() + (maxima[:, 0] - sums[:, 2])
    return torch.stack([maxima[:, 0], inverse[:, 0], maxima[:, 1], inverse[:, 1], cross_entropy], dim=1), tokens


def _probabilities(logits: Tensor, maximum: Tensor, inverse: Tensor) -> Tensor:
    return (logits - maximum.unsqueeze(1)).exp_().mul_(inverse.unsqueeze(1))


def _both_probabilities(rows: Tensor, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    return (
        _probabilities(student, rows[:, _Column.STUDENT_MAX], rows[:, _Column.STUDENT_INVERSE]),
        _probabilities(teacher, rows[:, _Column.TEACHER_MAX], rows[:, _Column.TEACHER_INVERSE]),
    )


class DSparkSums(torch.autograd.Function):
    """(cross-entropy [B_], L1 distance [B_], overlap [T], student argmax [T], teacher argmax [T]); the last three detached."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, features: Tensor | None, feature_weight: Tensor | None, problem: DSparkProblem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        num_rows, dtype = len(problem.target_ids), problem.row_weights.dtype
        tiles = list(problem.tiles())
        kept: tuple[Tensor, Tensor | None] | None = None

        def logits(tile: slice) -> tuple[Tensor, Tensor]:
            nonlocal kept
            student = kept if kept is not None else _student_logits(problem, hidden[tile], _cut(features, tile), feature_weight)
            if len(tiles) == 1:
                kept = student
            return student[0], problem.teacher_logits(tile)

        rows = hidden.new_zeros(num_rows, _Column.COUNT, dtype=dtype)
        tokens = torch.zeros(num_rows, 2, dtype=torch.int64, device=hidden.device)
        if problem.tp_group is not None:
            local = hidden.new_zeros(num_rows, 5, dtype=dtype)
            for tile in tiles:
                local[tile], tokens[tile] = _local_normalizers(problem, tile, *logits(tile))
            rows[:, :5], tokens = _combine(problem, local, tokens)
        for tile in tiles:
            student, teacher = logits(tile)
            if problem.tp_group is None:
                rows[tile, :5], tokens[tile] = _combine(problem, *_local_normalizers(problem, tile, student, teacher))
            probabilities, difference = _both_probabilities(rows[tile], student, teacher)
            torch.sub(probabilities, difference, out=difference)
            rows[tile, _Column.GRADIENT_MEAN] = probabilities.mul_(difference.sign()).sum(dim=-1)
            rows[tile, _Column.L1_DISTANCE] = difference.abs_().sum(dim=-1)
        if problem.tp_group is not None:
            shared = rows[:, 5:].contiguous()
            dist.all_reduce(shared, group=problem.tp_group)
            rows[:, 5:] = shared
        sums = rows.new_zeros(2, problem.num_bins)
        sums[0].index_add_(0, problem.bin_ids, problem.row_weights * rows[:, _Column.CROSS_ENTROPY])
        sums[1].index_add_(0, problem.bin_ids, problem.row_weights * rows[:, _Column.L1_DISTANCE])
        overlap = (1.0 - 0.5 * rows[:, _Column.L1_DISTANCE]).clamp_(0.0, 1.0)
        ctx.problem, ctx.kept = problem, kept
        ctx.save_for_backward(hidden, features, feature_weight, rows)
        student_tokens, teacher_tokens = tokens.unbind(1)
        ctx.mark_non_differentiable(overlap, student_tokens, teacher_tokens)
        return sums[0].clone(), sums[1].clone(), overlap, student_tokens, teacher_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        problem: DSparkProblem = ctx.problem
        hidden, features, feature_weight, rows = ctx.saved_tensors
        width = hidden.shape[1] + (0 if features is None else features.shape[1])
        gradient_rows = rows.new_zeros(len(rows), width)
        weight_gradient = rows.new_zeros(feature_weight.shape) if ctx.needs_input_grad[2] else None
        ce_scale = problem.row_weights * upstream[0].to(rows.dtype)[problem.bin_ids]
        l1_scale = problem.row_weights * upstream[1].to(rows.dtype)[problem.bin_ids]
        for tile in problem.tiles():
            student, slope = ctx.kept or (None, None)
            if student is None:
                student, slope = _student_logits(problem, hidden[tile], _cut(features, tile), feature_weight)
            teacher = problem.teacher_logits(tile)
            probabilities, gradient = _both_probabilities(rows[tile], student, teacher)
            torch.sub(probabilities, gradient, out=gradient).sign_()
            gradient.sub_(rows[tile, _Column.GRADIENT_MEAN].unsqueeze(1))
            gradient.mul_(l1_scale[tile].unsqueeze(1)).add_(ce_scale[tile].unsqueeze(1)).mul_(probabilities)
            column, owned = problem.local_targets(tile)
            gradient.scatter_add_(1, column.unsqueeze(1), -(ce_scale[tile] * owned).unsqueeze(1))
            if features is not None and feature_weight is not None:
                back_project(gradient, feature_weight, gradient_rows[tile, hidden.shape[1] :])
                if weight_gradient is not None:
                    weight_gradient.addmm_(gradient.T, features[tile].to(rows.dtype))
            if slope is not None:
                gradient.mul_(slope)
            back_project(gradient, problem.head, gradient_rows[tile, : hidden.shape[1]])
        if problem.tp_group is not None:
            dist.all_reduce(gradient_rows, group=problem.tp_group)
        hidden_gradient = gradient_rows[:, : hidden.shape[1]].to(hidden.dtype)
        feature_gradient = None if features is None else gradient_rows[:, hidden.shape[1] :].to(features.dtype)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(feature_weight.dtype)
        return hidden_gradient, feature_gradient, weight_gradient, None


def _cut(tensor: Tensor | None, tile: slice) -> Tensor | None:
    return None if tensor is None else tensor[tile]
