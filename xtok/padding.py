"""From rows of different lengths to padded tensors: used by the collator and by the loader, so that both give the same bits.

Legend: B rows, T padded length. Padding is on the right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["PaddedLayout"]


class PaddedLayout:
    """Where the tokens of B rows stand in [B, T].

    lengths: tokens of each row. T is the longest row and at least `at_least`, rounded up to a multiple of `divisor`.
    """

    def __init__(self, lengths: Sequence[int], *, divisor: int = 1, at_least: int = 1) -> None:
        width = -(-max(at_least, *lengths) // divisor) * divisor if lengths else at_least
        self._shape = (len(lengths), width)
        self._is_real = np.arange(width, dtype=np.int32) < np.array(lengths, dtype=np.int32)[:, None]

    def place(self, rows: Sequence[npt.NDArray[np.generic]], pad_value: int | bool, dtype: npt.DTypeLike) -> torch.Tensor:
        """[B, T] of `dtype`: one array a row, as long as the row; `pad_value` elsewhere. Rows that `rows` lacks are all padding."""
        padded = np.empty(self._shape, dtype=dtype)
        padded.fill(pad_value)
        # One copy a row, straight from where its tokens lie: gathering them first would touch every token once more.
        for row, values in enumerate(rows):
            padded[row, : len(values)] = values
        return torch.from_numpy(padded)

    def real(self, dtype: npt.DTypeLike) -> torch.Tensor:
        """[B, T] of `dtype`: 1 (True) at the real positions, 0 (False) elsewhere."""
        return torch.from_numpy(self._is_real.astype(dtype))
