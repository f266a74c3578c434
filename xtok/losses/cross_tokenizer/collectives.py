"""Collectives over the vocabulary shards of the student, differentiable where the loss needs it. All are no-ops without a group.

Where every rank goes on with a sum and computes the same loss from it, the gradient of a rank's own part is the upstream gradient itself.
Where a sum is put back into a rank's own columns (a normalizer), each rank holds a part of the gradient, and backward sums the parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SumHiddenGradient", "gather_last_dim", "max_over_shards", "shard_start", "sum_over_shards"]


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, used_by_columns: bool) -> Tensor:
        ctx.group = group if used_by_columns else None
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] if ctx.group is None else _sum(gradients[0], ctx.group), None, None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        ctx.start, ctx.width = dist.get_rank(group) * part.shape[-1], part.shape[-1]
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.start, ctx.width), None


class SumHiddenGradient(torch.autograd.Function):
    """Identity forward; backward sums the hidden gradient over the shards, in float32 or better. One collective."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        total = gradient.double() if gradient.dtype == torch.float64 else gradient.float()
        total = total.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group)
        return total.to(gradient.dtype), None


def sum_over_shards(part: Tensor, group: dist.ProcessGroup | None, *, used_by_columns: bool = False) -> Tensor:
    """Sum of every rank's `part`; gradient to the own part. `used_by_columns`: the sum goes back into each rank's own columns."""
    if group is None:
        return part
    return _SumOverShards.apply(part, group, used_by_columns)  # type: ignore[no-any-return,no-untyped-call]


def max_over_shards(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Largest of every rank's `part`; no gradient."""
    part = part.detach()
    if group is not None:
        part = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group)
    return part


def gather_last_dim(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's `part` (equal shapes) side by side on the last dim; gradient to the own part."""
    if group is None:
        return part
    return _GatherLastDim.apply(part, group)  # type: ignore[no-any-return,no-untyped-call]


def shard_start(num_columns: int, group: dist.ProcessGroup | None, device: torch.device) -> tuple[int, int]:
    """(first global column of this rank, columns of all ranks together) for contiguous, possibly uneven shards."""
    if group is None:
        return 0, num_columns
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = num_columns
    dist.all_reduce(sizes, op=dist.ReduceOp.SUM, group=group)
    return int(sizes[: dist.get_rank(group)].sum()), int(sizes.sum())
