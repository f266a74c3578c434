"""Argument checks of the draft losses, in the documented order, before any work; each message holds the offending shape or dtype.

Shapes: T rows, V vocabulary columns of this rank, H hidden size, B bins, N blocks, K block slots, S teacher positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xtok.losses.argument_checks import check_chunk_size, check_real, mask_scale, require_tensors
from xtok.losses.soft_ce import Supervision
from xtok.losses.tiles import compute_dtype

__all__ = ["DraftBins", "check_dflash", "check_projected", "check_unprojected", "resolve_draft_bins"]


class DraftBins:
    """Checked bins. supervision: the rows that count; counts [B] and weights [B], detached, in the compute dtype."""

    def __init__(self, supervision: Supervision, counts: Tensor, weights: Tensor) -> None:
        self.supervision = supervision
        self.counts = counts
        self.weights = weights


def check_unprojected(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    token_chunk_size: int,
    bin_ids: Tensor | None,
    weights: Tensor | None,
) -> DraftBins:
    """Checks of `streaming_vocab_parallel_soft_ce`."""
    require_tensors(student_logits=student_logits, teacher_logits=teacher_logits, mask=mask)
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits has shape {_shape(student_logits)}, teacher_logits {_shape(teacher_logits)}: they must be equal"
        )
    _check_rows("student_logits", student_logits)
    _check_mask(mask, "student_logits", student_logits)
    _check_devices(student_logits=student_logits, teacher_logits=teacher_logits, mask=mask)
    bins = resolve_draft_bins(mask, token_chunk_size, bin_ids, weights, student_logits.dtype)
    _check_floating(student_logits=student_logits, teacher_logits=teacher_logits)
    return bins


def check_projected(
    student_hidden: Tensor,
    output_weight: Tensor,
    selected_teacher_logits: Tensor,
    mask: Tensor,
    token_chunk_size: int,
    bin_ids: Tensor | None,
    weights: Tensor | None,
) -> DraftBins:
    """Rank-local checks of `projected_streaming_vocab_parallel_soft_ce`."""
    tensors = {
        "student_hidden": student_hidden,
        "output_weight": output_weight,
        "selected_teacher_logits": selected_teacher_logits,
    }
    require_tensors(**tensors, mask=mask)
    _check_rows("student_hidden", student_hidden)
    _check_head(output_weight, "student_hidden", student_hidden)
    _check_rows("selected_teacher_logits", selected_teacher_logits)
    wanted = (*student_hidden.shape[:-1], output_weight.shape[0])
    if tuple(selected_teacher_logits.shape) != wanted:
        raise ValueError(
            f"selected_teacher_logits has shape {_shape(selected_teacher_logits)}, must be {wanted}: the rows of student_hidden "
            f"{_shape(student_hidden)} by the vocabulary columns of output_weight {_shape(output_weight)}"
        )
    _check_mask(mask, "student_hidden", student_hidden)
    _check_devices(**tensors, mask=mask)
    _check_floating(**tensors)
    _check_head_dtype(output_weight, "student_hidden", student_hidden)
    if student_hidden.ndim > 4:
        raise ValueError(
            f"student_hidden has {student_hidden.ndim} dims, shape {_shape(student_hidden)}: at most 4 are supported"
        )
    return resolve_draft_bins(mask, token_chunk_size, bin_ids, weights, student_hidden.dtype)


def check_dflash(
    draft_hidden: Tensor,
    output_weight: Tensor,
    teacher_logits: Tensor,
    sample_rows: Tensor,
    label_positions: Tensor,
    loss_mask: Tensor,
    position_decay: float,
    token_chunk_size: int,
) -> None:
    """Rank-local checks of `dflash_projected_vocab_parallel_soft_ce`, coordinates aside. N = 0 is legal."""
    floating = {"draft_hidden": draft_hidden, "output_weight": output_weight, "teacher_logits": teacher_logits}
    integral = {"sample_rows": sample_rows, "label_positions": label_positions, "loss_mask": loss_mask}
    require_tensors(**floating, **integral)
    if draft_hidden.ndim != 3 or draft_hidden.shape[1] < 2 or draft_hidden.shape[2] < 1:
        raise ValueError(f"draft_hidden has shape {_shape(draft_hidden)}, must be [N, gamma + 1, H] with gamma and H at least 1")
    _check_head(output_weight, "draft_hidden", draft_hidden)
    if teacher_logits.ndim != 3 or not teacher_logits.numel():
        raise ValueError(f"teacher_logits has shape {_shape(teacher_logits)}, must be a non-empty [B, S, V]")
    if teacher_logits.shape[-1] != output_weight.shape[0]:
        raise ValueError(
            f"teacher_logits has shape {_shape(teacher_logits)}, its last dimension must be the {output_weight.shape[0]} vocabulary "
            f"columns of output_weight {_shape(output_weight)}"
        )
    num_blocks, num_slots, _ = draft_hidden.shape
    expected = {
        "sample_rows": (sample_rows, (num_blocks,), torch.int64),
        "label_positions": (label_positions, (num_blocks, num_slots), torch.int64),
        "loss_mask": (loss_mask, (num_blocks, num_slots), torch.bool),
    }
    for name, (tensor, shape, _) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {_shape(tensor)}, must be {shape} for draft_hidden {_shape(draft_hidden)}")
    _check_devices(**floating, **integral)
    _check_floating(**floating)
    _check_head_dtype(output_weight, "draft_hidden", draft_hidden)
    for name, (tensor, _, dtype) in expected.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}, must be {dtype}")
    if isinstance(position_decay, bool) or not isinstance(position_decay, int | float):
        raise TypeError(f"position_decay is {position_decay!r}, must be a number above 0 and at most 1")
    if not 0.0 < position_decay <= 1.0 or math.isnan(position_decay):
        raise ValueError(f"position_decay is {position_decay}, must be above 0 and at most 1")
    check_chunk_size(token_chunk_size)


def resolve_draft_bins(
    mask: Tensor,
    token_chunk_size: int,
    bin_ids: Tensor | None,
    weights: Tensor | None,
    student_dtype: torch.dtype,
) -> DraftBins:
    """Check chunk size, weights, bins and the mask's values, and compact the rows whose mask is not 0.

    weights None is one bin of weight 1; bin_ids None puts every row into bin 0.
    """
    check_chunk_size(token_chunk_size)
    require_tensors(**{name: given for name, given in (("bin_ids", bin_ids), ("weights", weights)) if given is not None})
    if weights is not None and (weights.ndim != 1 or not weights.numel()):
        raise ValueError(f"weights has shape {_shape(weights)}, must be a non-empty vector: one weight a bin")
    num_bins = 1 if weights is None else weights.numel()
    if bin_ids is None and num_bins > 1:
        raise ValueError(
            f"bin_ids is missing, but weights has shape {_shape(weights)}: say which of the {num_bins} bins each row is in"
        )
    if bin_ids is not None:
        _check_bin_ids(bin_ids, mask)
    check_real(weights=weights)
    if weights is not None and weights.is_meta:
        _check_devices(mask=mask, weights=weights)  # from any other device they are brought along
    dtype = compute_dtype(student_dtype)
    scale = mask_scale("mask", mask, dtype)
    rows: Tensor | None = scale.nonzero().squeeze(-1)
    if rows is not None and rows.numel() == scale.numel():
        rows = None
    scale = scale if rows is None else scale[rows]
    if bin_ids is None:
        row_bins = torch.zeros(scale.shape, dtype=torch.int64, device=mask.device)
    else:
        row_bins = bin_ids.reshape(-1) if rows is None else bin_ids.reshape(-1)[rows]
        _check_bin_range(row_bins, num_bins)
    counts = scale.new_zeros(num_bins).index_add_(0, row_bins, scale)
    bin_weights = scale.new_ones(1) if weights is None else weights.detach().to(device=mask.device, dtype=dtype).clone()
    return DraftBins(Supervision(rows, scale, row_bins, num_bins), counts, bin_weights)


def _check_bin_ids(bin_ids: Tensor, mask: Tensor) -> None:
    if bin_ids.shape != mask.shape:
        raise ValueError(f"bin_ids has shape {_shape(bin_ids)}, must be that of mask, {_shape(mask)}")
    if bin_ids.dtype != torch.int64:
        raise TypeError(f"bin_ids has dtype {bin_ids.dtype}, must be torch.int64")
    _check_devices(mask=mask, bin_ids=bin_ids)


def _check_bin_range(row_bins: Tensor, num_bins: int) -> None:
    outside = row_bins[(row_bins < 0) | (row_bins >= num_bins)]
    if outside.numel():
        raise ValueError(
            f"bin_ids holds {int(outside[0])} in a supervised row ({outside.numel()} rows outside), must be in [0, {num_bins})"
        )


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.ndim < 2 or not tensor.numel():
        raise ValueError(f"{name} has shape {_shape(tensor)}, must have at least 2 dims and not be empty")


def _check_head(output_weight: Tensor, hidden_name: str, hidden: Tensor) -> None:
    if output_weight.ndim != 2 or not output_weight.numel():
        raise ValueError(f"output_weight has shape {_shape(output_weight)}, must be a non-empty [V, H]")
    if output_weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"output_weight has shape {_shape(output_weight)}, its hidden size must be the last dimension of {hidden_name} "
            f"{_shape(hidden)}"
        )


def _check_mask(mask: Tensor, rows_name: str, rows: Tensor) -> None:
    if mask.shape != rows.shape[:-1]:
        raise ValueError(
            f"mask has shape {_shape(mask)}, must be {tuple(rows.shape[:-1])}, the rows of {rows_name} {_shape(rows)}"
        )


def _check_devices(**tensors: Tensor) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(f'{name} on {at}' for name, at in devices.items())}")


def _check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}, must be floating point")


def _check_head_dtype(output_weight: Tensor, hidden_name: str, hidden: Tensor) -> None:
    if output_weight.dtype != hidden.dtype:
        raise ValueError(f"{hidden_name} has dtype {hidden.dtype}, output_weight {output_weight.dtype}: convert one to the other")


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
