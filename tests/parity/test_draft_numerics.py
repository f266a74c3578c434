"""The numerical contract of the draft losses, row by row: infinities, NaN in masked rows, shifts, scale, bf16 heads, autocast."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.draft_problems import gradient_of, projected_problem, relative_error, unprojected_problem
from xtok.losses import draft, reference, tiles

INF = float("inf")
CHUNKS = [2, 64]  # streaming and cached


def unprojected(problem: dict[str, Any], chunk: int) -> tuple[Tensor, Tensor]:
    stats = draft.streaming_vocab_parallel_soft_ce(**problem, token_chunk_size=chunk, tp_group=None)
    return stats.numerators, gradient_of(stats, problem["student_logits"])


def projected(problem: dict[str, Any], chunk: int) -> tuple[Tensor, Tensor]:
    stats = draft.projected_streaming_vocab_parallel_soft_ce(**problem, token_chunk_size=chunk, tp_group=None)
    return stats.numerators, gradient_of(stats, problem["student_hidden"])


def with_values(tensor: Tensor, index: Any, value: float) -> Tensor:
    changed = tensor.detach().clone()
    changed[index] = value
    return changed.requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_teacher_minus_infinity_is_finite_and_dense(chunk: int) -> None:
    problem = projected_problem(6, 50, 5, torch.float32, mask="all")
    problem["selected_teacher_logits"][:, 3:20] = -INF
    actual, gradient = projected(problem, chunk)
    dense = reference.dense_projected_soft_ce(
        problem["student_hidden"], problem["output_weight"], problem["selected_teacher_logits"], problem["mask"]
    )
    assert relative_error(actual, dense.numerators) < 1e-6
    assert relative_error(gradient, gradient_of(dense, problem["student_hidden"])) < 1e-5

    problem = unprojected_problem(6, 50, torch.float32, mask="all")
    problem["teacher_logits"][:, 3:20] = -INF
    actual, gradient = unprojected(problem, chunk)
    dense = reference.dense_soft_ce(problem["student_logits"], problem["teacher_logits"], problem["mask"])
    assert relative_error(actual, dense.numerators) < 1e-6
    assert relative_error(gradient, gradient_of(dense, problem["student_logits"])) < 1e-5


@pytest.mark.parametrize("chunk", CHUNKS)
def test_both_minus_infinity_counts_as_zero(chunk: int) -> None:
    """A vocabulary padded with -inf on both sides gives the loss of the vocabulary without it."""
    problem = unprojected_problem(6, 50, torch.float32, mask="all")
    short = {name: value[:, :40] if value.ndim == 2 else value for name, value in problem.items()}
    padded = problem | {
        "student_logits": with_values(problem["student_logits"], (slice(None), slice(40, None)), -INF),
        "teacher_logits": with_values(problem["teacher_logits"], (slice(None), slice(40, None)), -INF),
    }
    short["student_logits"] = short["student_logits"].detach().clone().requires_grad_()
    expected, expected_gradient = unprojected(short, chunk)
    actual, gradient = unprojected(padded, chunk)
    assert torch.isfinite(actual).all()
    assert relative_error(actual, expected) < 1e-6
    assert relative_error(gradient[:, :40], expected_gradient) < 1e-6
    assert not gradient[:, 40:].any()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("columns", [slice(7, 8), slice(0, 50)])
def test_student_minus_infinity_under_teacher_mass_is_infinite_with_finite_gradient(chunk: int, columns: slice) -> None:
    problem = unprojected_problem(6, 50, torch.float32, mask="all")
    problem["student_logits"] = with_values(problem["student_logits"], (2, columns), -INF)
    bins = {"bin_ids": torch.tensor([0, 0, 1, 0, 0, 0]), "weights": torch.ones(2)}
    actual, gradient = unprojected(problem | bins, chunk)
    assert actual[1] == INF
    assert torch.isfinite(actual[0])
    assert torch.isfinite(gradient).all()
    probability = torch.softmax(problem["teacher_logits"][2].double(), -1)
    assert relative_error(gradient[2, columns], -probability[columns] * 2 / 3) < 1e-5


@pytest.mark.parametrize("chunk", CHUNKS)
def test_projected_student_minus_infinity_is_infinite_with_finite_gradient(chunk: int) -> None:
    """fp32 logits overflow to -inf in one column only: the loss says so, the gradient stays finite."""
    problem = projected_problem(6, 50, 2, torch.float32, mask="all")
    problem["student_hidden"] = with_values(problem["student_hidden"], (2, 0), 1e30)
    problem["output_weight"][:, 0] = 0.0
    problem["output_weight"][7, 0] = -1e30
    bins = {"bin_ids": torch.tensor([0, 0, 1, 0, 0, 0]), "weights": torch.ones(2)}
    actual, gradient = projected(problem | bins, chunk)
    assert actual[1] == INF
    assert torch.isfinite(actual[0])
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_masked_rows_may_hold_anything(chunk: int, bad: float) -> None:
    mask = torch.tensor([True, False, True, False, True, True])
    clean = projected_problem(6, 50, 5, torch.float32) | {"mask": mask}
    dirty = clean | {
        "student_hidden": with_values(clean["student_hidden"], ~mask, bad),
        "selected_teacher_logits": with_values(clean["selected_teacher_logits"], ~mask, bad),
    }
    for (expected, expected_gradient), (actual, gradient) in [(projected(clean, chunk), projected(dirty, chunk))]:
        assert torch.equal(actual, expected)
        assert torch.equal(gradient, expected_gradient)
        assert not gradient[~mask].any()

    clean = unprojected_problem(6, 50, torch.float32) | {"mask": mask}
    dirty = clean | {
        "student_logits": with_values(clean["student_logits"], ~mask, bad),
        "teacher_logits": with_values(clean["teacher_logits"], ~mask, bad),
    }
    expected, expected_gradient = unprojected(clean, chunk)
    actual, gradient = unprojected(dirty, chunk)
    assert torch.equal(actual, expected)
    assert torch.equal(gradient, expected_gradient)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_nan_in_a_supervised_row_is_not_hidden(chunk: int) -> None:
    problem = projected_problem(6, 50, 5, torch.float32, mask="all")
    for name in ("student_hidden", "selected_teacher_logits"):
        assert projected(problem | {name: with_values(problem[name], (1, 2), float("nan"))}, chunk)[0].isnan().all()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_constant_added_to_a_row_changes_nothing(chunk: int, shift: float, side: str) -> None:
    problem = unprojected_problem(6, 50, torch.float32, mask="all")
    shifted = dict(problem)
    shifted[f"{side}_logits"] = (problem[f"{side}_logits"].detach() + shift).requires_grad_(side == "student")
    assert relative_error(unprojected(shifted, chunk)[0], unprojected(problem, chunk)[0]) <= 1e-4

    problem = projected_problem(6, 50, 5, torch.float32, mask="all")
    # The last hidden unit meets a column of ones in the head: its value is added to every logit of the row.
    problem["output_weight"][:, -1] = 1.0
    shifted = dict(problem)
    if side == "student":
        shifted["student_hidden"] = with_values(problem["student_hidden"], (slice(None), -1), shift)
    else:
        shifted["selected_teacher_logits"] = problem["selected_teacher_logits"] + shift
    base = problem | {"student_hidden": with_values(problem["student_hidden"], (slice(None), -1), 0.0)}
    assert relative_error(projected(shifted, chunk)[0], projected(base, chunk)[0]) <= 1e-4


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_scaled_by_ten_thousand_stay_finite(chunk: int, dtype: torch.dtype) -> None:
    problem = unprojected_problem(6, 50, dtype, mask="all")
    scaled = problem | {
        "student_logits": (problem["student_logits"].detach() * 1e4).requires_grad_(),
        "teacher_logits": problem["teacher_logits"] * 1e4,
    }
    for result in unprojected(scaled, chunk):
        assert torch.isfinite(result).all()
    problem = projected_problem(6, 50, 5, dtype, mask="all")
    scaled = problem | {
        "output_weight": problem["output_weight"] * 1e4,
        "selected_teacher_logits": problem["selected_teacher_logits"] * 1e4,
    }
    for result in projected(scaled, chunk):
        assert torch.isfinite(result).all()


def _far_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[4, 8] student and teacher logits whose differences, or sums of differences, leave the dtype; their mean does not."""
    big = torch.finfo(dtype).max * 0.9
    student = torch.zeros(4, 8, dtype=dtype)
    teacher = torch.randn(4, 8, generator=torch.Generator().manual_seed(4), dtype=dtype)
    student[0, 0], student[0, 1], teacher[0, 0] = big, -big, 3.0  # one difference overflows, weighted it does not
    student[1, 2:6] = -big  # no difference overflows, their sum does
    student[2, 3], student[2, 4], teacher[2, 4], teacher[2, 5] = big, -big, -big, big  # teacher mass where they are 1 apart
    student[3] = torch.randn(8, generator=torch.Generator().manual_seed(5), dtype=dtype)  # an ordinary neighbour
    return student, teacher


def _far_loss(student: Tensor, teacher: Tensor) -> float:
    """Cross-entropy of one row by exact fractions of the probabilities; the normalizer is the maximum's alone when all is huge."""
    probability = [Fraction(value) for value in torch.softmax(teacher.double(), -1).tolist()]
    logits = [Fraction(value) for value in student.double().tolist()]
    top = max(logits)
    normalizer = math.log(sum(math.exp(max(-800, value - top)) for value in logits))
    return float(sum(p * (top - value) for p, value in zip(probability, logits, strict=True)) / sum(probability)) + normalizer


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_at_both_ends_of_the_dtype(chunk: int, dtype: torch.dtype) -> None:
    """3e38 beside -3e38: the loss is its value, not the overflow of a difference on the way; its gradient is as ever."""
    student, teacher = _far_rows(dtype)
    bins = {"bin_ids": torch.arange(4), "weights": torch.ones(4)}
    expected = [_far_loss(student[row], teacher[row]) for row in range(4)]
    assert max(expected) < torch.finfo(dtype).max
    problem = {"student_logits": student.clone().requires_grad_(), "teacher_logits": teacher, "mask": torch.ones(4)} | bins
    actual, gradient = unprojected(problem, chunk)
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)
    difference = torch.softmax(student.double(), -1) - torch.softmax(teacher.double(), -1)
    scale = torch.arange(1.0, 5, dtype=torch.float64).unsqueeze(-1) / 3
    torch.testing.assert_close(gradient.double(), difference * scale, rtol=1e-5, atol=1e-6)
    # The same logits through an identity head: a tile that overflowed is projected once more.
    head = torch.eye(8, dtype=dtype)
    problem = {"student_hidden": student.clone().requires_grad_(), "output_weight": head, "mask": torch.ones(4)} | bins
    actual, gradient = projected(problem | {"selected_teacher_logits": teacher}, chunk)
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient.double(), difference * scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_loss_beyond_the_dtype_is_infinite_with_the_right_gradient(chunk: int) -> None:
    student, teacher = torch.zeros(2, 8), torch.zeros(2, 8)
    student[0, 0], student[0, 1:] = 3e38, -3e38
    teacher[0, 1] = 90.0
    problem = {"student_logits": student.clone().requires_grad_(), "teacher_logits": teacher, "mask": torch.ones(2)}
    actual, gradient = unprojected(problem | {"bin_ids": torch.arange(2), "weights": torch.ones(2)}, chunk)
    assert actual.tolist() == [INF, pytest.approx(math.log(8))]
    assert gradient[0].tolist() == pytest.approx([1 / 3, -1 / 3, 0, 0, 0, 0, 0, 0])


def bf16_contract_error() -> float:
    problem = projected_problem(256, 8192, 512, torch.bfloat16, mask="all")
    _, gradient = projected(problem, 64)
    exact = problem["student_hidden"].detach().double().requires_grad_()
    dense = reference.dense_projected_soft_ce(
        exact, problem["output_weight"], problem["selected_teacher_logits"], problem["mask"]
    )
    return relative_error(gradient, gradient_of(dense, exact))


def test_bf16_gradient_is_within_three_thousandths() -> None:
    assert bf16_contract_error() <= 3e-3


def test_bf16_gradient_on_tensor_cores_is_within_three_thousandths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA route rounds only the gradient of a tile; its matmul (bf16 in, fp32 out) is played by exact fp32 here."""
    calls = _play_tensor_cores(monkeypatch)
    assert bf16_contract_error() <= 3e-3
    assert calls


@pytest.mark.parametrize("spread", [0.05, 4.0])
def test_fp16_probabilities_survive_on_tensor_cores(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """Most probabilities of a large vocabulary are below fp16's normal range; the scale that is taken out again saves them, and does
    not push a confident student beside a flat teacher beyond fp16's largest number."""
    calls = _play_tensor_cores(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    problem = projected_problem(4, 60_000, 16, torch.float16, mask="all")
    problem["student_hidden"] = (torch.randn(4, 16, generator=generator) * spread).half().requires_grad_()
    problem["selected_teacher_logits"] = torch.randn(4, 60_000, generator=generator).half()
    _, gradient = projected(problem, 64)
    exact = problem["student_hidden"].detach().double().requires_grad_()
    dense = reference.dense_projected_soft_ce(
        exact, problem["output_weight"], problem["selected_teacher_logits"], problem["mask"]
    )
    assert relative_error(gradient, gradient_of(dense, exact)) <= 3e-3
    assert calls


def _play_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    calls: list[torch.dtype] = []
    original = tiles.FrozenHead.__init__

    def init(self: tiles.FrozenHead, output_weight: Tensor) -> None:
        original(self, output_weight)
        self._tensor_cores = True

    def mm(left: Tensor, right: Tensor, out: Tensor) -> None:
        assert left.dtype == right.dtype
        assert left.dtype in (torch.bfloat16, torch.float16)
        calls.append(left.dtype)
        torch.mm(left.float(), right.float(), out=out)

    monkeypatch.setattr(tiles.FrozenHead, "__init__", init)
    monkeypatch.setattr(tiles, "_low_precision_mm", mm)
    return calls


def test_autocast_does_not_round_the_logits() -> None:
    problem = projected_problem(9, 300, 64, torch.float32, mask="all")
    expected, expected_gradient = projected(problem, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, gradient = projected(problem, 4)
    assert torch.equal(actual, expected)
    assert torch.equal(gradient, expected_gradient)


def test_confident_rows_keep_their_relative_precision() -> None:
    """A loss of 1e-4 nats must not be the difference of two numbers of size 30."""
    student = torch.zeros(4, 1000)
    student[:, 5] = 30.0
    student[:, 6] = 22.0
    problem = {"student_logits": student.requires_grad_(), "teacher_logits": student.detach() * 2, "mask": torch.ones(4)}
    actual, _ = unprojected(problem, 2)
    dense = reference.dense_soft_ce(problem["student_logits"], problem["teacher_logits"], problem["mask"])
    assert relative_error(actual, dense.numerators) < 1e-3
