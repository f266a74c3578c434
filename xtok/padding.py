"""From rows of different lengths, one after the other, to padded tensors: used by the collator and by the loader, so that both
give the same bits.

A layout covers K batches of B rows at once: the work per token is a few passes over flat memory, and nothing is done row by row.

Legend: R = K * B rows, T_k padded length of batch k, N tokens of all rows together. Padding is on the right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

__all__ = ["PaddedLayout"]


class PaddedLayout:
    """Where the tokens of R rows stand in K padded tensors [B, T_k].

    lengths: int64 [R], tokens of each row. batch_size: B. T_k is the longest row of batch k and at least `at_least`, rounded up to
    a multiple of `divisor`. ValueError when R is no multiple of B.
    """

    def __init__(self, lengths: npt.NDArray[np.int64], batch_size: int, *, divisor: int = 1, at_least: int = 1) -> None:
        if batch_size < 1 or len(lengths) % batch_size:
            raise ValueError(f"{len(lengths)} rows do not divide into batches of {batch_size}")
        longest = lengths.reshape(-1, batch_size).max(axis=1, initial=at_least)
        widths = -(-longest // divisor) * divisor
        slots = np.concatenate([[0], np.cumsum(batch_size * widths)])
        self._batch_size = batch_size
        self._cuts: list[tuple[int, int, int]] = list(zip(slots[:-1].tolist(), slots[1:].tolist(), widths.tolist(), strict=True))
        real_and_padding = np.empty((len(lengths), 2), dtype=np.int64)
        real_and_padding[:, 0] = lengths
        real_and_padding[:, 1] = np.repeat(widths, batch_size) - lengths
        self._is_real = np.repeat(np.tile([True, False], len(lengths)), real_and_padding.ravel())

    def place(self, values: npt.NDArray[np.generic], pad_value: int | bool, dtype: npt.DTypeLike) -> list[torch.Tensor]:
        """K tensors [B, T_k] of `dtype`: `values` [N] at the real positions, row by row, and `pad_value` elsewhere."""
        padded = _allocate(len(self._is_real), np.dtype(dtype))
        padded.fill(pad_value)
        padded[self._is_real] = values
        return self._split(padded)

    def real(self, dtype: npt.DTypeLike) -> list[torch.Tensor]:
        """K tensors [B, T_k] of `dtype`: 1 (True) at the real positions, 0 (False) elsewhere."""
        real = _allocate(len(self._is_real), np.dtype(dtype))
        real[:] = self._is_real
        return self._split(real)

    def _split(self, padded: npt.NDArray[np.generic]) -> list[torch.Tensor]:
        # Cut in numpy and not in torch, so that every tensor has a storage of its own extent: saving one does not save all.
        return [torch.from_numpy(padded[start:end].reshape(self._batch_size, width)) for start, end, width in self._cuts]


def _allocate(length: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """An uninitialized array [length], from Arrow's pool.

    The pool keeps the pages of freed batches. The C allocator gives blocks of this size back to the system, and getting them anew
    costs more (a page fault for every 4 KiB) than filling them.
    """
    return np.frombuffer(pa.allocate_buffer(length * dtype.itemsize), dtype=dtype) if length else np.empty(0, dtype=dtype)
