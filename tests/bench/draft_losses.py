"""Projected draft loss against the two bare matmuls of its supervised rows: time, peak memory, number of collectives.

Shapes: T rows, H hidden size, V vocabulary, c rows of a tile. CPU: fp32, T=2048 H=1024 V=32768 c=256; CUDA, where there is one:
bf16, T=8192 H=4096 V=151936 c=4096. Random data. The baseline is the two matmuls of the supervised rows in the same tiles of c rows,
into memory it already has: no softmax, no gather, no allocation. Beside it, the two matmuls with all rows at once, which need the
[T, V] logits that the loss exists to avoid.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.bench.memory import peak_allocated
from tests.dist.draft_cases import even_shards, run_loss, run_peak_memory
from tests.dist.harness import ranks
from xtok.losses.draft import projected_streaming_vocab_parallel_soft_ce

NAME = "draft"
DESCRIPTION = "projected soft cross-entropy, forward and backward, against its two bare matmuls"

_RUNS = 5
_MB = 1e6


@dataclass(frozen=True)
class Case:
    """A problem size and where it runs."""

    num_rows: int
    hidden: int
    vocab: int
    chunk: int
    dtype: torch.dtype
    device: str

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows [T, H] that want a gradient, head [V, H], teacher logits [T, V]."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        hidden = torch.randn(self.num_rows, self.hidden, **options).requires_grad_()
        head = torch.randn(self.vocab, self.hidden, **options).mul_(2 / self.hidden**0.5)
        return hidden, head, torch.randn(self.num_rows, self.vocab, **options).mul_(3)


CPU = Case(2048, 1024, 32768, 256, torch.float32, "cpu")
CUDA = Case(8192, 4096, 151936, 4096, torch.bfloat16, "cuda")


def run() -> list[dict[str, Any]]:
    case = CUDA if torch.cuda.is_available() else CPU
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return [*_figures_of(case), *_tensor_parallel_figures()]
    finally:
        torch.set_num_threads(threads)


def _figures_of(case: Case) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    hidden, head, teacher = case.tensors()
    every = torch.ones(case.num_rows, dtype=torch.bool, device=case.device)
    half = torch.arange(case.num_rows, device=case.device) % 2 == 0
    logits = torch.empty(case.num_rows, case.vocab, dtype=case.dtype, device=case.device)
    product = torch.empty(case.num_rows, case.hidden, dtype=case.dtype, device=case.device)

    def step(mask: Tensor) -> None:
        hidden.grad = None
        stats = projected_streaming_vocab_parallel_soft_ce(
            student_hidden=hidden,
            output_weight=head,
            selected_teacher_logits=teacher,
            mask=mask,
            token_chunk_size=case.chunk,
            tp_group=None,
        )
        stats.numerators.sum().backward()

    def bare(num_rows: int) -> None:
        torch.mm(hidden.detach()[:num_rows], head.T, out=logits[:num_rows])
        torch.mm(logits[:num_rows], head, out=product[:num_rows])

    def bare_tiles(num_rows: int) -> None:
        for start in range(0, num_rows, case.chunk):
            torch.mm(hidden.detach()[start : start + case.chunk], head.T, out=logits[: case.chunk])
            torch.mm(logits[: case.chunk], head, out=product[start : start + case.chunk])

    rows = []
    for name, mask in (("all rows", every), ("half the rows", half)):
        num_rows = int(mask.sum())
        seconds = _interleaved(
            [lambda mask=mask: step(mask), lambda n=num_rows: bare(n), lambda n=num_rows: bare_tiles(n)], case.device
        )
        rows.append(_row(f"{name}: loss / two bare matmuls (aim 1.15)", seconds[0], seconds[2], "<= 1.25", "s"))
        rows.append(_row(f"{name}: loss / the same, all rows at once", seconds[0], seconds[1], None, "s"))
    budget = case.num_rows * case.hidden * 4 + 4 * case.chunk * case.vocab * 4
    for name, mask in (("all rows", every), ("half the rows", half)):
        peak = peak_allocated(lambda mask=mask: step(mask))
        rows.append(_row(f"{name}: peak memory / (T*H*4 bytes + 4 tiles)", peak / _MB, budget / _MB, "<= 1", "MB"))
    return rows


def _tensor_parallel_figures() -> list[dict[str, Any]]:
    """Two gloo ranks on CPU: peak memory of a rank against twice the buffer and four tiles; collectives of 64 tiles and of one."""
    num_rows, vocab, hidden, chunk = 1024, 16384, 512, 128
    peak = max(ranks(2).values(run_peak_memory, [num_rows, vocab, hidden], even_shards(vocab, 2), chunk, "all"))
    budget = 2 * num_rows * hidden * 4 + 4 * chunk * (vocab // 2) * 4
    calls = []
    for tile in (1, 64):
        result = ranks(2).values(run_loss, "projected", [64, 64, 8, "float32"], {"mask": "all"}, [32, 32], tile)[0]
        calls.append(sum(result["forward"].values()) + sum(result["backward"].values()))
    return [
        _row("2 ranks: peak memory / (2*T*H*4 bytes + 4 tiles)", peak / _MB, budget / _MB, "<= 1", "MB"),
        _row("2 ranks: collectives of 64 tiles / of 1 tile", calls[0], calls[1], "<= 1", "calls"),
    ]


def _interleaved(calls: list[Callable[[], None]], device: str) -> list[float]:
    """Median seconds of each call over runs that take turns, after one warm-up each."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(_RUNS + 1):
        for call, taken in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if number:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


def _row(metric: str, value: float, baseline: float, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}
