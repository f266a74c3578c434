"""Values no loss can be made of: masks that are no tensor, complex, not finite or negative; weights that are complex or NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draft_problems import dflash_problem, projected_problem, unprojected_problem
from xtok.losses import draft
from xtok.losses.dspark import dspark_projected_vocab_parallel_loss, dspark_slot_weights

T, V, H = 6, 8, 5
NAN, INF = float("nan"), float("inf")
LOSSES: dict[str, Any] = {
    "unprojected": draft.streaming_vocab_parallel_soft_ce,
    "projected": draft.projected_streaming_vocab_parallel_soft_ce,
    "dspark": dspark_projected_vocab_parallel_loss,
    "dflash": draft.dflash_projected_vocab_parallel_soft_ce,
}
MASKED = ("unprojected", "projected", "dspark")


def arguments_of(kind: str) -> dict[str, Any]:
    if kind == "dflash":
        return dflash_problem(4, 3, V, H, torch.float32) | {"token_chunk_size": 2, "tp_group": None}
    if kind == "unprojected":
        return unprojected_problem(T, V, torch.float32, num_bins=3) | {"token_chunk_size": 2, "tp_group": None}
    problem = projected_problem(T, V, H, torch.float32, num_bins=3) | {"token_chunk_size": 2, "tp_group": None}
    if kind == "dspark":
        problem["teacher_logits"] = problem.pop("selected_teacher_logits")
        problem["target_ids"] = torch.zeros(T, dtype=torch.int64)
    return problem


def tensor_names() -> list[tuple[str, str]]:
    kinds = ((kind, arguments_of(kind)) for kind in LOSSES)
    return [(kind, name) for kind, made in kinds for name, value in made.items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("kind", "name"), tensor_names())
def test_what_is_no_tensor_is_named(kind: str, name: str) -> None:
    arguments = arguments_of(kind)
    with pytest.raises(TypeError, match=f"^{name} is a list, must be a tensor"):
        LOSSES[kind](**arguments | {name: arguments[name].tolist()})
    optional = ("bin_ids", "weights", "teacher_logits") if kind == "dspark" else ("bin_ids", "weights")
    if name not in optional:
        with pytest.raises(TypeError, match=f"^{name} is None, must be a tensor"):
            LOSSES[kind](**arguments | {name: None})


@pytest.mark.parametrize(("kind", "name"), [item for item in tensor_names() if item[1] != "bin_ids"])
def test_complex_numbers_are_refused_by_name(kind: str, name: str) -> None:
    arguments = arguments_of(kind)
    changed = arguments[name].detach().to(torch.complex64)
    with pytest.raises((TypeError, ValueError), match=name) as caught:
        LOSSES[kind](**arguments | {name: changed})
    assert "torch.complex64" in str(caught.value)


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(NAN, torch.float32), (INF, torch.bfloat16), (-INF, torch.float32), (-0.5, torch.float32), (-100, torch.int64)],
)
def test_a_mask_is_finite_and_not_negative(kind: str, value: float, dtype: torch.dtype) -> None:
    mask = torch.ones(T).to(dtype)
    mask[4] = value
    with pytest.raises(ValueError, match=rf"mask holds {float(value)} at flat index 4 \(1 of 6 values"):
        LOSSES[kind](**arguments_of(kind) | {"mask": mask})


@pytest.mark.parametrize("kind", MASKED)
def test_a_mask_that_overflows_the_compute_dtype_is_refused(kind: str) -> None:
    mask = torch.ones(T, dtype=torch.float64)
    mask[2] = 1e300
    with pytest.raises(ValueError, match=r"mask holds inf at flat index 2 .*finite in torch.float32"):
        LOSSES[kind](**arguments_of(kind) | {"mask": mask})


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_any_real_dtype_mean_the_same(kind: str) -> None:
    arguments = arguments_of(kind)
    expected = LOSSES[kind](**arguments)
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.float64, torch.float8_e4m3fn):
        stats = LOSSES[kind](**arguments | {"mask": arguments["mask"].to(dtype)})
        for one, other in ((stats, expected),) if kind != "dspark" else ((stats.cross_entropy, expected.cross_entropy),):
            assert torch.equal(one.numerators, other.numerators)
            assert torch.equal(one.counts, other.counts)


@pytest.mark.parametrize("kind", ["unprojected", "projected"])
@pytest.mark.parametrize("weight", [NAN, INF])
def test_a_weight_that_is_not_finite_shows_in_the_loss_and_nowhere_else(kind: str, weight: float) -> None:
    """Weights only scale bins: sums and counts do not read them, and ranks that hold the same NaN agree."""
    arguments = arguments_of(kind)
    clean = LOSSES[kind](**arguments)
    stats = LOSSES[kind](**arguments | {"weights": torch.tensor([1.0, weight, 1.0])})
    assert torch.equal(stats.numerators, clean.numerators)
    assert stats.normalized(normalization_counts=stats.counts).isnan()


def test_weights_without_values_are_refused() -> None:
    for kind in MASKED:
        with pytest.raises(ValueError, match=r"weights (is )?on meta"):
            LOSSES[kind](**arguments_of(kind) | {"weights": torch.ones(3, device="meta")})


def test_statistics_are_tensors_and_counts_real() -> None:
    with pytest.raises(TypeError, match="counts is a list"):
        draft.DraftLossStats(torch.ones(2), [1.0, 2.0], torch.ones(2))  # type: ignore[arg-type]
    stats = draft.DraftLossStats(torch.ones(2), torch.ones(2), torch.ones(2))
    with pytest.raises(TypeError, match="normalization_counts is a int"):
        stats.normalized(normalization_counts=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"normalization_counts has dtype torch\.complex64"):
        stats.normalized(normalization_counts=torch.ones(2, dtype=torch.complex64))


def test_dspark_settings_are_numbers() -> None:
    for settings, message in [
        ({"token_chunk_size": 2.0}, "token_chunk_size is 2.0"),
        ({"token_chunk_size": True}, "token_chunk_size is True"),
        ({"logit_softcap": "30"}, "logit_softcap must be a number or None, got '30'"),
        ({"confidence_logits": torch.zeros(T, dtype=torch.int64)}, r"confidence_logits must be floating point, got torch\.int64"),
    ]:
        with pytest.raises(TypeError, match=message):
            dspark_projected_vocab_parallel_loss(**arguments_of("dspark") | settings)
    with pytest.raises(TypeError, match="num_slots must be an int"):
        dspark_slot_weights(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="slot_decay must be a number"):
        dspark_slot_weights(2, slot_decay="4")  # type: ignore[arg-type]
