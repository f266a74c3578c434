"""The vocabulary projection as the losses use it: a sparse row-stochastic map from student ids to teacher ids.

Shapes: V_s student vocabulary, V_t teacher vocabulary, k entries a row at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xtok.errors import ProjectionError
from xtok.projection.build import ProjectionTable

__all__ = ["Projection"]

ROW_SUM_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Projection:
    """Row v says which teacher tokens student token v stands for, and with what weight.

    indices: int32 `[V_s, k]`, teacher ids in `[0, teacher_vocab_size)`; −1 = no entry.
    weights: float32 `[V_s, k]`, non-negative; each row with an entry sums to 1, entries of −1 weigh 0.
    student_fingerprint, teacher_fingerprint: content fingerprints of the two tokenizers.
    teacher_vocab_size: number of teacher ids; logits columns beyond it are padding of the head.

    Raises `ProjectionError` for wrong shapes, ids out of range, negative weights or rows that do not sum to 1.
    """

    indices: Tensor
    weights: Tensor
    student_fingerprint: str
    teacher_fingerprint: str
    teacher_vocab_size: int

    def __post_init__(self) -> None:
        if self.indices.ndim != 2 or self.indices.shape != self.weights.shape:
            raise ProjectionError(
                f"indices {tuple(self.indices.shape)} and weights {tuple(self.weights.shape)} must both be [student_vocab_size, k]"
            )
        if self.indices.dtype.is_floating_point or not self.weights.dtype.is_floating_point:
            raise ProjectionError(
                f"indices must be integers and weights floats, got {self.indices.dtype} and {self.weights.dtype}"
            )
        entry = self.indices >= 0
        if bool((self.indices < -1).any()) or bool((self.indices >= self.teacher_vocab_size).any()):
            worst = int(self.indices.max() if bool((self.indices >= self.teacher_vocab_size).any()) else self.indices.min())
            raise ProjectionError(f"teacher id {worst} is outside [0, {self.teacher_vocab_size}); use -1 for no entry")
        if not bool(torch.isfinite(self.weights).all()) or bool((self.weights < 0).any()):
            raise ProjectionError("projection weights must be finite and non-negative")
        sums = (self.weights * entry).sum(dim=1)
        wrong = entry.any(dim=1) & ((sums - 1).abs() > ROW_SUM_TOLERANCE)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ProjectionError(f"row {row} of the projection sums to {float(sums[row]):.6f}, not 1")

    @classmethod
    def from_table(cls, table: ProjectionTable) -> Projection:
        """The stored arrays as tensors."""
        return cls(
            torch.from_numpy(table.indices),
            torch.from_numpy(table.weights),
            table.student_fingerprint,
            table.teacher_fingerprint,
            table.teacher_vocab_size,
        )

    @property
    def student_vocab_size(self) -> int:
        """Number of student ids (rows)."""
        return int(self.indices.shape[0])

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """All entries as (student ids int64 `[E]`, teacher ids int64 `[E]`, weights `[E]`), in row order; zero weights left out."""
        row, slot = ((self.indices >= 0) & (self.weights > 0)).nonzero(as_tuple=True)
        return row, self.indices[row, slot].long(), self.weights[row, slot]

    def reachable_columns(self) -> Tensor:
        """Teacher ids that at least one row reaches, ascending, int64."""
        columns: Tensor = torch.unique(self.entries()[1])
        return columns

    def to(self, device: torch.device | str) -> Projection:
        """The same projection on another device."""
        return Projection(
            self.indices.to(device),
            self.weights.to(device),
            self.student_fingerprint,
            self.teacher_fingerprint,
            self.teacher_vocab_size,
        )
