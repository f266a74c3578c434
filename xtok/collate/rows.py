"""What of a row does not depend on the mode: its number and its weight.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from schemas.tables import RejectReason
from xtok.batch import DatumSpec
from xtok.errors import ConfigError, RowRefused
from xtok.settings import whole_number

__all__ = ["refused_row", "row_numbers", "sample_mask"]

_LARGEST_WEIGHT = torch.finfo(torch.float32).max


def row_numbers(batch: Sequence[DatumSpec]) -> list[int]:
    """`idx` of every row. Raises ConfigError for one that has none."""
    numbers = []
    for place, datum in enumerate(batch):
        if not isinstance(datum, dict) or "idx" not in datum:
            raise ConfigError(
                f"row {place} of the batch must be a DatumSpec, a dict with message_log and idx, got {datum!r:.200}"
            )
        numbers.append(whole_number(f"idx of row {place} of the batch", datum["idx"], most=None))
    return numbers


def sample_mask(batch: Sequence[DatumSpec]) -> torch.Tensor:
    """float32 [B], `loss_multiplier` of every row, 1 where it has none. Raises RowRefused where the offline path counts a reject."""
    return torch.tensor([_weight(datum) for datum in batch], dtype=torch.float32)


def _weight(datum: DatumSpec) -> float:
    value = datum.get("loss_multiplier")
    try:
        weight = 1.0 if value is None else float("nan") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = float("nan")
    if not 0 <= weight <= _LARGEST_WEIGHT:
        what = f"loss_multiplier is {value!r:.80}, not a finite number from 0 on"
        raise refused_row(RejectReason.INVALID_LOSS_MULTIPLIER, datum, what)
    return weight


def refused_row(reason: RejectReason, datum: DatumSpec, what: str) -> RowRefused:
    """The refusal of a row as it was handed over."""
    return RowRefused(reason, f"row with idx {datum.get('idx')}: {what}", stage="read", side="source")
