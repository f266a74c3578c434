"""Log-probabilities of the student's own tokens, tile by tile: what cross-entropy and the chunk likelihood (ALM) stand on.

Forward keeps two numbers a row (normalizer, log-probability); backward makes each tile of logits again. Under tensor parallelism
the forward has two collectives (one MAX, one SUM over `[R, 2]`) and the backward one, whatever the number of tiles.

Shapes: R rows, V vocabulary (this shard's columns), H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.collectives import max_over_shards, sum_over_shards
from xtok.losses.cross_tokenizer.gradients import GradientBuffers
from xtok.losses.cross_tokenizer.logits import LogitsRows, LogitsSource

__all__ = ["RowStatistics", "label_log_probs", "row_statistics"]


class RowStatistics:
    """Per row `[R]`: `log_normalizer` (log-sum-exp over the whole vocabulary) and `label_logit`; on request the entropy and
    the highest probability of the row's distribution, and the running maximum of every column `[V]`."""

    def __init__(
        self, log_normalizer: Tensor, label_logit: Tensor, entropy: Tensor, max_probability: Tensor, column_max: Tensor
    ) -> None:
        self.log_normalizer = log_normalizer
        self.label_logit = label_logit
        self.entropy = entropy
        self.max_probability = max_probability
        self.column_max = column_max

    @property
    def label_log_prob(self) -> Tensor:
        """log softmax at the label, `[R]`."""
        return self.label_logit - self.log_normalizer


def row_statistics(source: LogitsRows, rows: Tensor, labels: Tensor, *, tile_size: int, details: bool = False) -> RowStatistics:
    """One pass over the logits of `rows`, without a graph. `details` adds entropy, highest probability and column maxima.

    A shard without columns takes part in the collectives with nothing.
    """
    num_rows = rows.shape[0]
    highest = torch.full((num_rows,), -torch.inf, dtype=source.dtype, device=source.device)
    sums = torch.zeros(num_rows, 3, dtype=source.dtype, device=source.device)  # Σexp, label logit, Σ exp·logit
    column_max = torch.full((source.num_columns,), -torch.inf, dtype=source.dtype, device=source.device)
    local = labels - source.start
    owned = (local >= 0) & (local < source.num_columns)
    for at in range(0, num_rows, tile_size):
        part = slice(at, at + tile_size)
        logits = source.rows(rows[part])
        if source.num_columns == 0:
            continue
        top = logits.amax(dim=1)
        highest[part] = top
        if details:
            torch.maximum(column_max, logits.amax(dim=0), out=column_max)
        picked = logits.gather(1, local[part].clamp(0, source.num_columns - 1)[:, None])[:, 0]
        sums[part, 1] = torch.where(owned[part], picked, torch.zeros_like(picked))
        finite_top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        logits.sub_(finite_top[:, None])
        weights = logits.exp()
        sums[part, 0] = weights.sum(dim=1)
        if details:
            sums[part, 2] = torch.where(weights > 0, weights * logits, torch.zeros_like(logits)).sum(dim=1)
    return _merge(source, highest, sums, column_max)


def _merge(source: LogitsRows, highest: Tensor, sums: Tensor, column_max: Tensor) -> RowStatistics:
    """Bring the shards' parts to one maximum and add them up."""
    group = source.group
    overall = max_over_shards(highest, group)
    safe = torch.where(torch.isfinite(overall), overall, torch.zeros_like(overall))
    shift = torch.where(torch.isfinite(highest), highest - safe, torch.full_like(highest, -torch.inf))
    scale = shift.exp()
    moved = torch.where(torch.isfinite(shift), shift, torch.zeros_like(shift))
    parts = torch.stack([sums[:, 0] * scale, sums[:, 1], scale * (sums[:, 2] + moved * sums[:, 0])], dim=1)
    total = sum_over_shards(parts, group)
    log_sum = total[:, 0].log()
    log_normalizer = safe + log_sum
    entropy = log_sum - total[:, 2] / total[:, 0]
    return RowStatistics(log_normalizer, total[:, 1], entropy, (overall - log_normalizer).exp(), column_max)


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, source: LogitsSource, rows: Tensor, labels: Tensor, tile_size: int
    ) -> Tensor:
        statistics = row_statistics(source, rows, labels, tile_size=tile_size)
        ctx.source, ctx.tile_size = source, tile_size
        # `values` and `weight` are saved so that autograd notices a change in place between forward and backward.
        ctx.save_for_backward(rows, labels, statistics.log_normalizer, values, *([] if weight is None else [weight]))
        return statistics.label_log_prob

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        rows, labels, log_normalizer = ctx.saved_tensors[:3]
        source: LogitsSource = ctx.source
        upstream = gradients[0]
        buffers = GradientBuffers(source, needs_values=ctx.needs_input_grad[0], needs_weight=ctx.needs_input_grad[1])
        used = upstream.nonzero().flatten()  # rows without an upstream gradient cost nothing
        local = labels - source.start
        for at in range(0, used.shape[0], ctx.tile_size):
            part = used[at : at + ctx.tile_size]
            gradient = source.rows(rows[part]).sub_(log_normalizer[part, None]).exp_().neg_()
            place, owned = local[part], (local[part] >= 0) & (local[part] < source.num_columns)
            gradient[owned.nonzero().flatten(), place[owned]] += 1
            gradient *= upstream[part, None]
            buffers.add(rows[part], gradient, columns=None)
        values, weight = buffers.finish()
        return values, weight, None, None, None, None


def label_log_probs(source: LogitsSource, rows: Tensor, labels: Tensor, *, tile_size: int) -> Tensor:
    """log softmax of the student at `labels` for each row, `[R]`, with gradient to the logits (or hidden states and head).

    rows, labels: int64 `[R]`; labels are global token ids. float32, or float64 for float64 inputs.
    """
    values, weight = source.tensors()
    return _LabelLogProbs.apply(values, weight, source, rows, labels, tile_size)  # type: ignore[no-any-return,no-untyped-call]
