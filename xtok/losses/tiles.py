"""Tiles of logits: gather rows without copying their tensor, cut the vocabulary in blocks, apply a frozen head and its transpose.

Shapes: r rows of a tile, V vocabulary columns of this rank, H hidden size, D last dimension, m blocks of v columns each.

A tile is not a matrix [r, V] but `Parts`: a few 3-D tensors [blocks, r, columns] that together hold V columns, the main part of
equal blocks and, where V does not divide, a tail of one narrower block. A CPU writes eight blocks a fifth faster than one wide
matrix (rows 128 KB apart share their cache sets), and low-precision heads are brought to fp32 one block at a time: the head is
never copied whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "FrozenHead",
    "Parts",
    "RowSource",
    "VocabularyLayout",
    "compute_dtype",
    "elementwise_block_rows",
    "row_amax",
    "row_slices",
    "row_sum",
    "slice_rows",
]

Parts = tuple[Tensor, ...]

_CPU_BLOCKS = 8
_CPU_MIN_BLOCK = 512
_UPCAST_ELEMENTS = 1 << 22  # 16 MB of fp32 head at a time
# Large enough for few parallel regions: each waits for the slowest thread, and on a busy machine that is what counts.
_CPU_BLOCK_ELEMENTS = 1 << 22
_DEVICE_BLOCK_ELEMENTS = 1 << 24
# Probabilities of a large vocabulary are subnormal in fp16; a power of two brings them back and leaves 1.0 far from overflow.
_FP16_GRADIENT_SCALE = 8192.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, reductions and results: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_slices(num_rows: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows that cover `num_rows`."""
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def elementwise_block_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of `vocab_size` to take through a chain of elementwise operations at once: scratch is that large, not a tile."""
    elements = _CPU_BLOCK_ELEMENTS if device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    return max(1, elements // max(1, vocab_size))


def row_amax(parts: Parts, out: Tensor) -> Tensor:
    """Maximum of each row, written to `out` [r]; NaN wins. A row of zero columns does not occur."""
    torch.amax(parts[0], dim=(0, 2), out=out)
    for part in parts[1:]:
        torch.maximum(out, part.amax(dim=(0, 2)), out=out)
    return out


def row_sum(parts: Parts, out: Tensor) -> Tensor:
    """Sum of each row, written to `out` [r]."""
    torch.sum(parts[0], dim=(0, 2), out=out)
    for part in parts[1:]:
        out += part.sum(dim=(0, 2))
    return out


class RowSource:
    """Rows of a tensor [..., D] by flat row number, gathered a few at a time: a slice of a bigger tensor is never made contiguous.

    index: int64 [n] flat row numbers (row-major over the leading dimensions), or None for all rows in order.
    """

    def __init__(self, values: Tensor, index: Tensor | None) -> None:
        self._shape = values.shape[:-1]
        self._matrix: Tensor | None
        try:
            self._matrix = values.view(-1, values.shape[-1])
        except RuntimeError:  # strides that no single row stride describes, such as logits[:, :-1]
            self._matrix = None
        self._values = values
        if index is None and self._matrix is None:
            index = torch.arange(math.prod(self._shape), device=values.device)
        self._index = index
        self._pieces: tuple[Tensor, Tensor] | None = None
        if index is not None and self._matrix is not None and self._matrix.is_contiguous():
            self._pieces = _in_pieces(self._matrix, index)

    def take(self, rows: slice) -> Tensor:
        """Rows `rows` of the selection, [r, D], in the tensor's own dtype; a view where the rows are neighbours by construction."""
        if self._index is None:
            assert self._matrix is not None
            return self._matrix[rows]
        index = self._index[rows]
        if self._matrix is not None:
            return self._matrix.index_select(0, index)
        return self._values[torch.unravel_index(index, self._shape)]

    def read(self, rows: slice, buffer: Tensor) -> Tensor:
        """Rows `rows` of the selection, [r, D], in the dtype of `buffer` [r or more, D]: a view where they lie together in that dtype
        already, else, as a rule, gathered into the buffer: memory that is already there."""
        out = buffer[: rows.stop - rows.start]
        if self._values.dtype != buffer.dtype:
            return out.copy_(self.take(rows))
        if self._pieces is None:
            return self.take(rows)
        matrix, index = self._pieces
        torch.index_select(matrix, 0, index[rows].flatten(), out=out.view(-1, matrix.shape[-1]))
        return out


def _in_pieces(matrix: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix` [m, D] as [m * p, D / p] and the pieces [n, p] of the rows `index`: a CPU gathers long rows one by one, each shared
    out among all cores, but many short ones side by side."""
    num_pieces = _CPU_BLOCKS if matrix.device.type == "cpu" and matrix.shape[-1] % _CPU_BLOCKS == 0 else 1
    pieces = index.unsqueeze(1) * num_pieces + torch.arange(num_pieces, device=index.device)
    return matrix.view(-1, matrix.shape[-1] // num_pieces), pieces


@dataclass(frozen=True, slots=True)
class VocabularyLayout:
    """How V columns are cut: `num_blocks` blocks of `block_size`, then `tail` columns."""

    num_blocks: int
    block_size: int
    tail: int

    @classmethod
    def whole(cls, vocab_size: int) -> VocabularyLayout:
        return cls(1, vocab_size, 0)

    @classmethod
    def of_blocks(cls, vocab_size: int, num_blocks: int) -> VocabularyLayout:
        block_size = max(1, vocab_size // max(1, min(num_blocks, vocab_size)))
        return cls(vocab_size // block_size, block_size, vocab_size % block_size)

    @property
    def vocab_size(self) -> int:
        return self.num_blocks * self.block_size + self.tail

    def new_tile(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> Parts:
        """An uninitialised tile of `num_rows` rows."""
        main = torch.empty(self.num_blocks, num_rows, self.block_size, dtype=dtype, device=device)
        if not self.tail:
            return (main,)
        return (main, torch.empty(1, num_rows, self.tail, dtype=dtype, device=device))

    def split(self, rows: Tensor) -> Parts:
        """View a matrix [r, V] in this layout."""
        cut = self.num_blocks * self.block_size
        main = rows[:, :cut].view(rows.shape[0], self.num_blocks, self.block_size).transpose(0, 1)
        return (main,) if not self.tail else (main, rows[:, cut:].unsqueeze(0))


def slice_rows(parts: Parts, rows: slice) -> Parts:
    """The same columns, fewer rows (views)."""
    return tuple(part[:, rows] for part in parts)


class FrozenHead:
    """A language-model head [V, H] that gets no gradient: hidden rows to logits, gradients of logits to gradients of hidden rows.

    Logits come out in fp32 (fp64 for an fp64 head) and are never rounded to bf16 or fp16 on the way. Three ways:
    the dtype computes as it is (fp32, fp64); a low-precision head on CUDA uses its tensor cores with fp32 output; elsewhere the
    head is brought to fp32 block by block.
    """

    def __init__(self, output_weight: Tensor) -> None:
        self.weight = output_weight.detach()
        self.dtype = compute_dtype(output_weight.dtype)
        vocab_size, hidden_size = output_weight.shape
        self._exact = self.weight.dtype == self.dtype
        self._tensor_cores = not self._exact and self.weight.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out")
        if self._exact or self._tensor_cores:
            wanted = _CPU_BLOCKS if self.weight.device.type == "cpu" and vocab_size >= _CPU_BLOCKS * _CPU_MIN_BLOCK else 1
        else:
            wanted = math.ceil(vocab_size * hidden_size / _UPCAST_ELEMENTS)
        self.layout = VocabularyLayout.of_blocks(vocab_size, wanted)

    def new_tile(self, num_rows: int) -> Parts:
        return self.layout.new_tile(num_rows, self.dtype, self.weight.device)

    def new_rows(self, num_rows: int) -> Tensor:
        """An uninitialised matrix [num_rows, V] in the compute dtype; `layout.split` views it as a tile."""
        return torch.empty(num_rows, self.layout.vocab_size, dtype=self.dtype, device=self.weight.device)

    def project_(self, hidden: Tensor, tile: Parts) -> None:
        """Write the logits of `hidden` [r, H] into `tile`."""
        if self._exact:
            main = tile[0]
            num_blocks, _, size = main.shape
            blocks = self.weight[: num_blocks * size].view(num_blocks, size, -1)
            torch.bmm(hidden.expand(num_blocks, -1, -1), blocks.transpose(1, 2), out=main)
            for part, weight in zip(tile[1:], self._tail_weight(), strict=True):
                torch.mm(hidden, weight.T, out=part[0])
        elif self._tensor_cores:
            for block, weight in self._blocks(tile):
                _low_precision_mm(hidden, weight.T, block)
        else:
            wide = hidden.to(self.dtype)
            for block, weight in self._blocks(tile):
                torch.mm(wide, weight.to(self.dtype).T, out=block)

    def pull_back_(self, tile: Parts, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Write row_scale * (tile @ head), [r, H], into `out` (fp32 or fp64); row_scale [r], None: 1. The tile may be overwritten."""
        # In fp16 only rows scaled beforehand fit.
        early = row_scale if self._tensor_cores and self.weight.dtype == torch.float16 else None
        for number, (block, weight) in enumerate(self._blocks(tile)):
            if self._tensor_cores:
                product = _gradient_mm(block, weight, early)
            else:
                product = None
                weight = weight.to(self.dtype)
            if product is None and number == 0:
                torch.mm(block, weight, out=out)
            elif product is None:
                out.addmm_(block, weight)
            elif number == 0:
                out.copy_(product)
            else:
                out.add_(product)
        if row_scale is not None and early is None:
            out.mul_(row_scale.unsqueeze(-1))

    def _tail_weight(self) -> tuple[Tensor, ...]:
        tail = self.layout.tail
        return (self.weight[self.weight.shape[0] - tail :],) if tail else ()

    def _blocks(self, tile: Parts) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a block's columns [r, v] and its head rows [v, H]."""
        size = self.layout.block_size
        for number in range(self.layout.num_blocks):
            yield tile[0][number], self.weight[number * size : (number + 1) * size]
        for part, weight in zip(tile[1:], self._tail_weight(), strict=True):
            yield part[0], weight


def _low_precision_mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """bf16 or fp16 operands, fp32 accumulation and fp32 result (CUDA)."""
    torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)


def _gradient_mm(gradient: Tensor, weight: Tensor, row_scale: Tensor | None) -> Tensor:
    """fp32 gradient [r, v] times low-precision head [v, H] on tensor cores: the gradient alone is rounded, the sum stays fp32.

    Rounding errors of a row's V terms are independent, so the product is off by about 1e-3 of its norm in bf16. `row_scale` [r], for
    fp16 alone, multiplies the gradient before it is rounded.
    """
    product = torch.empty(gradient.shape[0], weight.shape[1], dtype=torch.float32, device=gradient.device)
    if weight.dtype == torch.float16:
        if row_scale is not None:
            gradient.mul_(row_scale.unsqueeze(-1))
        _low_precision_mm(gradient.mul_(_FP16_GRADIENT_SCALE).to(weight.dtype), weight, product)
        return product.div_(_FP16_GRADIENT_SCALE)
    _low_precision_mm(gradient.to(weight.dtype), weight, product)
    return product
