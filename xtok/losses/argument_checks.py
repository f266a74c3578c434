"""Checks that all draft losses share: what is a tensor at all, what a mask, weights and a chunk size may hold.

A loss made from a NaN mask or from the real part of a complex one is wrong far from its cause, so such values are refused where
they come in. Bin weights are only read by `DraftLossStats.normalized`: non-finite ones show in its result and are not refused.

Shapes: [...] rows of a loss, B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_chunk_size", "check_real", "mask_scale", "require_tensors"]


def require_tensors(**arguments: object) -> None:
    """TypeError for the first argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {_describe(value)}, must be a tensor")


def check_real(**tensors: Tensor | None) -> None:
    """TypeError for the first complex tensor; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_complex():
            raise TypeError(f"{name} has dtype {tensor.dtype}, must be real: pass its real part or its magnitude")


def mask_scale(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask [...] as row weights [numel] in `dtype`, detached.

    Raises TypeError for a complex mask; ValueError where a value is negative, NaN or, once in `dtype`, infinite.
    """
    check_real(**{name: mask})
    scale = mask.detach().reshape(-1).to(dtype)
    if mask.dtype == torch.bool:
        return scale
    illegal = ~((scale >= 0) & (scale < torch.inf))
    if bool(illegal.any()):
        first = int(illegal.nonzero()[0])
        raise ValueError(
            f"{name} holds {float(scale[first])} at flat index {first} ({int(illegal.sum())} of {scale.numel()} values are negative or "
            f"not finite in {dtype}): a mask is boolean or a finite weight of at least 0, with 0 for rows that do not count"
        )
    return scale


def check_chunk_size(token_chunk_size: object) -> None:
    """An int of at least 1."""
    if isinstance(token_chunk_size, bool) or not isinstance(token_chunk_size, int):
        raise TypeError(f"token_chunk_size is {token_chunk_size!r}, must be an int of at least 1")
    if token_chunk_size < 1:
        raise ValueError(f"token_chunk_size is {token_chunk_size}, must be at least 1")


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
