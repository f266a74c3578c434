"""What the projected losses do not do: work for masked rows, copies of strided inputs, a whole fp32 head, [T, V] logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bench.memory import peak_allocated
from tests.draft_problems import dflash_problem, projected_problem
from xtok.losses import draft


class Watch(TorchDispatchMode):
    """Counts rows that go through matmuls and remembers the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied = 0
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm_"):
            # flop / 2 = elements of the result times the inner dimension
            self.multiplied += result.numel() * args[-2].shape[-1]
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


def run(problem: dict[str, Any], loss: Any, chunk: int, name: str) -> Watch:
    with Watch() as watch:
        stats = loss(**problem, token_chunk_size=chunk, tp_group=None)
        torch.autograd.grad(stats.numerators.sum(), problem[name])
    return watch


def projected(problem: dict[str, Any], chunk: int) -> Watch:
    return run(problem, draft.projected_streaming_vocab_parallel_soft_ce, chunk, "student_hidden")


@pytest.mark.parametrize("num_supervised", [0, 1, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_matmuls_of_the_supervised_rows_and_no_more(num_supervised: int, dtype: torch.dtype) -> None:
    problem = projected_problem(64, 300, 16, dtype)
    problem["mask"] = torch.arange(64) < num_supervised
    assert projected(problem, 8).multiplied == 2 * num_supervised * 300 * 16


def test_evaluation_costs_one_matmul() -> None:
    problem = projected_problem(64, 300, 16, torch.float32, mask="all")
    with torch.no_grad(), Watch() as watch:
        draft.projected_streaming_vocab_parallel_soft_ce(**problem, token_chunk_size=8, tp_group=None)
    assert watch.multiplied == 64 * 300 * 16


def test_dflash_pays_for_active_slots_alone() -> None:
    problem = dflash_problem(16, 7, 300, 16, torch.float32)
    active = int(problem["loss_mask"][:, 1:].sum())
    assert 0 < active < 16 * 7
    watch = run(problem, draft.dflash_projected_vocab_parallel_soft_ce, 8, "draft_hidden")
    assert watch.multiplied == 2 * active * 300 * 16


def test_no_tensor_is_larger_than_a_tile_or_the_gradient() -> None:
    """[T, V] logits, a gathered teacher, a contiguous copy of a slice and an fp32 head would all be larger."""
    num_rows, vocab, hidden, chunk = 512, 4096, 64, 16
    tile = chunk * vocab * 4
    buffer = num_rows * hidden * 4
    for mask in ("all", "some"):
        problem = projected_problem(num_rows, vocab, hidden, torch.float32, mask=mask)
        assert projected(problem, chunk).largest <= max(tile, buffer)
    rows = projected_problem(num_rows, vocab, hidden, torch.float32, mask="all")
    sliced = {
        "student_hidden": rows["student_hidden"].detach().view(8, 64, hidden)[:, :-1].requires_grad_(),
        "output_weight": rows["output_weight"],
        "selected_teacher_logits": rows["selected_teacher_logits"].view(8, 64, vocab)[:, 1:],
        "mask": rows["mask"].view(8, 64)[:, 1:],
    }
    assert projected(sliced, chunk).largest <= max(tile, buffer)


def test_a_low_precision_head_is_never_widened_whole() -> None:
    problem = projected_problem(8, 20_000, 512, torch.bfloat16, mask="all")
    assert projected(problem, 4).largest <= 16 << 20 < 20_000 * 512 * 4


@pytest.mark.parametrize("mask", ["all", "some"])
def test_peak_memory(mask: str) -> None:
    """Measured with the allocator's own events: one [T, H] fp32 buffer and four tiles, gradient included."""
    num_rows, vocab, hidden, chunk = 512, 8192, 256, 32
    problem = projected_problem(num_rows, vocab, hidden, torch.float32, mask=mask)

    def step() -> None:
        stats = draft.projected_streaming_vocab_parallel_soft_ce(**problem, token_chunk_size=chunk, tp_group=None)
        torch.autograd.grad(stats.numerators.sum(), problem["student_hidden"])

    tile, buffer = chunk * vocab * 4, num_rows * hidden * 4
    assert tile < peak_allocated(step) <= buffer + 4 * tile
