"""From rows of different lengths, one after the other, to padded tensors: used by the collator and by the loader, so that both
give the same bits.

Legend: B rows, T padded length, N tokens of all rows together. Padding is on the right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["padded_width", "place_rows", "real_positions"]


def padded_width(lengths: npt.NDArray[np.int64], divisor: int, at_least: int = 1) -> int:
    """Longest of `lengths` [B] and `at_least`, rounded up to a multiple of `divisor`."""
    longest = max(int(lengths.max(initial=0)), at_least)
    return -(-longest // divisor) * divisor


def real_positions(lengths: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.bool_]:
    """bool [B, T = width]: True at the first `lengths[b]` positions of row b."""
    # int32 halves the traffic of the comparison, the widest operand here.
    return np.arange(width, dtype=np.int32) < lengths.astype(np.int32)[:, None]


def place_rows(
    runs: Sequence[npt.NDArray[np.generic]], positions: npt.NDArray[np.bool_], pad_value: int | bool, dtype: npt.DTypeLike
) -> torch.Tensor:
    """`runs`, joined to [N], laid into the True positions of `positions` [B, T] row by row; `pad_value` elsewhere.

    Returns a tensor [B, T] of `dtype`. N must be the number of True positions.
    """
    padded = np.full(positions.shape, pad_value, dtype=dtype)
    if runs:
        padded[positions] = runs[0] if len(runs) == 1 else np.concatenate(runs)
    return torch.from_numpy(padded)
