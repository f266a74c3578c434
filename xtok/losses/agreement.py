"""Tensor-parallel agreement: every rank of a group sees the same arguments, or all of them raise the same error.

A loss under tensor parallelism runs collectives whose sizes follow from its arguments. One rank with another mask, or one rank that
stops in its own validation, would leave the others waiting for ever. So before anything else each rank

1. validates its own arguments and keeps the verdict;
2. exchanges one fixed int64 header: of each tensor presence, ndim, dims, dtype and device kind; of each scalar its kind and bits;
   and a digest of the verdict. A difference raises ValueError naming the field; a fault of some ranks only raises ValueError naming
   rank and fault; a fault all ranks share raises as it is;
3. compares the exact values of the small integer and mask tensors (one MAX reduction).

Two collectives when all is well, one more to tell the others what a faulty rank found.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["agree_across_ranks", "dtype_header_code", "float64_bits"]

Result = TypeVar("Result")

_MAX_DIMS = 4
_UNCOMPARED = -1
_MESSAGE_BYTES = 1024
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_DEVICE_KINDS = ("cpu", "cuda", "meta", "mps", "xpu")
_TENSOR_COLUMNS = ("presence", "ndim", *(f"dim {axis}" for axis in range(_MAX_DIMS)), "dtype", "device")


def dtype_header_code(dtype: torch.dtype) -> int:
    """A positive int64 for each dtype: a small one for those of the table, else 56 bits of a digest of its name."""
    if dtype in _DTYPES:
        return _DTYPES.index(dtype) + 1
    return _digest(str(dtype)) | 1 << 60


def float64_bits(value: float) -> int:
    """The IEEE-754 bit pattern of a float as a signed integer: NaN equals NaN, and 0.8 differs from its neighbour."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def agree_across_ranks(
    *,
    tp_group: dist.ProcessGroup | None,
    validate: Callable[[], Result],
    tensors: Mapping[str, Tensor | None],
    scalars: Mapping[str, object],
    exact_values: Sequence[str],
    vocabulary_axes: Mapping[str, int],
) -> Result:
    """Return `validate()` when every rank of `tp_group` was given the same arguments, else raise the same error on all of them.

    tensors: name -> tensor or None, in one order on all ranks. scalars: name -> int, bool, float or anything with a repr.
    exact_values: names of `tensors` whose every element is compared, bit for bit (identical NaNs agree).
    vocabulary_axes: name -> axis that holds a shard of the vocabulary and may differ in size.
    Without a group of several ranks this is `validate()` alone. Raises ValueError for a difference or for a fault of some ranks.
    """
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return validate()
    verdict = _judge(validate)
    names, header = _header(tensors, scalars, vocabulary_axes, verdict)
    gathered = _gather(header, tp_group)
    _raise_on_difference(names, gathered[:, :-1])
    verdicts = gathered[:, -1]
    if bool((verdicts != verdicts[0]).any()):
        _raise_fault_of_some(verdicts, verdict, tp_group)
    if verdict.error is not None:
        raise verdict.error
    _compare_values({name: tensors[name] for name in exact_values}, tp_group)
    return verdict.result  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What rank-local validation said: a result or an error."""

    result: object
    error: Exception | None

    @property
    def code(self) -> int:
        return 0 if self.error is None else _digest(f"{type(self.error).__name__}: {self.error}") | 1 << 60


def _judge(validate: Callable[[], object]) -> _Verdict:
    try:
        return _Verdict(validate(), None)
    except Exception as error:  # whatever it is, the other ranks are about to wait for this one
        return _Verdict(None, error)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _header(
    tensors: Mapping[str, Tensor | None],
    scalars: Mapping[str, object],
    vocabulary_axes: Mapping[str, int],
    verdict: _Verdict,
) -> tuple[list[tuple[str, str]], Tensor]:
    """Field names (argument, property) and the int64 header; the last entry is the verdict and has no name."""
    names: list[tuple[str, str]] = []
    values: list[int] = []
    for name, tensor in tensors.items():
        names += [(name, column) for column in _TENSOR_COLUMNS]
        values += _describe(tensor, vocabulary_axes.get(name))
    for name, scalar in scalars.items():
        names += [(name, "type"), (name, "value")]
        values += _encode_scalar(scalar)
    return names, torch.tensor([*values, verdict.code], dtype=torch.int64)


def _describe(tensor: object, vocabulary_axis: int | None) -> list[int]:
    if tensor is None:
        return [0] * len(_TENSOR_COLUMNS)
    if not isinstance(tensor, Tensor):
        return [2, _digest(type(tensor).__name__)] + [0] * (len(_TENSOR_COLUMNS) - 2)
    dims = [int(size) for size in tensor.shape]
    if vocabulary_axis is not None and dims:
        dims[vocabulary_axis if -len(dims) <= vocabulary_axis < len(dims) else -1] = _UNCOMPARED
    dims = dims[:_MAX_DIMS] + [0] * (_MAX_DIMS - len(dims))
    kind = tensor.device.type
    device = _DEVICE_KINDS.index(kind) + 1 if kind in _DEVICE_KINDS else _digest(kind)
    return [1, tensor.ndim, *dims, dtype_header_code(tensor.dtype), device]


def _encode_scalar(scalar: object) -> tuple[int, int]:
    if isinstance(scalar, bool):
        return 1, int(scalar)
    if isinstance(scalar, int) and -(1 << 63) <= scalar < 1 << 63:
        return 2, scalar
    if isinstance(scalar, float):
        return 3, float64_bits(scalar)
    return 4, _digest(repr(scalar))


def _group_device(tp_group: dist.ProcessGroup) -> torch.device:
    """Where this group's collectives run, whatever device a faulty argument is on."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(tp_group) == "nccl" else torch.device("cpu")


def _gather(values: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...] on the CPU."""
    local = values.to(_group_device(tp_group))
    gathered = local.new_empty(dist.get_world_size(tp_group), *local.shape)
    dist.all_gather(list(gathered.unbind(0)), local, group=tp_group)
    return gathered.cpu()


def _raise_on_difference(names: Sequence[tuple[str, str]], gathered: Tensor) -> None:
    differing = (gathered != gathered[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return
    name, column = names[differing[0]]
    others = sorted({names[index][0] for index in differing} - {name})
    also = f" (also different: {', '.join(others)})" if others else ""
    values = [_decode(column, gathered[rank, : len(names)], differing[0]) for rank in range(gathered.shape[0])]
    raise ValueError(
        f"tensor-parallel ranks disagree on {name}: {column} by rank is {', '.join(values)}{also}; every rank of the group must "
        "pass the same hidden rows, masks, bins and settings, and its own columns of the vocabulary"
    )


def _decode(column: str, header: Tensor, index: int) -> str:
    """A header entry in the reader's words."""
    value = int(header[index])
    if column == "presence":
        return ("None", "a tensor", "no tensor")[value]
    if column == "dtype":
        return str(_DTYPES[value - 1]) if 0 < value <= len(_DTYPES) else f"dtype code {value}"
    if column == "device":
        return _DEVICE_KINDS[value - 1] if 0 < value <= len(_DEVICE_KINDS) else f"device code {value}"
    if column == "value" and int(header[index - 1]) == 3:
        return repr(struct.unpack("<d", struct.pack("<q", value))[0])
    return str(value)


def _raise_fault_of_some(verdicts: Tensor, verdict: _Verdict, tp_group: dist.ProcessGroup) -> None:
    """Every rank is here: let the first faulty one tell the others what it found."""
    text = b"" if verdict.error is None else f"{type(verdict.error).__name__}: {verdict.error}".encode()[:_MESSAGE_BYTES]
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    messages = _gather(message, tp_group)
    faulty = (verdicts != 0).nonzero().flatten().tolist()
    found = bytes(messages[faulty[0]].tolist()).rstrip(b"\0").decode(errors="replace")
    raise ValueError(
        f"tensor-parallel rank {faulty[0]} refused its arguments (ranks at fault: {faulty}): {found}"
    ) from verdict.error


def _compare_values(tensors: Mapping[str, Tensor | None], tp_group: dist.ProcessGroup) -> None:
    """Raise the same ValueError on every rank unless all elements are equal bit for bit. Shapes and dtypes agree already."""
    lanes = {name: _integer_lanes(tensor) for name, tensor in tensors.items() if tensor is not None}
    if not sum(lane.numel() for lane in lanes.values()):
        return
    values = torch.cat(list(lanes.values())).to(_group_device(tp_group))
    # max(x) and max(~x) over ranks determine the largest and the smallest value: one reduction for both.
    extremes = torch.stack((values, ~values))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=tp_group)
    differing = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
    if not differing:
        return
    start = 0
    for name, lane in lanes.items():
        inside = [index - start for index in differing if start <= index < start + lane.numel()]
        if inside:
            raise ValueError(
                f"tensor-parallel ranks disagree on the values of {name}: {len(inside)} of {lane.numel()} differ, the first at "
                f"flat index {inside[0]}; every rank of the group must pass the same {name}"
            )
        start += lane.numel()


def _integer_lanes(tensor: Tensor) -> Tensor:
    """Every element as int64 by its bits, [numel or more]; equal lanes mean equal bits."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.dtype == torch.bool or not (flat.is_floating_point() or flat.is_complex()):
        return flat.to(torch.int64)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(widths.get(flat.element_size(), torch.uint8)).to(torch.int64)
