"""Unreduced loss sums: numerators and counts per bin, divided once, after every rank has added its own.

Shapes: B bins (passes of a recurrent draft, or slots of a block).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xtok.losses.argument_checks import check_real, require_tensors

__all__ = ["DraftLossStats", "sum_by_bin"]

_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class DraftLossStats:
    """Raw draft-loss reductions with one entry per pass or block slot.

    numerators: [B], differentiable sums of mask * cross-entropy, in nats.
    counts: [B], detached sums of the mask on this rank alone.
    weights: [B], detached weight of each bin in `normalized`.
    All three are fp32, or fp64 when the student's inputs are fp64. Raises ValueError unless they are 1-D and of one shape, TypeError
    for what is no tensor.
    """

    numerators: Tensor
    counts: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        require_tensors(numerators=self.numerators, counts=self.counts, weights=self.weights)
        shapes = {name: tuple(getattr(self, name).shape) for name in ("numerators", "counts", "weights")}
        if len(set(shapes.values())) != 1 or self.numerators.ndim != 1:
            raise ValueError(f"DraftLossStats needs numerators, counts and weights as vectors of one length, got shapes {shapes}")

    def normalized(self, *, normalization_counts: Tensor) -> Tensor:
        """Scalar loss: sum(numerators * weights) / (sum(normalization_counts * weights) + 1e-8).

        normalization_counts: [B], integer or floating: `counts` summed by the caller over data- and context-parallel ranks (and
        over the micro-batches of one optimizer step). When all are zero there was no supervised token anywhere: the result is 0
        with zero gradient. Raises ValueError when its shape is not that of `counts`, TypeError for a complex or no tensor.
        """
        require_tensors(normalization_counts=normalization_counts)
        check_real(normalization_counts=normalization_counts)
        if normalization_counts.shape != self.counts.shape:
            raise ValueError(
                f"normalization_counts has shape {tuple(normalization_counts.shape)}, but there are {self.counts.numel()} bins: "
                f"pass `counts` (shape {tuple(self.counts.shape)}) summed over ranks"
            )
        counts = normalization_counts.detach().to(self.weights)
        loss = (self.numerators * self.weights).sum() / ((counts * self.weights).sum() + _EPSILON)
        return torch.where((counts == 0).all(), torch.zeros_like(loss), loss)


def sum_by_bin(values: Tensor, bin_ids: Tensor, num_bins: int) -> Tensor:
    """Sum `values` [n] into `num_bins` bins by `bin_ids` int64 [n]; a bin that nothing falls into is 0."""
    return values.new_zeros(num_bins).index_add_(0, bin_ids, values)
