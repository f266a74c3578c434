"""Acceptance metrics: definition by loops, sums before division."""

from __future__ import annotations

import pytest
import torch

from xtok.draft.metrics import MetricSum, acceptance_metrics, add_metrics


def _tau_by_loops(accept: torch.Tensor, mask: torch.Tensor, first: int) -> float:
    lengths = []
    for rates, supervised in zip(accept.tolist(), mask.tolist(), strict=True):
        if not any(supervised[first:]):
            continue
        length, product = 1.0, 1.0
        for k in range(first, len(rates)):
            product *= rates[k] if supervised[k] else 0.0
            length += product
        lengths.append(length)
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("first", [0, 1])
def test_tau_and_slots_match_loops(first: int) -> None:
    generator = torch.Generator().manual_seed(3)
    accept = torch.rand(9, 5, generator=generator)
    mask = torch.arange(5) < torch.randint(0, 6, (9, 1), generator=generator)
    mask = mask & (torch.arange(5) >= first)
    poisoned = accept.where(mask, float("nan"))
    metrics = acceptance_metrics(accept=poisoned, eval_mask=mask, first_supervised_slot=first)
    assert metrics["tau"].value().item() == pytest.approx(_tau_by_loops(accept, mask, first), rel=1e-6)
    for k in range(first, 5):
        expected = accept[mask[:, k], k].double().mean()
        assert metrics["acceptance_by_slot"].value()[k - first].item() == pytest.approx(expected.item(), rel=1e-6)


def test_perfect_and_useless_drafts() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    assert acceptance_metrics(accept=torch.ones(3, 4), eval_mask=mask)["tau"].value() == 5
    assert acceptance_metrics(accept=torch.zeros(3, 4), eval_mask=mask)["tau"].value() == 1


def test_micro_batches_are_summed_before_the_division() -> None:
    accept = torch.rand(10, 3)
    mask = torch.arange(3) < torch.randint(1, 4, (10, 1))
    whole = acceptance_metrics(accept=accept, eval_mask=mask)
    first = acceptance_metrics(accept=accept[:2], eval_mask=mask[:2])
    summed = add_metrics(first, acceptance_metrics(accept=accept[2:], eval_mask=mask[2:]))
    for name, metric in whole.items():
        torch.testing.assert_close(summed[name].value(), metric.value(), equal_nan=True)
    assert add_metrics(first, {"other": whole["tau"]}).keys() == {"tau", "acceptance_by_slot", "other"}


def test_nothing_counted_is_nan_and_shapes_are_checked() -> None:
    empty = acceptance_metrics(accept=torch.zeros(0, 4), eval_mask=torch.zeros(0, 4, dtype=torch.bool))
    assert empty["tau"].value().isnan()
    with pytest.raises(ValueError, match="must be one shape"):
        acceptance_metrics(accept=torch.zeros(2, 4), eval_mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="differ"):
        MetricSum(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("first", [-1, 5])
def test_a_first_slot_outside_the_block_is_named(first: int) -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"first_supervised_slot is {first}, must be within 0\.\.4"):
        acceptance_metrics(accept=torch.ones(2, 4), eval_mask=mask, first_supervised_slot=first)
