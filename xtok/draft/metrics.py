"""Metrics of drafts as unreduced pairs: sums over micro-batches and ranks first, one division at the end.

A mean of means weighs a rank with two supervised slots like one with two thousand; a pair (numerator, denominator) cannot.

Shapes: N blocks, K block slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["MetricSum", "acceptance_metrics", "add_metrics", "reduce_metrics"]


@dataclass(frozen=True, slots=True)
class MetricSum:
    """An unreduced ratio; numerator and denominator are detached fp64 of one shape ([] or [K])."""

    numerator: Tensor
    denominator: Tensor

    def __post_init__(self) -> None:
        if self.numerator.shape != self.denominator.shape:
            raise ValueError(f"numerator {tuple(self.numerator.shape)} and denominator {tuple(self.denominator.shape)} differ")

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(self.numerator + other.numerator, self.denominator + other.denominator)

    def value(self) -> Tensor:
        """The ratio; NaN where nothing was counted."""
        return self.numerator / self.denominator


def acceptance_metrics(*, accept: Tensor, eval_mask: Tensor, first_supervised_slot: int = 0) -> dict[str, MetricSum]:
    """Acceptance by slot and expected accepted length.

    Args:
        accept: [..., K] probability (or 0/1) that the target accepts the slot's draft, given that it accepted all before it;
            read only where `eval_mask` is True.
        eval_mask: bool [..., K], a contiguous prefix of each block from `first_supervised_slot` on.
        first_supervised_slot: slots before it draft nothing and are left out.

    Returns:
        "acceptance_by_slot": [K - first_supervised_slot], over supervised slots.
        "tau": scalar, tau = 1 + Σ_k Π_{j<=k} accept_j a block (the 1 is the target's own token), over blocks with a supervised
        slot. A block cut short by the end of its row or answer counts what it has.

    Raises:
        ValueError: shapes differ, or a first supervised slot outside the block.
    """
    if accept.shape != eval_mask.shape or accept.ndim < 1:
        raise ValueError(f"accept {tuple(accept.shape)} and eval_mask {tuple(eval_mask.shape)} must be one shape [..., K]")
    num_slots = accept.shape[-1]
    if not 0 <= first_supervised_slot <= num_slots:
        raise ValueError(f"first_supervised_slot is {first_supervised_slot}, must be within 0..{num_slots}, the slots of a block")
    mask = eval_mask.detach().reshape(-1, num_slots)[:, first_supervised_slot:].bool()
    # where() before anything else: an unsupervised slot may hold NaN.
    rates = accept.detach().to(torch.float64).reshape(-1, num_slots)[:, first_supervised_slot:].where(mask, 0.0)
    in_block = mask.any(dim=-1).to(torch.float64)
    lengths = in_block * (1.0 + rates.cumprod(dim=-1).sum(dim=-1))
    return {
        "acceptance_by_slot": MetricSum(rates.sum(dim=0), mask.to(torch.float64).sum(dim=0)),
        "tau": MetricSum(lengths.sum(), in_block.sum()),
    }


def add_metrics(first: Mapping[str, MetricSum], second: Mapping[str, MetricSum]) -> dict[str, MetricSum]:
    """Sum two micro-batches' metrics; a metric that only one of them has is kept."""
    total = dict(first)
    for name, metric in second.items():
        total[name] = total[name] + metric if name in total else metric
    return total


def reduce_metrics(metrics: Mapping[str, MetricSum], group: dist.ProcessGroup | None = None) -> dict[str, MetricSum]:
    """Sum metrics over the ranks of `group` (None: the default group) in one all-reduce; every rank must hold the same names."""
    if not metrics:
        return {}
    names = sorted(metrics)
    parts = [part.reshape(-1) for name in names for part in (metrics[name].numerator, metrics[name].denominator)]
    packed = torch.cat(parts)
    dist.all_reduce(packed, group=group)
    split = torch.split(packed, [len(part) for part in parts])
    shapes = [metrics[name].numerator.shape for name in names]
    return {
        name: MetricSum(split[2 * i].reshape(shape), split[2 * i + 1].reshape(shape))
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }
