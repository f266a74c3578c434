"""Random draft-loss problems for parity and distributed tests, equal for equal arguments in whatever process they are made.

Shapes: T rows, V vocabulary, H hidden size, B bins, N blocks, K slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["dflash_problem", "gradient_of", "projected_problem", "relative_error", "unprojected_problem"]


def _mask(kind: str, num_rows: int, generator: torch.Generator) -> Tensor:
    if kind == "all":
        return torch.ones(num_rows, dtype=torch.bool)
    if kind == "none":
        return torch.zeros(num_rows, dtype=torch.bool)
    kept = torch.rand(num_rows, generator=generator) < 0.6
    kept[0] = True
    return kept if kind == "some" else kept * torch.rand(num_rows, generator=generator)


def projected_problem(
    num_rows: int, vocab: int, hidden: int, dtype: torch.dtype, *, mask: str = "some", num_bins: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Keyword arguments of the projected loss over the whole vocabulary; mask is "all", "none", "some" or "fractional"."""
    generator = torch.Generator().manual_seed(seed)
    problem: dict[str, Any] = {
        "student_hidden": torch.randn(num_rows, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
        "output_weight": (torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) * 2 / hidden**0.5).to(dtype),
        "selected_teacher_logits": (torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype),
        "mask": _mask(mask, num_rows, generator),
    }
    if num_bins > 1:
        # The last bin stays empty.
        problem["bin_ids"] = torch.randint(0, num_bins - 1, (num_rows,), generator=generator)
        problem["weights"] = torch.rand(num_bins, generator=generator) + 0.1
    return problem


def unprojected_problem(
    num_rows: int, vocab: int, dtype: torch.dtype, *, mask: str = "some", num_bins: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Keyword arguments of the unprojected loss over the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    problem = projected_problem(num_rows, vocab, 1, dtype, mask=mask, num_bins=num_bins, seed=seed + 1)
    del problem["student_hidden"], problem["output_weight"]
    problem["teacher_logits"] = problem.pop("selected_teacher_logits")
    student = torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64) * 3
    return {"student_logits": student.to(dtype).requires_grad_(), **problem}


def dflash_problem(
    num_blocks: int,
    gamma: int,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    num_sequences: int = 3,
    num_positions: int = 11,
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of the DFlash loss: short prefixes of blocks are active; inactive slots hold the sentinel -999."""
    generator = torch.Generator().manual_seed(seed)
    active_slots = torch.randint(0, gamma + 1, (num_blocks,), generator=generator)
    loss_mask = torch.arange(gamma + 1) <= active_slots.unsqueeze(-1)
    positions = torch.randint(1, num_positions + 1, (num_blocks, gamma + 1), generator=generator)
    positions = torch.where(loss_mask, positions, -999)
    positions[:, 0] = -999
    shape = (num_sequences, num_positions, vocab)
    return {
        "draft_hidden": torch.randn(num_blocks, gamma + 1, hidden, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(),
        "output_weight": (torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) * 2 / hidden**0.5).to(dtype),
        "teacher_logits": (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype),
        "sample_rows": torch.randint(0, num_sequences, (num_blocks,), generator=generator),
        "label_positions": positions,
        "loss_mask": loss_mask,
        "position_decay": 0.8,
    }


def gradient_of(stats: Any, tensor: Tensor) -> Tensor:
    """Gradient of the weighted numerators, each bin with another upstream value."""
    upstream = torch.arange(1.0, stats.numerators.numel() + 1, dtype=stats.numerators.dtype) / 3
    (gradient,) = torch.autograd.grad((stats.numerators * upstream).sum(), tensor)
    return gradient


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in fp64; 0 when both are 0."""
    difference = (actual.double() - expected.double()).norm().item()
    scale = expected.double().norm().item()
    return difference / scale if scale else difference
