"""Metadata agreement: whatever differs on one rank, and whatever only one rank can see, raises the same error on all, in seconds."""

from __future__ import annotations

import pytest
import torch

from tests.dist.draft_cases import run_changed, run_unknown_dtypes
from tests.dist.harness import ranks
from xtok.losses.agreement import dtype_header_code, float64_bits

# change -> the field that the error names
PROJECTED = {
    "hidden rows": "student_hidden",
    "hidden size": "student_hidden",
    "hidden ndim": "student_hidden",
    "hidden dtype": "student_hidden",
    "hidden device": "student_hidden",
    "hidden without gradient": "student_hidden.requires_grad",
    "head hidden size": "output_weight",
    "head ndim": "output_weight",
    "head dtype": "output_weight",
    "teacher rows": "selected_teacher_logits",
    "teacher dtype": "selected_teacher_logits",
    "teacher unknown dtype": "selected_teacher_logits",
    "mask shape": "mask",
    "mask dtype": "mask",
    "mask device": "mask",
    "mask missing": "mask",
    "mask not a tensor": "mask",
    "mask value": "mask",
    "bins missing": "bin_ids",
    "bins shape": "bin_ids",
    "bins dtype": "bin_ids",
    "bins value": "bin_ids",
    "weights missing": "weights",
    "weights shape": "weights",
    "weights dtype": "weights",
    "weights value": "weights",
    "weights NaN": "weights",
    "chunk size": "token_chunk_size",
    "chunk size zero": "token_chunk_size",
    "chunk size type": "token_chunk_size",
}
PROJECTED_FAULTS = {"teacher columns": "selected_teacher_logits", "head columns": "output_weight", "bins out of range": "bin_ids"}
DFLASH = {
    "decay": "position_decay",
    "decay NaN": "position_decay",
    "chunk size": "token_chunk_size",
    "blocks": "draft_hidden",
    "slots": "draft_hidden",
    "head hidden size": "output_weight",
    "teacher sequences": "teacher_logits",
    "teacher positions": "teacher_logits",
    "rows value": "sample_rows",
    "rows dtype": "sample_rows",
    "positions value": "label_positions",
    "positions shape": "label_positions",
    "loss mask value": "loss_mask",
    "loss mask dtype": "loss_mask",
    "loss mask missing": "loss_mask",
}
DFLASH_FAULTS = {
    "dflash teacher columns": "teacher_logits",
    "head columns": "output_weight",
    "rows outside": "sample_rows",
    "positions outside": "label_positions",
    "positions below int64": "label_positions -9223372036854775808",
}
SECONDS = 5.0


def same_error(world_size: int, kind: str, change: str, at_ranks: list[int], options: dict[str, object] | None = None) -> str:
    """Run the change on some ranks: every rank must raise the same ValueError within seconds. Returns its message."""
    options = options or ({"mask": "some", "num_bins": 3} if kind == "projected" else {})
    outcomes = ranks(world_size).run(run_changed, kind, change, at_ranks, options)
    errors = {outcome.error for outcome in outcomes}
    assert len(errors) == 1, errors
    error = outcomes[0].error
    assert error is not None, f"no rank raised for {change!r}"
    assert error[0] == "ValueError"
    assert max(outcome.seconds for outcome in outcomes) < SECONDS
    return error[1]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("change", PROJECTED)
def test_a_difference_raises_on_every_rank(change: str, world_size: int) -> None:
    message = same_error(world_size, "projected", change, [world_size - 1])
    assert f"ranks disagree on {PROJECTED[change]}" in message or f"on the values of {PROJECTED[change]}:" in message


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("change", DFLASH)
def test_a_difference_in_dflash_arguments_raises_on_every_rank(change: str, world_size: int) -> None:
    message = same_error(world_size, "dflash", change, [0])
    assert f"ranks disagree on {DFLASH[change]}" in message or f"on the values of {DFLASH[change]}:" in message


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [("projected", *item) for item in PROJECTED_FAULTS.items()] + [("dflash", *item) for item in DFLASH_FAULTS.items()],
)
def test_a_fault_of_one_rank_names_rank_and_field(kind: str, change: str, field: str, world_size: int) -> None:
    message = same_error(world_size, kind, change, [1])
    assert message.startswith("tensor-parallel rank 1 refused its arguments (ranks at fault: [1])")
    assert field in message


FRACTIONAL = {"mask": "fractional", "num_bins": 3}


@pytest.mark.parametrize("change", ["mask NaN", "mask negative"])
def test_a_mask_no_loss_can_use_on_one_rank_is_named_on_all(change: str) -> None:
    message = same_error(2, "projected", change, [1], FRACTIONAL)
    assert message.startswith("tensor-parallel rank 1 refused its arguments (ranks at fault: [1]): ValueError: mask holds ")


def test_a_fault_of_two_ranks_names_both() -> None:
    assert "ranks at fault: [1, 3]" in same_error(4, "projected", "teacher columns", [1, 3])


@pytest.mark.parametrize(
    ("kind", "change", "error"),
    [
        ("projected", "bins dtype", "TypeError"),
        ("projected", "bins out of range", "ValueError"),
        ("projected", "chunk size zero", "ValueError"),
        ("projected", "mask missing", "TypeError"),
        ("projected", "mask complex", "TypeError"),
        ("dflash", "positions outside", "IndexError"),
        ("dflash", "decay NaN", "ValueError"),
        ("dflash", "rows dtype", "TypeError"),
    ],
)
def test_a_fault_all_ranks_share_raises_as_in_one_process(kind: str, change: str, error: str) -> None:
    options = {"mask": "some", "num_bins": 3} if kind == "projected" else {}
    errors = ranks(2).errors(run_changed, kind, change, [0, 1], options)
    assert errors[0] == errors[1]
    assert errors[0][0] == error
    assert "tensor-parallel" not in errors[0][1]


@pytest.mark.parametrize("change", ["mask value", "weights NaN", "chunk size"])
def test_equal_values_agree_nan_included(change: str) -> None:
    ranks(2).values(run_changed, "projected", change, [0, 1], {"mask": "some", "num_bins": 3})


def test_unknown_dtypes() -> None:
    """Outside the table: equal ones agree (and compute), two different ones do not look equal."""
    first, second = ranks(2).values(run_unknown_dtypes, True)
    assert torch.equal(first["numerators"], second["numerators"])
    errors = ranks(2).errors(run_unknown_dtypes, False)
    assert errors[0] == errors[1]
    assert "selected_teacher_logits: dtype" in errors[0][1]


def test_header_codes() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len({dtype_header_code(dtype) for dtype in dtypes}) == len(dtypes)
    assert float64_bits(float("nan")) == float64_bits(float("nan"))
    assert float64_bits(0.8) != float64_bits(0.8 + 2**-53)
    assert float64_bits(-0.0) == -(1 << 63)
