"""A loss that is a sum over tiles of rows, with the gradient made in the forward pass.

The loss is one scalar, so its upstream gradient is one scalar too: each tile's gradient can be made while its logits exist and only
be rescaled in backward. Logits are made once (three matmuls a tile, as a dense loss has), and no tile outlives its turn.

Shapes: R rows of a tile, C columns the term compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.gradients import GradientBuffers
from xtok.losses.cross_tokenizer.logits import LogitsSource

__all__ = ["TileTerm", "tiled_loss"]


class TileTerm(Protocol):
    """One loss as a sum over tiles."""

    @property
    def columns(self) -> Tensor | None:
        """Columns of this shard the term reads (int64), None = all that mean a token."""

    def tiles(self) -> Iterable[tuple[Tensor, Any]]:
        """(rows int64 `[R]` of the student, whatever `tile_loss` needs): the same number of tiles on every rank of a tp group."""

    def tile_loss(self, logits: Tensor, tile: Any) -> Tensor:
        """Unnormalized loss of a tile, a scalar differentiable in `logits` `[R, C]`; equal on every rank of a tp group."""


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, source: LogitsSource, term: TileTerm) -> Tensor:
        needs = bool(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[1])
        buffers = (
            GradientBuffers(source, needs_values=needs[0], needs_weight=needs[1], columns=term.columns) if any(needs) else None
        )
        total = torch.zeros((), dtype=torch.float64, device=source.device)
        for rows, tile in term.tiles():
            logits = source.rows(rows, term.columns)
            with torch.enable_grad():
                logits.requires_grad_(buffers is not None)
                loss = term.tile_loss(logits, tile)
            total += loss.detach()
            if buffers is not None:
                (gradient,) = torch.autograd.grad(loss, logits)
                buffers.add(rows, gradient, term.columns)
        ctx.buffers = buffers
        return total.to(source.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        buffers: GradientBuffers = ctx.buffers
        values, weight = buffers.finish(gradients[0])
        return values, weight, None, None


def tiled_loss(source: LogitsSource, term: TileTerm) -> Tensor:
    """Sum of the term's tile losses: a scalar with gradient to the student's logits (or hidden states and head)."""
    values, weight = source.tensors()
    return _TiledLoss.apply(values, weight, source, term)  # type: ignore[no-any-return,no-untyped-call]
