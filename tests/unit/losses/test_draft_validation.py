"""Validation of the draft losses: each fault, its type, the shape or dtype in its message, and the order of the checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draft_problems import dflash_problem, projected_problem, unprojected_problem
from xtok.losses import draft

T, V, H = 6, 8, 5
Fault = tuple[dict[str, Any], type[Exception], str]


def unprojected_arguments() -> dict[str, Any]:
    return unprojected_problem(T, V, torch.float32, num_bins=3) | {"token_chunk_size": 2, "tp_group": None}


def projected_arguments() -> dict[str, Any]:
    return projected_problem(T, V, H, torch.float32, num_bins=3) | {"token_chunk_size": 2, "tp_group": None}


def dflash_arguments() -> dict[str, Any]:
    problem = dflash_problem(4, 3, V, H, torch.float32)
    problem["loss_mask"][1] = True
    problem["label_positions"][1] = torch.tensor([-999, 2, 3, 4])
    return problem | {"token_chunk_size": 2, "tp_group": None}


ids = torch.zeros(T, dtype=torch.int64)
mask = torch.ones(T, dtype=torch.bool)

BINS: list[Fault] = [
    ({"token_chunk_size": 0}, ValueError, "token_chunk_size is 0"),
    ({"weights": torch.ones(2, 2)}, ValueError, r"weights has shape \(2, 2\)"),
    ({"bin_ids": None}, ValueError, r"bin_ids is missing.*\(3,\)"),
    ({"bin_ids": ids[:-1]}, ValueError, r"bin_ids has shape \(5,\)"),
    ({"bin_ids": ids.int()}, TypeError, "bin_ids has dtype torch.int32"),
    ({"bin_ids": ids.to("meta")}, ValueError, "bin_ids on meta"),
    ({"bin_ids": ids + 3}, ValueError, r"bin_ids holds 3 .*\[0, 3\)"),
]
# In the documented order: with the faults of two rows together, the earlier row is the one reported.
UNPROJECTED: list[Fault] = [
    ({"teacher_logits": torch.zeros(T, V + 1)}, ValueError, r"\(6, 8\).*\(6, 9\)"),
    ({"student_logits": torch.zeros(V), "teacher_logits": torch.zeros(V)}, ValueError, r"student_logits has shape \(8,\)"),
    ({"mask": mask[:-1]}, ValueError, r"mask has shape \(5,\), must be \(6,\)"),
    ({"mask": mask.to("meta")}, ValueError, "mask on meta"),
    *BINS,
]
PROJECTED: list[Fault] = [
    ({"student_hidden": torch.zeros(H)}, ValueError, r"student_hidden has shape \(5,\)"),
    ({"output_weight": torch.zeros(V)}, ValueError, r"output_weight has shape \(8,\)"),
    ({"output_weight": torch.zeros(V, H + 1)}, ValueError, r"\(8, 6\).*\(6, 5\)"),
    ({"selected_teacher_logits": torch.zeros(V)}, ValueError, r"selected_teacher_logits has shape \(8,\)"),
    (
        {"selected_teacher_logits": torch.zeros(T, V - 1)},
        ValueError,
        r"selected_teacher_logits has shape \(6, 7\), must be \(6, 8\)",
    ),
    ({"mask": mask[:-1]}, ValueError, r"mask has shape \(5,\)"),
    ({"mask": mask.to("meta")}, ValueError, "mask on meta"),
    ({"selected_teacher_logits": torch.zeros(T, V, dtype=torch.int64)}, TypeError, "torch.int64"),
    ({"output_weight": torch.zeros(V, H).double()}, ValueError, "torch.float32, output_weight torch.float64"),
]
DFLASH: list[Fault] = [
    ({"draft_hidden": torch.zeros(4, H)}, ValueError, r"draft_hidden has shape \(4, 5\)"),
    ({"draft_hidden": torch.zeros(4, 1, H)}, ValueError, r"\(4, 1, 5\)"),
    ({"output_weight": torch.zeros(V)}, ValueError, r"output_weight has shape \(8,\)"),
    ({"output_weight": torch.zeros(V, H + 1)}, ValueError, r"\(8, 6\)"),
    ({"teacher_logits": torch.zeros(3, V)}, ValueError, r"teacher_logits has shape \(3, 8\)"),
    ({"teacher_logits": torch.zeros(3, 0, V)}, ValueError, r"teacher_logits has shape \(3, 0, 8\)"),
    ({"teacher_logits": torch.zeros(3, 11, V - 1)}, ValueError, r"\(3, 11, 7\)"),
    ({"sample_rows": torch.zeros(5, dtype=torch.int64)}, ValueError, r"sample_rows has shape \(5,\)"),
    ({"label_positions": torch.ones(4, 3, dtype=torch.int64)}, ValueError, r"label_positions has shape \(4, 3\)"),
    ({"loss_mask": torch.ones(4, 3, dtype=torch.bool)}, ValueError, r"loss_mask has shape \(4, 3\)"),
    ({"loss_mask": torch.ones(4, 4, dtype=torch.bool, device="meta")}, ValueError, "loss_mask on meta"),
    ({"teacher_logits": torch.zeros(3, 11, V, dtype=torch.int64)}, TypeError, "torch.int64"),
    ({"output_weight": torch.zeros(V, H).double()}, ValueError, "torch.float64"),
    ({"sample_rows": torch.zeros(4, dtype=torch.int32)}, TypeError, "sample_rows has dtype torch.int32"),
    ({"label_positions": torch.ones(4, 4)}, TypeError, "label_positions has dtype torch.float32"),
    ({"loss_mask": torch.ones(4, 4)}, TypeError, "loss_mask has dtype torch.float32"),
    ({"position_decay": "0.8"}, TypeError, "position_decay is '0.8'"),
    *[
        ({"position_decay": decay}, ValueError, "position_decay is")
        for decay in (0.0, -0.5, 1.0000001, float("nan"), float("inf"))
    ],
    ({"token_chunk_size": 0}, ValueError, "token_chunk_size is 0"),
    ({"token_chunk_size": 2.0}, TypeError, "token_chunk_size is 2.0"),
]


@pytest.mark.parametrize(("changes", "error", "message"), UNPROJECTED)
def test_unprojected(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draft.streaming_vocab_parallel_soft_ce(**unprojected_arguments() | changes)


@pytest.mark.parametrize(("changes", "error", "message"), PROJECTED + BINS)
def test_projected(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draft.projected_streaming_vocab_parallel_soft_ce(**projected_arguments() | changes)


@pytest.mark.parametrize(("changes", "error", "message"), DFLASH)
def test_dflash(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draft.dflash_projected_vocab_parallel_soft_ce(**dflash_arguments() | changes)


@pytest.mark.parametrize("faults", [UNPROJECTED, PROJECTED + BINS], ids=["unprojected", "projected"])
def test_checks_come_in_the_documented_order(faults: list[Fault]) -> None:
    unprojected = faults is UNPROJECTED or len(faults) == len(UNPROJECTED)
    loss: Any = draft.streaming_vocab_parallel_soft_ce if unprojected else draft.projected_streaming_vocab_parallel_soft_ce
    for number, (changes, error, message) in enumerate(faults):
        for later, _, _ in faults[number + 1 :]:
            if set(later) & set(changes):
                continue
            arguments = (unprojected_arguments() if unprojected else projected_arguments()) | later | changes
            with pytest.raises(error, match=message):
                loss(**arguments)


@pytest.mark.parametrize("empty", [(0, V), (T, 0)])
def test_empty_inputs_are_refused(empty: tuple[int, int]) -> None:
    nothing = torch.zeros(empty)
    with pytest.raises(ValueError, match=f"student_logits has shape \\({empty[0]}, {empty[1]}\\)"):
        draft.streaming_vocab_parallel_soft_ce(
            **unprojected_arguments() | {"student_logits": nothing, "teacher_logits": nothing, "mask": mask[: empty[0]]}
        )
    with pytest.raises(ValueError, match="student_hidden has shape"):
        draft.projected_streaming_vocab_parallel_soft_ce(**projected_arguments() | {"student_hidden": nothing})
    with pytest.raises(ValueError, match="output_weight has shape"):
        draft.projected_streaming_vocab_parallel_soft_ce(**projected_arguments() | {"output_weight": torch.zeros(0, H)})
    with pytest.raises(ValueError, match=r"weights has shape \(0,\)"):
        draft.projected_streaming_vocab_parallel_soft_ce(**projected_arguments() | {"weights": torch.ones(0)})


def test_five_dims_are_refused_and_four_are_not() -> None:
    head = torch.zeros(V, H)
    for dims, accepted in [((1, 1, 2, H), True), ((1, 1, 1, 2, H), False)]:
        arguments = {
            "student_hidden": torch.zeros(dims),
            "output_weight": head,
            "selected_teacher_logits": torch.zeros(*dims[:-1], V),
            "mask": torch.ones(dims[:-1]),
            "token_chunk_size": 2,
            "tp_group": None,
        }
        if accepted:
            assert draft.projected_streaming_vocab_parallel_soft_ce(**arguments).counts.item() == 2
        else:
            with pytest.raises(ValueError, match="5 dims"):
                draft.projected_streaming_vocab_parallel_soft_ce(**arguments)


def test_a_bad_bin_in_a_masked_row_is_legal() -> None:
    for arguments, loss in [
        (unprojected_arguments(), draft.streaming_vocab_parallel_soft_ce),
        (projected_arguments(), draft.projected_streaming_vocab_parallel_soft_ce),
    ]:
        some = torch.tensor([True, False, True, True, True, True])
        stats: Any = loss(**arguments | {"mask": some, "bin_ids": torch.tensor([0, -7, 1, 1, 2, 0])})
        assert stats.counts.tolist() == [2.0, 2.0, 1.0]


INT64 = torch.iinfo(torch.int64)


@pytest.mark.parametrize(
    ("row", "position"),
    [
        *[(-1, 2), (3, 2), (0, 0), (0, 12), (2, -3), (0, -999), (2**40, 2), (0, 2**40)],
        *[(0, INT64.min), (0, INT64.max), (INT64.min, 2), (INT64.max, 2)],
    ],
)
def test_active_slots_outside_the_teacher_are_named(row: int, position: int) -> None:
    """(row 2, P = -3) would be a legal flat row of row 1: each coordinate is checked by itself."""
    arguments = dflash_arguments()
    arguments["sample_rows"][1] = row
    arguments["label_positions"][1, 2] = position
    named = 1 if not 0 <= row < 3 else 2
    shown = arguments["label_positions"][1, named].item()
    message = rf"block 1, slot {named}: sample_rows is {row} and label_positions {shown}, .*\(3, 11, 8\)"
    with pytest.raises(IndexError, match=message):
        draft.dflash_projected_vocab_parallel_soft_ce(**arguments)


def test_dflash_slot_zero_is_left_out_and_the_callers_mask_untouched() -> None:
    arguments = dflash_arguments()
    arguments["loss_mask"][:, 0] = True
    before = arguments["loss_mask"].clone()
    stats = draft.dflash_projected_vocab_parallel_soft_ce(**arguments)
    assert torch.equal(arguments["loss_mask"], before)
    assert torch.equal(stats.counts, before[:, 1:].sum(0).float())
    assert torch.allclose(stats.weights, torch.tensor([1.0, 0.8, 0.64]))


def test_dflash_teacher_row_is_the_one_before_the_label() -> None:
    """arange test: the teacher at (row, P - 1) is certain of token 3; every other row is certain of another."""
    teacher = torch.full((2, 5, V), -50.0)
    teacher[..., 1] = 50.0
    teacher[1, 3] = torch.full((V,), -50.0)
    teacher[1, 3, 3] = 50.0
    hidden = torch.zeros(1, 2, V)
    hidden[0, 1, 3] = 40.0
    stats = draft.dflash_projected_vocab_parallel_soft_ce(
        draft_hidden=hidden,
        output_weight=torch.eye(V),
        teacher_logits=teacher,
        sample_rows=torch.tensor([1]),
        label_positions=torch.tensor([[3, 4]]),
        loss_mask=torch.tensor([[True, True]]),
        position_decay=1.0,
        token_chunk_size=4,
        tp_group=None,
    )
    assert stats.numerators.item() < 1e-6


def test_public_names() -> None:
    assert draft.__all__ == sorted(draft.__all__)
    assert draft.DEFAULT_DRAFT_TOKEN_CHUNK_SIZE == 4096
