"""Logits as the loss reads them: a few rows and columns at a time, from a logits tensor or from hidden states and a head.

Shapes: B samples, T positions, H hidden size, V columns of the head (this rank's under tensor parallelism); R rows, C columns asked for.
A row is a place in the flattened `[B·T]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from xtok.losses.cross_tokenizer.collectives import SumHiddenGradient, shard_start

__all__ = ["AveragedLogits", "HiddenLogits", "LogitsRows", "LogitsSource"]


@dataclass(frozen=True, eq=False)
class HiddenLogits:
    """Logits that are not made yet: `hidden @ weight.T`, computed tile by tile.

    hidden: `[B, T, H]` final hidden states; weight: `[V, H]` output head. Same floating dtype and device.
    Raises ValueError when the shapes, dtypes or devices do not fit.
    """

    hidden: Tensor
    weight: Tensor

    def __post_init__(self) -> None:
        if self.hidden.ndim != 3 or self.weight.ndim != 2 or self.hidden.shape[-1] != self.weight.shape[-1]:
            raise ValueError(f"hidden {tuple(self.hidden.shape)} must be [B, T, H] and weight {tuple(self.weight.shape)} [V, H]")
        if self.hidden.dtype != self.weight.dtype or not self.hidden.dtype.is_floating_point:
            raise ValueError(f"hidden ({self.hidden.dtype}) and weight ({self.weight.dtype}) must share one floating dtype")
        if self.hidden.device != self.weight.device:
            raise ValueError(f"hidden is on {self.hidden.device}, weight on {self.weight.device}")


class LogitsRows(Protocol):
    """Anything that gives rows of logits: one model's, or an average of several."""

    group: dist.ProcessGroup | None
    leading: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    start: int
    vocab_size: int
    num_columns: int

    def rows(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        """Logits `[R, C]` without a graph."""


class LogitsSource:
    """Rows of logits in float32 (float64 for float64 inputs), cut to the tokenizer's length.

    vocab_size: columns that mean a token, over all shards; what lies beyond is padding of the head. None = all.
    Raises ValueError when the logits have fewer columns than `vocab_size`, or are no `[B, T, V]`.
    """

    def __init__(
        self, logits: Tensor | HiddenLogits, *, vocab_size: int | None, group: dist.ProcessGroup | None, name: str
    ) -> None:
        self.group = group
        self.weight: Tensor | None = None
        if isinstance(logits, HiddenLogits):
            hidden, self.weight = logits.hidden, logits.weight
            self.values = hidden if group is None else SumHiddenGradient.apply(hidden, group)  # type: ignore[no-untyped-call]
            columns = self.weight.shape[0]
        else:
            if logits.ndim != 3 or not logits.dtype.is_floating_point:
                raise ValueError(f"{name} must be floating [B, T, V], got {tuple(logits.shape)} {logits.dtype}")
            self.values, columns = logits, logits.shape[-1]
        self.leading = tuple(self.values.shape[:2])
        self.device = self.values.device
        self.dtype = torch.float64 if self.values.dtype == torch.float64 else torch.float32
        self.start, total = shard_start(columns, group, self.device)
        if vocab_size is not None and total < vocab_size:
            raise ValueError(
                f"{name} have {total} columns, but the tokenizer has {vocab_size} ids: the model's head is too small for it"
            )
        self.vocab_size = total if vocab_size is None else vocab_size
        self.num_columns = max(0, min(columns, self.vocab_size - self.start))

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """What autograd must see: (logits or hidden `[B, T, ·]`, head or None)."""
        return self.values, self.weight

    def rows(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        """Logits `[R, C]` of the given rows; `columns` are this shard's own column numbers, None = all that mean a token. No graph."""
        with torch.no_grad():
            flat = self.values.detach().flatten(0, 1).index_select(0, rows)
            if self.weight is None:
                picked = flat[:, : self.num_columns] if columns is None else flat.index_select(1, columns)
                return picked.to(self.dtype)
            return _project(flat, self.head(columns), self.dtype)

    def head(self, columns: Tensor | None) -> Tensor:
        """Rows of the head that make the given columns."""
        assert self.weight is not None
        weight = self.weight.detach()
        return weight[: self.num_columns] if columns is None else weight.index_select(0, columns)


class AveragedLogits:
    """Weighted mean of several teachers' logits of one vocabulary and one tokenization, made row by row.

    weights: float `[num_teachers]`, non-negative, divided by their sum. Raises ValueError when shapes differ or the weights sum to zero.
    """

    def __init__(self, sources: list[LogitsSource], weights: Tensor) -> None:
        shapes = {(source.leading, source.num_columns) for source in sources}
        if len(shapes) != 1:
            raise ValueError(f"averaged_logits needs teachers of one shape and one vocabulary, got {sorted(shapes)}")
        if not bool(weights.sum() > 0):
            raise ValueError(f"the teacher weights {weights.tolist()} sum to zero: averaged_logits has nothing to average")
        first = sources[0]
        self.sources, self.weights = sources, (weights / weights.sum()).to(first.dtype)
        self.group, self.leading, self.device, self.dtype = first.group, first.leading, first.device, first.dtype
        self.start, self.vocab_size, self.num_columns = first.start, first.vocab_size, first.num_columns

    def rows(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        """Averaged logits `[R, C]`."""
        total = self.sources[0].rows(rows, columns) * self.weights[0]
        for source, weight in zip(self.sources[1:], self.weights[1:], strict=True):
            total += source.rows(rows, columns) * weight
        return total


def _project(hidden: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    """`hidden @ head.T` in `dtype`. Half inputs are widened in blocks: no logit is rounded to half, no head copied whole."""
    if hidden.dtype == dtype:
        return hidden @ head.T
    block = 8192
    out = torch.empty(hidden.shape[0], head.shape[0], dtype=dtype, device=hidden.device)
    wide = hidden.to(dtype)
    for at in range(0, head.shape[0], block):
        torch.mm(wide, head[at : at + block].to(dtype).T, out=out[:, at : at + block])
    return out
