"""Where tiles of logits gradients go: into a logits gradient, or through the head into hidden states and the head itself.

Shapes: R rows, C columns of a tile; H hidden size; V columns of this shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.logits import LogitsSource

__all__ = ["GradientBuffers"]

HEAD_BLOCK = 8192


class GradientBuffers:
    """Sums tiles of d loss / d logits. Hidden and head gradients are summed in float32 (float64), then cast to the input's dtype.

    columns: the only columns any tile touches (this shard's numbers), or None for all; then the head's buffer has those rows alone.
    """

    def __init__(self, source: LogitsSource, *, needs_values: bool, needs_weight: bool, columns: Tensor | None = None) -> None:
        self.source = source
        self.columns = columns
        self._given_away = False
        self.values: Tensor | None = None
        self.weight: Tensor | None = None
        flat = source.values.flatten(0, 1)
        if needs_values:
            dtype = source.values.dtype if source.weight is None else source.dtype
            self.values = torch.zeros(flat.shape, dtype=dtype, device=flat.device)
        if needs_weight and source.weight is not None:
            num_rows = source.num_columns if columns is None else columns.shape[0]
            self.weight = torch.zeros(num_rows, source.weight.shape[1], dtype=source.dtype, device=flat.device)

    def add(self, rows: Tensor, gradient: Tensor, columns: Tensor | None) -> None:
        """Add one tile: `gradient` `[R, C]` of the logits of `rows`; no row is given twice."""
        source = self.source
        if source.weight is None:
            if self.values is not None:
                self._add_logits(rows, gradient, columns)
            return
        if self.values is not None:
            self.values[rows] += _times_head(gradient, source.head(columns))
        if self.weight is not None:
            hidden = source.values.detach().flatten(0, 1).index_select(0, rows).to(source.dtype)
            self.weight.addmm_(gradient.T, hidden)

    def _add_logits(self, rows: Tensor, gradient: Tensor, columns: Tensor | None) -> None:
        assert self.values is not None
        if columns is None:
            self.values[rows, : self.source.num_columns] = gradient.to(self.values.dtype)
        else:
            self.values[rows[:, None], columns[None, :]] = gradient.to(self.values.dtype)

    def finish(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gradients in the inputs' shapes and dtypes, times `scale`. The buffers are given away: a second call raises RuntimeError."""
        if self._given_away:
            raise RuntimeError(
                "the gradient of this loss was already taken: backward through it works once (compute the loss again)"
            )
        self._given_away = True
        values, weight = self.values, self.weight
        self.values = self.weight = None
        for gradient in (values, weight):
            if gradient is not None and scale is not None:
                gradient.mul_(scale.to(gradient.dtype))
        if values is not None:
            values = values.to(self.source.values.dtype).view(self.source.values.shape)
        return values, None if weight is None else self._whole_head(weight)

    def _whole_head(self, part: Tensor) -> Tensor:
        """The head's gradient in its own shape; the buffer itself where it has that shape already."""
        head = self.source.weight
        assert head is not None
        if self.columns is None and part.shape == head.shape:
            return part.to(head.dtype)
        whole = torch.zeros_like(head)
        whole[slice(part.shape[0]) if self.columns is None else self.columns] = part.to(head.dtype)
        return whole


def _times_head(gradient: Tensor, head: Tensor) -> Tensor:
    """`gradient @ head` in the gradient's dtype, a half-precision head widened block by block."""
    if head.dtype == gradient.dtype:
        return gradient @ head
    out = torch.zeros(gradient.shape[0], head.shape[1], dtype=gradient.dtype, device=gradient.device)
    for at in range(0, head.shape[0], HEAD_BLOCK):
        out.addmm_(gradient[:, at : at + HEAD_BLOCK], head[at : at + HEAD_BLOCK].to(gradient.dtype))
    return out
