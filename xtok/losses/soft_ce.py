"""Soft cross-entropy of student logits against teacher logits, tile by tile, over a vocabulary that may be sharded.

Shapes: n supervised rows, r rows of a block, V vocabulary columns of this rank, W tensor-parallel ranks, B bins.

Each rank measures its own columns against its own maxima; five numbers a row are all that ranks exchange, once:
    student max m, sum(exp(s - m)), teacher max k, sum(exp(t - k)), half the mean of (s - m) under softmax(t)
The cross-entropy follows as log(Z) - mean with everything measured from the global maxima, so that a constant added to all logits
of a row cancels exactly. A term 0 * (-inf) counts as 0; a teacher with mass where the student has none gives +inf. Logits so far
apart that s - m leaves the dtype (3e38 beside -3e38) are measured by halves, which always fit: the loss is +inf only where its own
value does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtok.losses.stats import sum_by_bin
from xtok.losses.tiles import (
    Parts,
    RowSource,
    elementwise_block_rows,
    row_amax,
    row_slices,
    row_sum,
)

__all__ = [
    "CombinedRows",
    "Supervision",
    "VocabParallelSoftCE",
    "combine_row_statistics",
    "is_tensor_parallel",
    "measure_and_exponentiate_",
    "negative_difference_",
    "softmax_difference_",
]

NUM_STATISTICS = 5


class Supervision(NamedTuple):
    """The rows that count. rows: int64 [n] flat row numbers, None for all; scale: [n] mask values; bin_ids: int64 [n]."""

    rows: Tensor | None
    scale: Tensor
    bin_ids: Tensor
    num_bins: int


class CombinedRows(NamedTuple):
    """Per row [n]: cross-entropy, and what turns this rank's exp(s - m) and exp(t - k) into global probabilities."""

    cross_entropy: Tensor
    student_scale: Tensor
    teacher_scale: Tensor


def is_tensor_parallel(tp_group: dist.ProcessGroup | None) -> bool:
    """True when the vocabulary is spread over more than one rank."""
    return tp_group is not None and dist.get_world_size(tp_group) > 1


def finite_maximum(maximum: Tensor) -> Tensor:
    """A row of -inf alone (padding columns of one shard) is measured from 0, so that exp gives 0 and not NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def measure_and_exponentiate_(
    student: Parts,
    teacher: Parts,
    teacher_exp: Parts,
    scratch: Parts,
    statistics: Tensor,
    restore_student_: Callable[[], object],
) -> None:
    """student := exp(s - m) in place, teacher_exp := exp(t - k); the five numbers of each row go to `statistics` [r, 5].

    All are [blocks, r, columns] in one layout and in the compute dtype. `teacher` is only read, and may be `scratch`, which is
    overwritten. `restore_student_` writes the student's logits into `student` again; it is called where a difference of logits may
    have overflowed.
    """
    student_max, student_sum, teacher_max, teacher_sum, half_mean = statistics.unbind(-1)
    teacher_origin = finite_maximum(row_amax(teacher, out=teacher_max)).unsqueeze(-1)
    for teacher_part, exp_part in zip(teacher, teacher_exp, strict=True):
        torch.sub(teacher_part, teacher_origin, out=exp_part).exp_()
    row_sum(teacher_exp, out=teacher_sum)
    student_origin = finite_maximum(row_amax(student, out=student_max)).unsqueeze(-1)
    for student_part, exp_part, product in zip(student, teacher_exp, scratch, strict=True):
        torch.mul(student_part.sub_(student_origin), exp_part, out=product)
    if math.isfinite(row_sum(scratch, out=half_mean).sum().item()):
        half_mean.mul_(0.5).div_(teacher_sum)
    else:
        _measure_non_finite_(student, student_origin, teacher_exp, scratch, teacher_sum, half_mean, restore_student_)
    for student_part in student:
        student_part.exp_()
    row_sum(student, out=student_sum)


def _measure_non_finite_(
    student: Parts,
    student_origin: Tensor,
    teacher_exp: Parts,
    scratch: Parts,
    teacher_sum: Tensor,
    half_mean: Tensor,
    restore_student_: Callable[[], object],
) -> None:
    """Write half the mean [r] of s - m under the teacher once more, where a product (s - m) * exp(t - k) in `scratch` is not finite.

    Either it is 0 * (-inf), which counts as 0, or a real NaN, which stays: it is in the row's maximum, hence in every weight. Or
    s - m, or its weighted sum, does not fit the dtype: s / 2 - m / 2 always fits, and so does its mean. -inf where the student has
    none of the teacher's mass.
    """
    for product, exp_part in zip(scratch, teacher_exp, strict=True):
        product.masked_fill_(exp_part == 0, 0.0)
    if not bool(row_sum(scratch, out=half_mean).isinf().any()):
        half_mean.mul_(0.5).div_(teacher_sum)
        return
    restore_student_()
    for student_part, exp_part, product in zip(student, teacher_exp, scratch, strict=True):
        torch.mul(student_part, 0.5, out=product).sub_(student_origin * 0.5).mul_(exp_part / teacher_sum.unsqueeze(-1))
        product.masked_fill_(exp_part == 0, 0.0)
        student_part.sub_(student_origin)
    row_sum(scratch, out=half_mean)


def softmax_difference_(student: Parts, teacher: Parts, student_scale: Tensor, teacher_scale: Tensor) -> None:
    """student := softmax(s) - softmax(t) in place, from what `measure_and_exponentiate_` left; scales are [r]."""
    for student_part, teacher_part in zip(student, teacher, strict=True):
        student_part.mul_(student_scale.unsqueeze(-1)).addcmul_(teacher_part, teacher_scale.unsqueeze(-1), value=-1.0)


def negative_difference_(student: Parts, teacher: Parts, statistics: Tensor) -> None:
    """student := sum(exp(t - k)) * (softmax(t) - softmax(s)) in place, from what `measure_and_exponentiate_` left where one rank has
    the whole vocabulary: one pass instead of two, and what is left to scale is a row of the hidden gradient."""
    _, student_sum, _, teacher_sum, _ = statistics.unbind(-1)
    # The largest term of a sum is exp(0): only a row of -inf alone has less than 1, it has no softmax and its share is 0.
    student_scale = (teacher_sum / student_sum.clamp(min=1.0)).unsqueeze(-1)
    for student_part, teacher_part in zip(student, teacher, strict=True):
        torch.addcmul(teacher_part, student_part, student_scale, value=-1.0, out=student_part)


def combine_row_statistics(statistics: Tensor, tp_group: dist.ProcessGroup | None) -> CombinedRows:
    """Join the five numbers of each row [n, 5] over the ranks of `tp_group`: one gather, then the same arithmetic on every rank."""
    if not is_tensor_parallel(tp_group):
        _, student_total, _, teacher_total, half_mean = statistics.unbind(-1)
        return _combined(student_total, teacher_total, half_mean, 1.0, 1.0)
    gathered = statistics.new_empty(dist.get_world_size(tp_group), *statistics.shape)
    dist.all_gather(list(gathered.unbind(0)), statistics.contiguous(), group=tp_group)
    student_max, student_sum, teacher_max, teacher_sum, half_mean = gathered.unbind(-1)
    student_origin = finite_maximum(student_max.amax(dim=0))
    student_share = (student_max - student_origin).exp()
    teacher_share = (teacher_max - finite_maximum(teacher_max.amax(dim=0))).exp()
    student_total, teacher_total = (student_share * student_sum).sum(dim=0), (teacher_share * teacher_sum).sum(dim=0)
    moved = half_mean + (finite_maximum(student_max) * 0.5 - student_origin * 0.5)
    # A shard whose whole teacher mass underflows beside another's is as absent as a column whose probability underflows.
    weight = teacher_share * teacher_sum / teacher_total
    total = (weight * moved).masked_fill(weight == 0, 0.0).sum(dim=0)
    rank = dist.get_rank(tp_group)
    return _combined(student_total, teacher_total, total, student_share[rank], teacher_share[rank])


def _combined(
    student_total: Tensor, teacher_total: Tensor, half_mean: Tensor, student_share: Tensor | float, teacher_share: Tensor | float
) -> CombinedRows:
    cross_entropy = (student_total.log() - 2.0 * half_mean).masked_fill_(half_mean == -torch.inf, torch.inf)
    # A student row of -inf alone has no softmax; its share of the gradient is 0.
    student_scale = (student_share / student_total).masked_fill_(student_total == 0, 0.0)
    return CombinedRows(cross_entropy, student_scale, teacher_share / teacher_total)


class VocabParallelSoftCE(torch.autograd.Function):
    """Sums per bin [B] of scale * cross-entropy of [..., V] student logits; gradient in the student's dtype, none to the teacher.

    Up to `token_chunk_size` supervised rows keep softmax(s) - softmax(t) for the backward; more rows keep four numbers a row and
    compute their tiles again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        teacher_logits: Tensor,
        supervision: Supervision,
        token_chunk_size: int,
        tp_group: dist.ProcessGroup | None,
        with_gradient: bool,
    ) -> Tensor:
        student, teacher = RowSource(student_logits, supervision.rows), RowSource(teacher_logits, supervision.rows)
        num_rows, vocab_size = supervision.scale.numel(), student_logits.shape[-1]
        keep = with_gradient and num_rows <= token_chunk_size
        block_rows = min(token_chunk_size, elementwise_block_rows(vocab_size, student_logits.device))
        tiles = supervision.scale.new_empty(2, 1, num_rows if keep else min(num_rows, block_rows), vocab_size)
        scratch = supervision.scale.new_empty(1, min(num_rows, block_rows), vocab_size)
        statistics = supervision.scale.new_empty(num_rows, NUM_STATISTICS)
        for rows in row_slices(num_rows, block_rows):
            place = rows if keep else slice(0, rows.stop - rows.start)
            student_tile, teacher_tile = tiles[0, :, place], tiles[1, :, place]
            write_student_ = partial(_copy_rows_, student, rows, student_tile[0])
            write_student_()
            products = scratch[:, : rows.stop - rows.start]
            teacher_rows = teacher.read(rows, scratch[0]).unsqueeze(0)
            measure_and_exponentiate_(
                (student_tile,), (teacher_rows,), (teacher_tile,), (products,), statistics[rows], write_student_
            )
        combined = combine_row_statistics(statistics, tp_group)
        ctx.shape, ctx.dtype, ctx.supervision = student_logits.shape, student_logits.dtype, supervision
        ctx.block_rows, ctx.keep = block_rows, keep
        if keep:
            softmax_difference_((tiles[0],), (tiles[1],), combined.student_scale, combined.teacher_scale)
            ctx.save_for_backward(tiles[0, 0])
        elif with_gradient:
            ctx.save_for_backward(student_logits, teacher_logits, statistics, combined.student_scale, combined.teacher_scale)
        return sum_by_bin(combined.cross_entropy * supervision.scale, supervision.bin_ids, supervision.num_bins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, numerator_gradient: Tensor) -> tuple[Tensor | None, ...]:
        supervision: Supervision = ctx.supervision
        upstream = (numerator_gradient[supervision.bin_ids] * supervision.scale).unsqueeze(-1)
        make = torch.empty if supervision.rows is None else torch.zeros
        gradient = make(ctx.shape, dtype=ctx.dtype, device=upstream.device)
        matrix = gradient.view(-1, ctx.shape[-1])
        difference = _kept_differences(ctx) if ctx.keep else _recomputed_differences(ctx)
        for rows in row_slices(upstream.shape[0], ctx.block_rows):
            row_gradient = (difference(rows) * upstream[rows]).to(ctx.dtype)
            if supervision.rows is None:
                matrix[rows] = row_gradient
            else:
                matrix.index_copy_(0, supervision.rows[rows], row_gradient)
        return gradient, None, None, None, None, None


def _copy_rows_(source: RowSource, rows: slice, out: Tensor) -> None:
    out.copy_(source.take(rows))


def _kept_differences(ctx: Any) -> Callable[[slice], Tensor]:
    (kept,) = ctx.saved_tensors

    def difference(rows: slice) -> Tensor:
        return kept[rows]  # type: ignore[no-any-return]

    return difference


def _recomputed_differences(ctx: Any) -> Callable[[slice], Tensor]:
    student_logits, teacher_logits, statistics, student_scale, teacher_scale = ctx.saved_tensors
    student, teacher = RowSource(student_logits, ctx.supervision.rows), RowSource(teacher_logits, ctx.supervision.rows)
    student_origin = finite_maximum(statistics[:, 0]).unsqueeze(-1)
    teacher_origin = finite_maximum(statistics[:, 2]).unsqueeze(-1)

    def difference(rows: slice) -> Tensor:
        student_rows = (student.take(rows).to(statistics.dtype) - student_origin[rows]).exp_()
        teacher_rows = (teacher.take(rows).to(statistics.dtype) - teacher_origin[rows]).exp_()
        softmax_difference_((student_rows[None],), (teacher_rows[None],), student_scale[rows], teacher_scale[rows])
        return student_rows

    return difference
