"""Draft losses on two and four gloo ranks: values and gradients of one process, for even and uneven shards; few collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.draft_cases import LOSSES, even_shards, run_loss, run_on_shards_of, run_peak_memory
from tests.dist.harness import ranks
from tests.draft_problems import gradient_of, relative_error, unprojected_problem

INF = float("inf")
V = 41
SHARDS = {2: {"even": [20, 21], "uneven": [3, 38]}, 4: {"even": [10, 10, 10, 11], "uneven": [1, 25, 2, 13]}}
SIZES: dict[str, list[Any]] = {"projected": [13, V, 6], "unprojected": [13, V], "dflash": [6, 4, V, 6]}


def one_process(kind: str, sizes: list[Any], options: dict[str, Any], chunk: int) -> tuple[Any, torch.Tensor]:
    loss, make, differentiable = LOSSES[kind]
    problem = make(*[getattr(torch, size) if isinstance(size, str) else size for size in sizes], **options)
    stats = loss(**problem, token_chunk_size=chunk, tp_group=None)
    return stats, gradient_of(stats, problem[differentiable])


def columns(kind: str, gradient: torch.Tensor, widths: list[int], rank: int) -> torch.Tensor:
    """The part of a one-process gradient that a rank holds: its own columns for logits, everything for hidden rows."""
    return gradient.narrow(-1, sum(widths[:rank]), widths[rank]) if kind == "unprojected" else gradient


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("split", ["even", "uneven"])
@pytest.mark.parametrize("kind", ["projected", "unprojected", "dflash"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6), ("bfloat16", 0.51 * 2**-7)])
def test_ranks_equal_one_process(world_size: int, split: str, kind: str, dtype: str, tolerance: float) -> None:
    widths = SHARDS[world_size][split]
    sizes = [*SIZES[kind], dtype]
    for options in (
        [{"seed": 1}] if kind == "dflash" else [{"mask": "all"}, {"mask": "fractional", "num_bins": 4}, {"mask": "none"}]
    ):
        for chunk in (5, 64):  # many tiles, one tile
            stats, gradient = one_process(kind, sizes, options, chunk)
            results = ranks(world_size).values(run_loss, kind, sizes, options, widths, chunk)
            for rank, result in enumerate(results):
                assert relative_error(result["numerators"], stats.numerators) <= min(tolerance, 3e-6)
                assert torch.equal(result["numerators"], results[0]["numerators"])
                assert torch.equal(result["counts"], stats.counts)
                assert torch.equal(result["weights"], stats.weights)
                assert relative_error(result["gradient"], columns(kind, gradient, widths, rank)) <= 2 * tolerance


@pytest.mark.parametrize("kind", ["projected", "unprojected", "dflash"])
def test_collectives_do_not_grow_with_tiles(kind: str) -> None:
    """One tile and 64 tiles of the same rows: the same calls, and no more than promised."""
    sizes = {"projected": [64, 16, 4, "float32"], "unprojected": [64, 16, "float32"], "dflash": [80, 4, 16, 4, "float32"]}[kind]
    options = {"seed": 3} if kind == "dflash" else {"mask": "all"}
    counts = []
    for chunk in (4096, 1):
        result = ranks(2).values(run_loss, kind, sizes, options, even_shards(16, 2), chunk)[0]
        assert int(result["counts"].sum()) >= 64
        counts.append((result["forward"], result["backward"]))
    assert counts[0] == counts[1]
    agreement = {} if kind == "unprojected" else {"all_reduce": 1}
    assert counts[0][0] == {"all_gather": 1 if kind == "unprojected" else 2} | agreement
    assert counts[0][1] == ({} if kind == "unprojected" else {"all_reduce": 1})


@pytest.mark.parametrize("mask", ["all", "some"])
def test_peak_memory_is_two_buffers_and_four_tiles(mask: str) -> None:
    num_rows, vocab, hidden, chunk = 512, 8192, 256, 32
    tile, buffer = chunk * vocab // 2 * 4, num_rows * hidden * 4
    for peak in ranks(2).values(run_peak_memory, [num_rows, vocab, hidden], even_shards(vocab, 2), chunk, mask):
        assert tile < peak <= 2 * buffer + 4 * tile


def test_no_block_anywhere() -> None:
    for result in ranks(2).values(run_loss, "dflash", [0, 4, V, 6, "float32"], {}, [20, 21], 4):
        assert result["numerators"].tolist() == [0.0] * 4
        assert result["counts"].tolist() == [0.0] * 4
        assert result["gradient"].shape == (0, 5, 6)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("chunk", [2, 64])
def test_numerical_contract_across_shards(world_size: int, chunk: int) -> None:
    """Shards of -inf alone, mass where the student has none, NaN in masked rows, shifts, scale: as in one process."""
    base = unprojected_problem(6, 16, torch.float32, mask="all")
    base = {name: value.detach() for name, value in base.items()}
    padded = {name: value.clone() for name, value in base.items()}
    padded["student_logits"][:, 12:] = padded["teacher_logits"][:, 12:] = -INF  # the last shard of four is padding
    one_sided = {name: value.clone() for name, value in base.items()}
    one_sided["teacher_logits"][:, :4] = -INF
    infinite = {name: value.clone() for name, value in base.items()}
    infinite["student_logits"][2, :8] = -INF
    dirty = {name: value.clone() for name, value in base.items()}
    dirty["mask"][1] = False
    dirty["student_logits"][1, 3] = float("nan")
    dirty["teacher_logits"][1, 9] = INF
    shifted = base | {"student_logits": base["student_logits"] + 1e4, "teacher_logits": base["teacher_logits"] - 1e4}
    scaled = base | {"student_logits": base["student_logits"] * 1e4, "teacher_logits": base["teacher_logits"] * 1e4}
    far = {name: value.clone() for name, value in base.items()}
    far["student_logits"][2, :8] = -3e38  # differences that overflow within a shard and from shard to shard
    far["student_logits"][2, 6] = far["student_logits"][2, 13] = 1e38
    far["teacher_logits"][2, :8] -= 2.0
    bad = {name: value.clone() for name, value in base.items()}
    bad["student_logits"][3, 0] = float("nan")  # seen by the first rank only; the loss is NaN on all
    loss = LOSSES["unprojected"][0]
    widths = even_shards(16, world_size)
    for problem in (padded, one_sided, infinite, dirty, shifted, scaled, far, bad):
        whole = problem | {"student_logits": problem["student_logits"].clone().requires_grad_()}
        stats = loss(**whole, token_chunk_size=chunk, tp_group=None)
        gradient = gradient_of(stats, whole["student_logits"])
        for rank, result in enumerate(ranks(world_size).values(run_on_shards_of, "unprojected", problem, widths, chunk)):
            torch.testing.assert_close(result["numerators"], stats.numerators.detach(), rtol=1e-5, atol=0, equal_nan=True)
            expected = columns("unprojected", gradient, widths, rank)
            torch.testing.assert_close(result["gradient"], expected, rtol=1e-4, atol=1e-6, equal_nan=True)
            assert problem is bad or torch.isfinite(result["gradient"]).all()
            assert problem is not far or torch.isfinite(result["numerators"]).all()
