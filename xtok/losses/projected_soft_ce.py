"""Soft cross-entropy straight from hidden rows: tiles of logits are made, measured, turned into gradient and dropped.

Shapes: n supervised rows, c rows of a tile (`token_chunk_size`), V vocabulary columns of this rank, H hidden size, B bins.

The upstream gradient of a row is one scalar, its bin's. So the row's hidden gradient (softmax(s) - softmax(t)) @ head is made in the
forward, while its tile is there, and backward only rescales it: two matmuls a tile, and the [n, V] logits never exist.

    one rank               tile: matmul, softmaxes and difference in place a few rows at a time, matmul    2 matmuls, n*H buffer
    sharded, one tile      both exponentials wait for the gather of the row statistics                     2 matmuls, n*H buffer
    sharded, many tiles    sum(exp(s-m) * W) and sum(exp(t-k) * W) apart: the normalizers come last        3 matmuls, two buffers

Collectives: one gather of [n, 5] in the forward, one sum of the [n, H] gradient in the backward, whatever the number of tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtok.losses.soft_ce import (
    NUM_STATISTICS,
    Supervision,
    combine_row_statistics,
    is_tensor_parallel,
    measure_and_exponentiate_,
    negative_difference_,
    softmax_difference_,
)
from xtok.losses.stats import sum_by_bin
from xtok.losses.tiles import FrozenHead, Parts, RowSource, elementwise_block_rows, row_slices, slice_rows

__all__ = ["ProjectedVocabParallelSoftCE"]


class _Problem(NamedTuple):
    """What every route needs: the head, where hidden and teacher rows come from, and the sizes."""

    head: FrozenHead
    hidden: RowSource
    teacher: RowSource
    num_rows: int
    hidden_size: int
    tile_rows: int
    with_gradient: bool

    def new_rows(self, num_columns: int) -> Tensor:
        weight = self.head.weight
        return torch.empty(self.num_rows, num_columns, dtype=self.head.dtype, device=weight.device)

    def block_rows(self) -> int:
        return min(self.tile_rows, elementwise_block_rows(self.head.weight.shape[0], self.head.weight.device))

    def projection(self, rows: slice, logits: Parts) -> Callable[[], None]:
        """What writes the student's logits of `rows` into `logits` once more."""
        return lambda: self.head.project_(self.hidden.take(rows), logits)


class _RowResults(NamedTuple):
    """cross_entropy [n] and, when wanted, the unscaled hidden gradient of each row on this rank, [n, H]."""

    cross_entropy: Tensor
    hidden_gradient: Tensor | None


class ProjectedVocabParallelSoftCE(torch.autograd.Function):
    """Sums per bin [B] of scale * cross-entropy of hidden @ head.T; gradient to hidden alone, in its dtype.

    student_hidden [..., H]; output_weight [V, H]; teacher_logits [..., V]; supervision.rows numbers the hidden rows and
    teacher_rows int64 [n] (None: all in order) the teacher rows beside them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: Tensor,
        output_weight: Tensor,
        teacher_logits: Tensor,
        supervision: Supervision,
        teacher_rows: Tensor | None,
        token_chunk_size: int,
        tp_group: dist.ProcessGroup | None,
        with_gradient: bool,
    ) -> Tensor:
        num_rows = supervision.scale.numel()
        problem = _Problem(
            head=FrozenHead(output_weight),
            hidden=RowSource(student_hidden.detach(), supervision.rows),
            teacher=RowSource(teacher_logits.detach(), teacher_rows),
            num_rows=num_rows,
            hidden_size=student_hidden.shape[-1],
            tile_rows=min(num_rows, token_chunk_size),
            with_gradient=with_gradient,
        )
        # Autocast would round the logits of fp32 inputs to bf16.
        with torch.autocast(student_hidden.device.type, enabled=False):
            if num_rows == 0:
                results = _RowResults(supervision.scale.new_zeros(0), problem.new_rows(problem.hidden_size))
            elif not is_tensor_parallel(tp_group):
                results = _one_rank(problem)
            elif num_rows <= token_chunk_size:
                results = _sharded_one_tile(problem, tp_group)
            else:
                results = _sharded_many_tiles(problem, tp_group)
        ctx.shape, ctx.dtype, ctx.supervision = student_hidden.shape, student_hidden.dtype, supervision
        ctx.tp_group, ctx.tile_rows = tp_group, max(1, problem.tile_rows)
        if with_gradient:
            ctx.save_for_backward(results.hidden_gradient)
        return sum_by_bin(results.cross_entropy * supervision.scale, supervision.bin_ids, supervision.num_bins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, numerator_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (row_gradient,) = ctx.saved_tensors
        supervision: Supervision = ctx.supervision
        upstream = (numerator_gradient[supervision.bin_ids] * supervision.scale).unsqueeze(-1)
        summed = None
        if is_tensor_parallel(ctx.tp_group) and upstream.numel():
            summed = row_gradient * upstream
            dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=ctx.tp_group)
            if supervision.rows is None and summed.dtype == ctx.dtype:
                return summed.view(ctx.shape), None, None, None, None, None, None, None
        make = torch.empty if supervision.rows is None else torch.zeros
        gradient = make(ctx.shape, dtype=ctx.dtype, device=row_gradient.device)
        matrix = gradient.view(-1, ctx.shape[-1])
        for rows in row_slices(upstream.shape[0], ctx.tile_rows):
            scaled = row_gradient[rows] * upstream[rows] if summed is None else summed[rows]
            if supervision.rows is None:
                matrix[rows] = scaled.to(ctx.dtype)
            else:
                matrix.index_copy_(0, supervision.rows[rows], scaled.to(ctx.dtype))
        return gradient, None, None, None, None, None, None, None


def _one_rank(problem: _Problem) -> _RowResults:
    """Whole vocabulary here: a tile is finished, gradient included, before the next begins; the teacher is widened a few rows at
    a time and never stored."""
    head, block_rows = problem.head, problem.block_rows()
    student_tile = head.new_tile(problem.tile_rows)
    teacher_block, scratch = head.new_rows(block_rows), head.new_rows(block_rows)
    statistics = problem.new_rows(NUM_STATISTICS)
    gradient = problem.new_rows(problem.hidden_size) if problem.with_gradient else None
    for tile in row_slices(problem.num_rows, problem.tile_rows):
        logits = slice_rows(student_tile, slice(0, tile.stop - tile.start))
        head.project_(problem.hidden.take(tile), logits)
        for block in row_slices(tile.stop - tile.start, block_rows):
            rows = slice(tile.start + block.start, tile.start + block.stop)
            used = slice(0, block.stop - block.start)
            student, teacher_exp = slice_rows(logits, block), head.layout.split(teacher_block[used])
            teacher, products = head.layout.split(problem.teacher.read(rows, scratch)), head.layout.split(scratch[used])
            measure_and_exponentiate_(
                student, teacher, teacher_exp, products, statistics[rows], problem.projection(rows, student)
            )
            if gradient is not None:
                negative_difference_(student, teacher_exp, statistics[rows])
        if gradient is not None:
            head.pull_back_(logits, gradient[tile], -statistics[tile, 3].reciprocal())
    cross_entropy = combine_row_statistics(statistics, None).cross_entropy
    return _RowResults(cross_entropy, gradient)


def _measure_tile_(
    problem: _Problem, tile: slice, student: Parts, teacher_exp: Parts, scratch: Tensor, statistics: Tensor
) -> None:
    """Project one tile, then exponentiate its student and teacher logits a few rows at a time.

    scratch [block rows, V] is overwritten; the statistics [c, 5] of the tile's rows are written.
    """
    problem.head.project_(problem.hidden.take(tile), student)
    for block in row_slices(tile.stop - tile.start, problem.block_rows()):
        rows = slice(tile.start + block.start, tile.start + block.stop)
        logits, layout = slice_rows(student, block), problem.head.layout
        measure_and_exponentiate_(
            logits,
            layout.split(problem.teacher.read(rows, scratch)),
            slice_rows(teacher_exp, block),
            layout.split(scratch[: block.stop - block.start]),
            statistics[block],
            problem.projection(rows, logits),
        )


def _sharded_one_tile(problem: _Problem, tp_group: dist.ProcessGroup | None) -> _RowResults:
    """All rows fit one tile: keep both exponentials until the normalizers are known."""
    student, teacher = problem.head.new_tile(problem.num_rows), problem.head.new_tile(problem.num_rows)
    statistics = problem.new_rows(NUM_STATISTICS)
    scratch = problem.head.new_rows(problem.block_rows())
    _measure_tile_(problem, slice(0, problem.num_rows), student, teacher, scratch, statistics)
    combined = combine_row_statistics(statistics, tp_group)
    if not problem.with_gradient:
        return _RowResults(combined.cross_entropy, None)
    softmax_difference_(student, teacher, combined.student_scale, combined.teacher_scale)
    gradient = problem.new_rows(problem.hidden_size)
    problem.head.pull_back_(student, gradient)
    return _RowResults(combined.cross_entropy, gradient)


def _sharded_many_tiles(problem: _Problem, tp_group: dist.ProcessGroup | None) -> _RowResults:
    """Student and teacher halves of the gradient apart; they share a tile, so that one matmul pulls both back."""
    both, scratch = problem.head.new_tile(2 * problem.tile_rows), problem.head.new_rows(problem.block_rows())
    statistics = problem.new_rows(NUM_STATISTICS)
    halves = [problem.new_rows(problem.hidden_size) for _ in range(2)] if problem.with_gradient else []
    pulled = statistics.new_empty(2 * problem.tile_rows if halves else 0, problem.hidden_size)
    for tile in row_slices(problem.num_rows, problem.tile_rows):
        size = tile.stop - tile.start
        student, teacher = slice_rows(both, slice(0, size)), slice_rows(both, slice(size, 2 * size))
        _measure_tile_(problem, tile, student, teacher, scratch, statistics[tile])
        if halves:
            problem.head.pull_back_(slice_rows(both, slice(0, 2 * size)), pulled[: 2 * size])
            halves[0][tile], halves[1][tile] = pulled[:size], pulled[size : 2 * size]
    combined = combine_row_statistics(statistics, tp_group)
    if not halves:
        return _RowResults(combined.cross_entropy, None)
    gradient = halves[0].mul_(combined.student_scale.unsqueeze(-1))
    gradient.addcmul_(halves[1], combined.teacher_scale.unsqueeze(-1), value=-1.0)
    return _RowResults(combined.cross_entropy, gradient)
