"""Validation of the DSpark objective's inputs, before any work, on all tensor-parallel ranks alike.

Shapes: [...] leading dims (T rows once flattened), Vl vocabulary columns of this rank, H hidden size, r bias feature width,
M teacher rows, B_ bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class DSparkInputs:
    """The arguments of `dspark_projected_vocab_parallel_loss` as they came."""

    student_hidden: Tensor
    output_weight: Tensor
    teacher_logits: Tensor
    target_ids: Tensor
    mask: Tensor
    teacher_rows: Tensor | None
    bias_features: Tensor | None
    bias_weight: Tensor | None
    confidence_logits: Tensor | None
    bin_ids: Tensor | None
    weights: Tensor | None
    token_chunk_size: int
    logit_softcap: float | None

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.student_hidden.shape[:-1])


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """Defaults filled in and rows flattened: T rows, of which `active` are supervised."""

    num_rows: int
    active: Tensor  # int64 [T'] rows whose mask is not 0
    row_weights: Tensor  # [T] mask in the accumulation dtype
    teacher_rows: Tensor  # int64 [T]
    bin_ids: Tensor  # int64 [T]
    weights: Tensor  # [B_]
    vocab_start: int


def check_inputs(inputs: DSparkInputs, tp_group: dist.ProcessGroup | None) -> CheckedInputs:
    """Validate, agree over `tp_group`, and fill in defaults. Raises as the loss documents."""
    _check_local(inputs)
    vocab_start, vocab_size = _vocabulary_place(inputs, tp_group)
    flat_mask = inputs.mask.detach().reshape(-1)
    active = flat_mask.nonzero().squeeze(1)
    num_rows = flat_mask.numel()
    accumulate = torch.float64 if inputs.student_hidden.dtype == torch.float64 else torch.float32
    checked = CheckedInputs(
        num_rows=num_rows,
        active=active,
        row_weights=flat_mask.to(accumulate),
        teacher_rows=_flat(inputs.teacher_rows, torch.arange(num_rows, device=active.device)),
        bin_ids=_flat(inputs.bin_ids, torch.zeros(num_rows, dtype=torch.int64, device=active.device)),
        weights=torch.ones(1, device=active.device) if inputs.weights is None else inputs.weights.detach(),
        vocab_start=vocab_start,
    )
    num_teacher_rows = inputs.teacher_logits.shape[:-1].numel()
    _check_range("target_ids", inputs.target_ids.reshape(-1)[active], vocab_size)
    _check_range("teacher_rows", checked.teacher_rows[active], num_teacher_rows)
    _check_range("bin_ids", checked.bin_ids[active], len(checked.weights))
    return checked


def _flat(tensor: Tensor | None, default: Tensor) -> Tensor:
    return default if tensor is None else tensor.reshape(-1)


def _check_local(inputs: DSparkInputs) -> None:
    hidden, head, teacher = inputs.student_hidden, inputs.output_weight, inputs.teacher_logits
    if not 2 <= hidden.ndim <= _MAX_DIMS or hidden.shape[-1] == 0:
        raise ValueError(f"student_hidden must be [..., H] of 2 to {_MAX_DIMS} dims with H >= 1, got {tuple(hidden.shape)}")
    if head.ndim != 2 or head.numel() == 0:
        raise ValueError(f"output_weight must be a non-empty [Vl, H], got {tuple(head.shape)}")
    if head.shape[1] != hidden.shape[-1]:
        raise ValueError(f"student_hidden has H={hidden.shape[-1]}, output_weight has H={head.shape[1]}")
    if teacher.ndim < 2 or teacher.shape[-1] != head.shape[0]:
        raise ValueError(f"teacher_logits must end in Vl={head.shape[0]} columns, got {tuple(teacher.shape)}")
    if inputs.teacher_rows is None and tuple(teacher.shape[:-1]) != inputs.leading:
        raise ValueError(
            f"teacher_logits must be {(*inputs.leading, head.shape[0])}, got {tuple(teacher.shape)}; "
            "rows in another order need teacher_rows"
        )
    _check_rows(inputs)
    _check_bias(inputs)
    _check_dtypes(inputs)
    if inputs.token_chunk_size < 1:
        raise ValueError(f"token_chunk_size must be at least 1, got {inputs.token_chunk_size}")
    cap = inputs.logit_softcap
    if cap is not None and not (cap > 0 and math.isfinite(cap)):
        raise ValueError(f"logit_softcap must be positive and finite, or None, got {cap}")
    if inputs.weights is not None and (inputs.weights.ndim != 1 or inputs.weights.numel() == 0):
        raise ValueError(f"weights must be a non-empty vector, got {tuple(inputs.weights.shape)}")
    if inputs.bin_ids is None and inputs.weights is not None and len(inputs.weights) > 1:
        raise ValueError(f"{len(inputs.weights)} weights need bin_ids")


def _check_rows(inputs: DSparkInputs) -> None:
    named = (
        ("mask", inputs.mask),
        ("target_ids", inputs.target_ids),
        ("teacher_rows", inputs.teacher_rows),
        ("confidence_logits", inputs.confidence_logits),
        ("bin_ids", inputs.bin_ids),
    )
    for name, tensor in named:
        if tensor is not None and tuple(tensor.shape) != inputs.leading:
            raise ValueError(f"{name} must be {inputs.leading}, got {tuple(tensor.shape)}")
    everything = (*named, ("output_weight", inputs.output_weight), ("teacher_logits", inputs.teacher_logits))
    everything += (("bias_features", inputs.bias_features), ("bias_weight", inputs.bias_weight), ("weights", inputs.weights))
    for name, tensor in everything:
        if tensor is not None and tensor.device != inputs.student_hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, student_hidden on {inputs.student_hidden.device}")


def _check_bias(inputs: DSparkInputs) -> None:
    features, weight = inputs.bias_features, inputs.bias_weight
    if (features is None) != (weight is None):
        raise ValueError("bias_features and bias_weight belong together: pass both or neither")
    if features is None or weight is None:
        return
    if tuple(features.shape[:-1]) != inputs.leading:
        raise ValueError(f"bias_features must be {(*inputs.leading, 'r')}, got {tuple(features.shape)}")
    if tuple(weight.shape) != (inputs.output_weight.shape[0], features.shape[-1]):
        expected = (inputs.output_weight.shape[0], features.shape[-1])
        raise ValueError(f"bias_weight must be [Vl, r] = {expected}, got {tuple(weight.shape)}")


def _check_dtypes(inputs: DSparkInputs) -> None:
    hidden = inputs.student_hidden
    for name, floating in (("student_hidden", hidden), ("teacher_logits", inputs.teacher_logits)):
        if not floating.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {floating.dtype}")
    if inputs.output_weight.dtype != hidden.dtype:
        raise ValueError(f"output_weight is {inputs.output_weight.dtype}, student_hidden {hidden.dtype}: they must be equal")
    for name, bias in (("bias_features", inputs.bias_features), ("bias_weight", inputs.bias_weight)):
        if bias is not None and bias.dtype != hidden.dtype:
            raise ValueError(f"{name} is {bias.dtype}, student_hidden {hidden.dtype}: they must be equal")
    ids = (("target_ids", inputs.target_ids), ("teacher_rows", inputs.teacher_rows), ("bin_ids", inputs.bin_ids))
    for name, tensor in ids:
        if tensor is not None and tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")


def _vocabulary_place(inputs: DSparkInputs, tp_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(first vocabulary id of this rank, size of the whole vocabulary), from the shard widths in rank order."""
    width = inputs.output_weight.shape[0]
    if tp_group is None:
        return 0, width
    widths = torch.zeros(dist.get_world_size(tp_group), dtype=torch.int64, device=inputs.student_hidden.device)
    rank = dist.get_rank(tp_group)
    widths[rank] = width
    dist.all_reduce(widths, group=tp_group)
    return int(widths[:rank].sum()), int(widths.sum())


def _check_range(name: str, values: Tensor, size: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= size):
        worst = int(values.min()) if int(values.min()) < 0 else int(values.max())
        raise IndexError(f"{name} holds {worst} at a supervised row; legal are 0..{size - 1}")
