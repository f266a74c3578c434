"""DraftLossStats: shapes, normalization with counts from outside, and no supervised token anywhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from xtok.losses.draft import DraftLossStats


def stats(**changes: torch.Tensor) -> DraftLossStats:
    fields = {
        "numerators": torch.tensor([2.0, 3.0], requires_grad=True),
        "counts": torch.tensor([1.0, 2.0]),
        "weights": torch.tensor([1.0, 0.5]),
    }
    return DraftLossStats(**fields | changes)


@pytest.mark.parametrize("name", ["numerators", "counts", "weights"])
@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_all_three_are_vectors_of_one_shape(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"vectors of one length.*\(2,\)"):
        stats(**{name: torch.ones(shape)})


def test_scalars_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="vectors"):
        DraftLossStats(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))


def test_frozen_with_slots() -> None:
    one = stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.counts = torch.ones(2)  # type: ignore[misc]
    assert not hasattr(one, "__dict__")


@pytest.mark.parametrize("counts", [torch.tensor([4, 6]), torch.tensor([4.0, 6.0]), torch.tensor([4.0, 6.0]).double()])
def test_normalized_divides_by_weighted_counts_from_outside(counts: torch.Tensor) -> None:
    one = stats()
    loss = one.normalized(normalization_counts=counts)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((2.0 + 1.5) / (4.0 + 3.0 + 1e-8))
    (gradient,) = torch.autograd.grad(loss, one.numerators)
    assert torch.allclose(gradient, torch.tensor([1.0, 0.5]) / 7)


@pytest.mark.parametrize("numerators", [[2.0, 3.0], [float("inf"), 1.0], [float("nan"), 0.0]])
def test_no_supervised_token_anywhere_is_exactly_zero(numerators: list[float]) -> None:
    one = stats(numerators=torch.tensor(numerators, requires_grad=True))
    loss = one.normalized(normalization_counts=torch.zeros(2, dtype=torch.int64))
    assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss, one.numerators)
    assert gradient.tolist() == [0.0, 0.0]


def test_normalization_counts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*2 bins"):
        stats().normalized(normalization_counts=torch.ones(3))
    with pytest.raises(ValueError, match=r"\(\)"):
        stats().normalized(normalization_counts=torch.tensor(3))
