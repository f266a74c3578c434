"""Validation of the DSpark objective's inputs, before any work, on all tensor-parallel ranks alike.

Shapes: [...] leading dims (T rows once flattened), Vl vocabulary columns of this rank, H hidden size, r bias feature width,
M teacher rows, B_ bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from xtok.losses.agreement import agree_across_ranks
from xtok.losses.argument_checks import check_chunk_size, check_real, mask_scale, require_tensors
from xtok.losses.tiles import compute_dtype

__all__ = ["CheckedInputs", "DSparkInputs", "check_inputs", "vocabulary_place"]

_MAX_DIMS = 4
_TENSORS = (
    "student_hidden",
    "output_weight",
    "teacher_logits",
    "teacher_hidden",
    "target_ids",
    "mask",
    "teacher_rows",
    "bias_features",
    "bias_weight",
    "confidence_logits",
    "bin_ids",
    "weights",
)
_REQUIRED = ("student_hidden", "output_weight", "target_ids", "mask")


@dataclass(frozen=True, slots=True)
class DSparkInputs:
    """The arguments of `dspark_projected_vocab_parallel_loss` as they came."""

    student_hidden: Tensor
    output_weight: Tensor
    teacher_logits: Tensor | None
    teacher_hidden: Tensor | None
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
    def teacher(self) -> Tensor:
        """The one of `teacher_logits` and `teacher_hidden` that was given."""
        given = [tensor for tensor in (self.teacher_logits, self.teacher_hidden) if tensor is not None]
        if len(given) != 1:
            raise ValueError(f"pass exactly one of teacher_logits and teacher_hidden, got {len(given)}")
        return given[0]

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.student_hidden.shape[:-1])


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """Defaults filled in and rows flattened: T rows, of which `active` are supervised."""

    num_rows: int
    teacher: Tensor  # [M, Vl] logits or [M, H] hidden states
    active: Tensor  # int64 [T'] rows whose mask is not 0
    row_weights: Tensor  # [T] mask in the accumulation dtype
    teacher_rows: Tensor  # int64 [T]
    bin_ids: Tensor  # int64 [T]
    weights: Tensor  # [B_]
    vocab_start: int


def check_inputs(inputs: DSparkInputs, tp_group: dist.ProcessGroup | None) -> CheckedInputs:
    """Validate, agree over `tp_group`, and fill in defaults. Raises as the loss documents, on all ranks alike."""
    needs_gradient = ("student_hidden", "bias_features", "bias_weight")
    wants = {f"{name}.requires_grad": _wants_gradient(getattr(inputs, name)) for name in needs_gradient}
    checked = agree_across_ranks(
        tp_group=tp_group,
        validate=lambda: _check_local(inputs),
        tensors={name: getattr(inputs, name) for name in _TENSORS},
        scalars={"token_chunk_size": inputs.token_chunk_size, "logit_softcap": inputs.logit_softcap, **wants},
        exact_values=("target_ids", "mask", "teacher_rows", "bin_ids", "weights"),
        vocabulary_axes={"output_weight": 0, "teacher_logits": -1, "bias_weight": 0},
    )
    vocab_start, vocab_size = vocabulary_place(inputs.output_weight.shape[0], tp_group, inputs.student_hidden.device)
    # The whole vocabulary is known on every rank only now, and every rank holds the same ids: all raise or none.
    _check_range("target_ids", inputs.target_ids.reshape(-1)[checked.active], vocab_size, IndexError)
    return replace(checked, vocab_start=vocab_start)


def _wants_gradient(tensor: object) -> bool:
    return torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad


def _flat(tensor: Tensor | None, default: Tensor) -> Tensor:
    return default if tensor is None else tensor.reshape(-1)


def _check_local(inputs: DSparkInputs) -> CheckedInputs:
    """Rank-local validation and defaults; the place in the vocabulary is filled in later."""
    given = {name: getattr(inputs, name) for name in _TENSORS}
    require_tensors(**{name: value for name, value in given.items() if value is not None or name in _REQUIRED})
    _check_head_and_teacher(inputs)
    _check_rows(inputs)
    _check_bias(inputs)
    _check_dtypes(inputs)
    _check_settings(inputs)
    teacher = inputs.teacher.detach()
    teacher = teacher.reshape(-1, teacher.shape[-1])
    row_weights = mask_scale("mask", inputs.mask, compute_dtype(inputs.student_hidden.dtype))
    active, num_rows = row_weights.nonzero().squeeze(1), row_weights.numel()
    checked = CheckedInputs(
        num_rows=num_rows,
        teacher=teacher,
        active=active,
        row_weights=row_weights,
        teacher_rows=_flat(inputs.teacher_rows, torch.arange(num_rows, device=active.device)),
        bin_ids=_flat(inputs.bin_ids, torch.zeros(num_rows, dtype=torch.int64, device=active.device)),
        weights=torch.ones(1, device=active.device) if inputs.weights is None else inputs.weights.detach(),
        vocab_start=0,
    )
    _check_range("teacher_rows", checked.teacher_rows[active], len(teacher), IndexError)
    _check_range("bin_ids", checked.bin_ids[active], len(checked.weights), ValueError)
    return checked


def _check_head_and_teacher(inputs: DSparkInputs) -> None:
    hidden, head, teacher = inputs.student_hidden, inputs.output_weight, inputs.teacher
    if not 2 <= hidden.ndim <= _MAX_DIMS or hidden.shape[-1] == 0:
        raise ValueError(f"student_hidden must be [..., H] of 2 to {_MAX_DIMS} dims with H >= 1, got {tuple(hidden.shape)}")
    if head.ndim != 2 or head.numel() == 0:
        raise ValueError(f"output_weight must be a non-empty [Vl, H], got {tuple(head.shape)}")
    if head.shape[1] != hidden.shape[-1]:
        raise ValueError(f"student_hidden has H={hidden.shape[-1]}, output_weight has H={head.shape[1]}")
    name, width = ("teacher_logits", head.shape[0]) if inputs.teacher_hidden is None else ("teacher_hidden", head.shape[1])
    if teacher.ndim < 2 or teacher.shape[-1] != width:
        raise ValueError(f"{name} must end in {width} columns, got {tuple(teacher.shape)}")
    if inputs.teacher_rows is None and tuple(teacher.shape[:-1]) != inputs.leading:
        raise ValueError(
            f"{name} must be {(*inputs.leading, width)}, got {tuple(teacher.shape)}; rows in another order need teacher_rows"
        )


def _check_settings(inputs: DSparkInputs) -> None:
    check_chunk_size(inputs.token_chunk_size)
    cap = inputs.logit_softcap
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float)):
        raise TypeError(f"logit_softcap must be a number or None, got {cap!r}")
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
    for name in _TENSORS:
        tensor = getattr(inputs, name)
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
    teacher_name = "teacher_logits" if inputs.teacher_hidden is None else "teacher_hidden"
    for name, floating in (("student_hidden", hidden), (teacher_name, inputs.teacher)):
        if not floating.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {floating.dtype}")
    if inputs.output_weight.dtype != hidden.dtype:
        raise ValueError(f"output_weight is {inputs.output_weight.dtype}, student_hidden {hidden.dtype}: they must be equal")
    same = ("bias_features", inputs.bias_features), ("bias_weight", inputs.bias_weight), ("teacher_hidden", inputs.teacher_hidden)
    for name, tensor in same:
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, student_hidden {hidden.dtype}: they must be equal")
    confidence = inputs.confidence_logits
    if confidence is not None and not confidence.is_floating_point():
        raise TypeError(f"confidence_logits must be floating point, got {confidence.dtype}")
    check_real(weights=inputs.weights)
    ids = (("target_ids", inputs.target_ids), ("teacher_rows", inputs.teacher_rows), ("bin_ids", inputs.bin_ids))
    for name, tensor in ids:
        if tensor is not None and tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")


def vocabulary_place(width: int, tp_group: dist.ProcessGroup | None, device: torch.device) -> tuple[int, int]:
    """(first vocabulary id of this rank, size of the whole vocabulary), from the shard widths in rank order."""
    if tp_group is None:
        return 0, width
    widths = torch.zeros(dist.get_world_size(tp_group), dtype=torch.int64, device=device)
    rank = dist.get_rank(tp_group)
    widths[rank] = width
    dist.all_reduce(widths, group=tp_group)
    return int(widths[:rank].sum()), int(widths.sum())


def _check_range(name: str, values: Tensor, size: int, error: type[Exception]) -> None:
    outside = values[(values < 0) | (values >= size)]
    if outside.numel():
        raise error(
            f"{name} holds {int(outside[0])} in a supervised row ({outside.numel()} rows outside), must be in [0, {size})"
        )
