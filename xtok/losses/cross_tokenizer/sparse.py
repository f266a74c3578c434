"""Small tensor tools of the chunk losses: segment means, the sparse projection product, KL terms that survive −inf.

Shapes: R rows, C chunks, N student columns, K teacher columns.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["SparseColumns", "kl_terms", "segment_mean"]


def segment_mean(values: Tensor, chunk: Tensor, num_chunks: int) -> Tensor:
    """Mean of `values` `[R, ·]` over the rows of each chunk (int64 `[R]`, every chunk has a row): `[C, ·]`."""
    size = torch.bincount(chunk, minlength=num_chunks).to(values.dtype)
    sums = torch.zeros(num_chunks, values.shape[1], dtype=values.dtype, device=values.device)
    return sums.index_add(0, chunk, values) / size[:, None]


def kl_terms(log_teacher: Tensor, log_student: Tensor, *, reverse: bool) -> Tensor:
    """Elementwise q·(log q − log p), or p·(log p − log q) with `reverse`. A zero first factor gives 0 and no gradient."""
    first, second = (log_student, log_teacher) if reverse else (log_teacher, log_student)
    weight = first.exp()
    empty = weight == 0
    difference = torch.where(empty, 0.0, first) - torch.where(empty, 0.0, second)
    return weight * difference


class SparseColumns:
    """A sparse matrix `[N, K]` for products with dense rows: `x [R, N] -> x @ M [R, K]`, and its transpose for the gradient.

    row, column: int64 `[E]` places of the entries; weight `[E]`.
    """

    def __init__(self, row: Tensor, column: Tensor, weight: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape = shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "CSR is in beta": the two products used here are tested
            self._matrix = _csr(row, column, weight.to(dtype), shape)
            self._transposed = _csr(column, row, weight.to(dtype), (shape[1], shape[0]))

    def product(self, values: Tensor) -> Tensor:
        """`values [R, N] @ M`, `[R, K]`, differentiable in `values`."""
        return _SparseProduct.apply(values, self)  # type: ignore[no-any-return,no-untyped-call]


def _csr(row: Tensor, column: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.stack([row, column]), weight, shape).coalesce().to_sparse_csr()


class _SparseProduct(torch.autograd.Function):
    # The library's sparse product wants the dense side contiguous with rows of the sparse one's columns, so both sides are turned.
    @staticmethod
    def forward(ctx: Any, values: Tensor, matrix: SparseColumns) -> Tensor:
        ctx.matrix = matrix
        if 0 in matrix.shape:
            return values.new_zeros(values.shape[0], matrix.shape[1])
        return (matrix._transposed @ values.T.contiguous()).T.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if 0 in ctx.matrix.shape:
            return gradient.new_zeros(gradient.shape[0], ctx.matrix.shape[0]), None
        return (ctx.matrix._matrix @ gradient.T.contiguous()).T, None
