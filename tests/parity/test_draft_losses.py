"""Draft losses against the dense fp64 oracle: dtypes, odd sizes, chunk sizes, masks, bins, empty cases; values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draft_problems import dflash_problem, gradient_of, projected_problem, relative_error, unprojected_problem
from xtok.losses import draft, reference, tiles
from xtok.losses.tiles import FrozenHead

# Values are sums in fp32 (fp64); a low-precision gradient is rounded once to its own dtype: half a unit in the last place.
VALUE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
GRADIENT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 0.51 * 2**-7, torch.float16: 0.51 * 2**-10}
DTYPES = list(VALUE_TOLERANCE)
T = 13

LOSSES: dict[str, Any] = {
    "projected": (draft.projected_streaming_vocab_parallel_soft_ce, reference.dense_projected_soft_ce, "student_hidden"),
    "unprojected": (draft.streaming_vocab_parallel_soft_ce, reference.dense_soft_ce, "student_logits"),
    "dflash": (draft.dflash_projected_vocab_parallel_soft_ce, reference.dense_dflash_soft_ce, "draft_hidden"),
}


def assert_equal_to_dense(kind: str, problem: dict[str, Any], chunk: int) -> None:
    """Numerators, counts, weights and gradient of the fast path and of the oracle."""
    fast, dense, differentiable = LOSSES[kind]
    dtype = problem[differentiable].dtype
    actual = fast(**problem, token_chunk_size=chunk, tp_group=None)
    renamed = {"teacher_logits" if name == "selected_teacher_logits" else name: value for name, value in problem.items()}
    expected = dense(**renamed)
    result_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for name in ("numerators", "counts", "weights"):
        value = getattr(actual, name)
        assert value.dtype == result_dtype
        assert relative_error(value, getattr(expected, name)) <= VALUE_TOLERANCE[dtype], name
        assert value.requires_grad == (name == "numerators")
    gradient = gradient_of(actual, problem[differentiable])
    assert gradient.dtype == dtype
    assert gradient.shape == problem[differentiable].shape
    exact = problem[differentiable].detach().double().requires_grad_()
    expected_gradient = gradient_of(dense(**renamed | {differentiable: exact}), exact)
    assert relative_error(gradient, expected_gradient) <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, T - 1, T, T + 1])
@pytest.mark.parametrize("mask", ["all", "some", "fractional"])
def test_projected_equals_dense(dtype: torch.dtype, chunk: int, mask: str) -> None:
    problem = projected_problem(T, 251, 7, dtype, mask=mask, num_bins=4, seed=chunk)
    assert_equal_to_dense("projected", problem, chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, T - 1, T, T + 1])
@pytest.mark.parametrize("mask", ["all", "some", "fractional"])
def test_unprojected_equals_dense(dtype: torch.dtype, chunk: int, mask: str) -> None:
    problem = unprojected_problem(T, 251, dtype, mask=mask, num_bins=4, seed=chunk)
    assert_equal_to_dense("unprojected", problem, chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_dflash_equals_dense(dtype: torch.dtype, chunk: int) -> None:
    assert_equal_to_dense("dflash", dflash_problem(9, 5, 37, 6, dtype, seed=chunk), chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 252, 507, 4096, 5003])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_odd_sizes_and_vocabulary_blocks_with_a_tail(dtype: torch.dtype, vocab: int, num_rows: int) -> None:
    assert_equal_to_dense("projected", projected_problem(num_rows, vocab, 3, dtype, seed=vocab), 2)
    assert_equal_to_dense("unprojected", unprojected_problem(num_rows, vocab, dtype, seed=vocab), 2)


def test_vocabularies_above_are_cut_in_blocks() -> None:
    """5003 columns exercise blocks and a tail in fp32, and a large low-precision head is widened in several pieces."""
    assert FrozenHead(torch.empty(5003, 3)).layout.num_blocks == 8
    assert FrozenHead(torch.empty(5003, 3)).layout.tail == 3
    wide = FrozenHead(torch.empty(5003, 2048, dtype=torch.bfloat16)).layout
    assert (wide.num_blocks, wide.num_blocks * wide.block_size + wide.tail) == (3, 5003)


@pytest.mark.parametrize("kind", ["projected", "unprojected"])
@pytest.mark.parametrize("vocab", [4096, 5003])
@pytest.mark.parametrize("mask", ["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tile_of_several_elementwise_blocks(
    monkeypatch: pytest.MonkeyPatch, kind: str, vocab: int, mask: str, dtype: torch.dtype
) -> None:
    """Two rows at a time through a tile of five, the last block and the last tile shorter: the same numbers."""
    monkeypatch.setattr(tiles, "_CPU_BLOCK_ELEMENTS", 2 * vocab)
    make = projected_problem if kind == "projected" else unprojected_problem
    sizes = (T, vocab, 3) if kind == "projected" else (T, vocab)
    assert_equal_to_dense(kind, make(*sizes, dtype, mask=mask, num_bins=3), 5)


def test_large_low_precision_head_equals_dense() -> None:
    assert_equal_to_dense("projected", projected_problem(5, 5003, 2048, torch.bfloat16), 3)


@pytest.mark.parametrize("kind", ["projected", "unprojected"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2)])
def test_leading_dims_and_strided_slices(kind: str, shape: tuple[int, ...]) -> None:
    """[B, S, ...] rows, sliced along S so that no flat view exists: the same numbers as contiguous rows."""
    num_rows = shape[0] * (shape[1] + 1) * (shape[2] if len(shape) > 2 else 1)
    make = projected_problem if kind == "projected" else unprojected_problem
    sizes = (num_rows, 11, 4) if kind == "projected" else (num_rows, 11)
    for mask in ("all", "some"):
        flat = make(*sizes, torch.float64, mask=mask, num_bins=3)
        longer = (shape[0], shape[1] + 1, *shape[2:])
        problem = {
            name: value
            if name in ("output_weight", "weights")
            else value.detach().reshape(*longer, *value.shape[1:])[:, : shape[1]]
            for name, value in flat.items()
        }
        problem["mask"][0, 0] = True
        differentiable = LOSSES[kind][2]
        problem[differentiable].requires_grad_()
        assert_equal_to_dense(kind, problem, 3)


@pytest.mark.parametrize("kind", ["projected", "unprojected"])
def test_however_rows_are_binned_the_total_is_the_same(kind: str) -> None:
    """One bin, empty bins and a bin for each row give the same total."""
    make = projected_problem if kind == "projected" else unprojected_problem
    problem = make(*((T, 29, 5) if kind == "projected" else (T, 29)), torch.float64, mask="fractional")
    fast = LOSSES[kind][0]
    one = fast(**problem, token_chunk_size=4, tp_group=None)
    each = fast(**problem, bin_ids=torch.arange(T), weights=torch.ones(T + 5), token_chunk_size=4, tp_group=None)
    assert torch.allclose(each.numerators.sum(), one.numerators[0], rtol=1e-12)
    assert (each.numerators[T:] == 0).all()
    assert (each.counts[T:] == 0).all()
    assert torch.allclose(each.counts[:T], problem["mask"].double())


@pytest.mark.parametrize("kind", ["projected", "unprojected"])
@pytest.mark.parametrize("chunk", [1, T, 4096])
def test_everything_masked_keeps_the_autograd_path(kind: str, chunk: int) -> None:
    make = projected_problem if kind == "projected" else unprojected_problem
    problem = make(*((T, 29, 5) if kind == "projected" else (T, 29)), torch.float32, mask="none", num_bins=3)
    stats = LOSSES[kind][0](**problem, token_chunk_size=chunk, tp_group=None)
    assert stats.numerators.tolist() == [0.0] * 3
    assert stats.counts.tolist() == [0.0] * 3
    assert not gradient_of(stats, problem[LOSSES[kind][2]]).any()


def test_dflash_without_blocks_or_without_active_slots() -> None:
    for num_blocks in (0, 2):
        problem = dflash_problem(num_blocks, 3, 7, 4, torch.float32)
        problem["loss_mask"] = torch.zeros_like(problem["loss_mask"])
        stats = draft.dflash_projected_vocab_parallel_soft_ce(**problem, token_chunk_size=4, tp_group=None)
        assert stats.numerators.tolist() == [0.0] * 3
        assert stats.counts.tolist() == [0.0] * 3
        assert torch.allclose(stats.weights, torch.tensor([1.0, 0.8, 0.64]))
        gradient = gradient_of(stats, problem["draft_hidden"])
        assert gradient.shape == problem["draft_hidden"].shape
        assert not gradient.any()


@pytest.mark.parametrize("chunk", [2, 5, 6])
@pytest.mark.parametrize("kind", ["projected", "unprojected", "dflash"])
def test_gradcheck_fp64(kind: str, chunk: int) -> None:
    fast, _, differentiable = LOSSES[kind]
    problem: dict[str, Any] = {
        "projected": lambda: projected_problem(6, 9, 4, torch.float64, mask="fractional", num_bins=3),
        "unprojected": lambda: unprojected_problem(6, 9, torch.float64, mask="fractional", num_bins=3),
        "dflash": lambda: dflash_problem(3, 3, 9, 4, torch.float64),
    }[kind]()

    def numerators(tensor: torch.Tensor) -> torch.Tensor:
        return fast(**problem | {differentiable: tensor}, token_chunk_size=chunk, tp_group=None).numerators

    assert torch.autograd.gradcheck(numerators, (problem[differentiable],))


@pytest.mark.parametrize("kind", ["projected", "unprojected"])
def test_both_routes_give_the_same_numbers(kind: str) -> None:
    """Cached (all rows in one tile) and streaming."""
    make = projected_problem if kind == "projected" else unprojected_problem
    problem = make(*((T, 503, 8) if kind == "projected" else (T, 503)), torch.float64, num_bins=3)
    fast, _, differentiable = LOSSES[kind]
    cached = fast(**problem, token_chunk_size=T, tp_group=None)
    streaming = fast(**problem, token_chunk_size=2, tp_group=None)
    assert relative_error(streaming.numerators, cached.numerators) < 1e-14
    gradients = [gradient_of(stats, problem[differentiable]) for stats in (streaming, cached)]
    assert relative_error(*gradients) < 1e-14


@pytest.mark.parametrize("kind", ["projected", "unprojected"])
def test_teacher_and_head_never_get_a_gradient(kind: str) -> None:
    make = projected_problem if kind == "projected" else unprojected_problem
    problem = make(*((T, 29, 5) if kind == "projected" else (T, 29)), torch.float32)
    others = [name for name in ("output_weight", "selected_teacher_logits", "teacher_logits") if name in problem]
    for name in others:
        problem[name].requires_grad_()
    stats = LOSSES[kind][0](**problem, token_chunk_size=4, tp_group=None)
    stats.numerators.sum().backward()
    assert all(problem[name].grad is None for name in others)
    assert problem[LOSSES[kind][2]].grad is not None


@pytest.mark.parametrize("kind", ["projected", "unprojected", "dflash"])
def test_without_gradient_the_values_are_the_same(kind: str) -> None:
    problem: dict[str, Any] = {
        "projected": lambda: projected_problem(T, 29, 5, torch.float32),
        "unprojected": lambda: unprojected_problem(T, 29, torch.float32),
        "dflash": lambda: dflash_problem(4, 3, 29, 5, torch.float32),
    }[kind]()
    fast = LOSSES[kind][0]
    expected = fast(**problem, token_chunk_size=4, tp_group=None).numerators
    with torch.no_grad():
        actual = fast(**problem, token_chunk_size=4, tp_group=None).numerators
    assert not actual.requires_grad
    assert torch.equal(actual, expected)


def test_backward_twice_accumulates() -> None:
    problem = projected_problem(T, 29, 5, torch.float32)
    stats = draft.projected_streaming_vocab_parallel_soft_ce(**problem, token_chunk_size=4, tp_group=None)
    stats.numerators.sum().backward(retain_graph=True)
    once = problem["student_hidden"].grad.clone()
    stats.numerators.sum().backward()
    assert torch.equal(problem["student_hidden"].grad, 2 * once)
