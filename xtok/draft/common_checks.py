"""Argument checks of the anchored-block functions: shapes, dtypes and positions, each refused by name with the offending value.

Boolean and integer masks are checked by shape alone; a floating mask is looked at once, for NaN and infinities.

Shapes: B samples (rows), S sequence length, A anchors a row.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

__all__ = [
    "check_anchors_inside",
    "check_count",
    "check_integers",
    "check_mask",
    "check_one_device",
    "check_shape",
    "integer_list",
]


def check_count(name: str, value: object, *, minimum: int) -> None:
    """An int of at least `minimum`: TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        complaint = "must not be negative" if minimum == 0 else f"must be at least {minimum}"
        raise ValueError(f"{name} {complaint}, got {value}")


def check_shape(name: str, tensor: object, shape: tuple[int | str, ...]) -> None:
    """A tensor of that shape; a string stands for any size: TypeError, ValueError."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {'None' if tensor is None else type(tensor).__name__}")
    fits = all(isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, tensor.shape, strict=False))
    if tensor.ndim != len(shape) or not fits:
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], got {tuple(tensor.shape)}")


def check_integers(name: str, tensor: Tensor) -> None:
    """Positions, ids and lengths are whole numbers; a cast would cut 2.7 to 2 and never say so: TypeError."""
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must hold integers (int64), got {tensor.dtype}")


def check_mask(name: str, mask: Tensor) -> None:
    """Real and without NaN or infinities, which no threshold reads as meant: TypeError, ValueError."""
    if mask.is_complex():
        raise TypeError(f"{name} must be boolean or real, got {mask.dtype}")
    if not mask.is_floating_point():
        return
    finite = mask.isfinite()
    if not bool(finite.all()):
        first = (~finite).nonzero()[0].tolist()
        raise ValueError(f"{name} holds {float(mask[tuple(first)])} at {first}: a mask must be finite")


def check_one_device(**tensors: Tensor | None) -> None:
    """ValueError unless all tensors that are given are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(f'{name} on {at}' for name, at in devices.items())}")


def check_anchors_inside(anchor_positions: Tensor, seq_len: int, keep_mask: Tensor | None = None) -> None:
    """IndexError for an anchor outside [0, S); blocks whose `keep_mask` is False are dummies and may hold any position."""
    outside = (anchor_positions < 0) | (anchor_positions >= seq_len)
    if keep_mask is not None:
        outside = outside & keep_mask
    if bool(outside.any()):
        row, block = outside.nonzero()[0].tolist()
        raise IndexError(
            f"anchor_positions holds {int(anchor_positions[row, block])} in row {row}, block {block} ({int(outside.sum())} blocks "
            f"outside), but rows have {seq_len} positions: anchors of real blocks are in [0, {seq_len})"
        )


def integer_list(name: str, values: object) -> list[int]:
    """A sequence, tensor or array of integers as a list: ValueError for anything else."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, str) or not hasattr(listed, "__iter__"):
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}")
    items = [item.item() if isinstance(item, Tensor) and item.numel() == 1 else item for item in listed]
    wrong = [item for item in items if isinstance(item, bool) or not isinstance(item, Integral)]
    if wrong:
        raise ValueError(f"{name} must be integers, got {wrong}")
    return [int(item) for item in items]
