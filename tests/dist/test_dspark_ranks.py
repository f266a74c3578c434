"""DSpark loss over real gloo ranks: equal to one process, constant collectives, mistakes raised on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.harness import RankContext, ranks
from xtok.losses.dspark import dspark_projected_vocab_parallel_loss

VOCAB, HIDDEN, ROWS, RANK_WIDTH, NUM_BINS = 41, 8, 13, 3, 3
SHARDED = {"output_weight": 0, "bias_weight": 0, "teacher_logits": 1}
LEAVES = ("student_hidden", "bias_features", "bias_weight", "confidence_logits")
SHARDS = {2: {"even": (21, 20), "uneven": (3, 38)}, 4: {"even": (11, 10, 10, 10), "uneven": (1, 25, 2, 13)}}


def make_inputs(dtype: torch.dtype = torch.float64, num_rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "student_hidden": normal(num_rows, HIDDEN),
        "output_weight": normal(VOCAB, HIDDEN),
        "teacher_logits": normal(num_rows + 2, VOCAB) * 2,
        "teacher_rows": torch.randint(0, num_rows + 2, (num_rows,), generator=generator),
        "target_ids": torch.randint(0, VOCAB, (num_rows,), generator=generator),
        "mask": torch.randint(0, 3, (num_rows,), generator=generator) / 2,
        "bin_ids": torch.randint(0, NUM_BINS, (num_rows,), generator=generator),
        "bias_features": normal(num_rows, RANK_WIDTH),
        "bias_weight": normal(VOCAB, RANK_WIDTH),
        "confidence_logits": normal(num_rows),
        "weights": torch.tensor([1.0, 0.5, 0.25]),
    }


def evaluate(inputs: dict[str, Tensor], group: Any, chunk: int, softcap: float | None = None) -> dict[str, Tensor]:
    inputs = dict(inputs)
    for name in LEAVES:
        inputs[name] = inputs[name].clone().requires_grad_()
    stats = dspark_projected_vocab_parallel_loss(**inputs, tp_group=group, token_chunk_size=chunk, logit_softcap=softcap)
    scale = torch.tensor([1.0, -0.5, 2.0])
    loss = (stats.cross_entropy.numerators * scale).sum() + (stats.l1_distance.numerators * scale.flip(0)).sum()
    loss = loss + stats.confidence.numerators.sum()
    gradients = torch.autograd.grad(loss, [inputs[name] for name in LEAVES])
    return {
        "ce": stats.cross_entropy.numerators,
        "l1": stats.l1_distance.numerators,
        "confidence": stats.confidence.numerators,
        "counts": stats.cross_entropy.counts,
        "overlap": stats.overlap,
        "draft_tokens": stats.draft_tokens,
        "teacher_tokens": stats.teacher_tokens,
        **{f"grad {name}": gradient for name, gradient in zip(LEAVES, gradients, strict=True)},
    }


def shard(inputs: dict[str, Tensor], context: RankContext, widths: tuple[int, ...]) -> dict[str, Tensor]:
    start = sum(widths[: context.rank])
    return {
        name: tensor.narrow(SHARDED[name], start, widths[context.rank]) if name in SHARDED else tensor
        for name, tensor in inputs.items()
    }


def run_shard(
    context: RankContext, dtype_name: str, widths: tuple[int, ...], chunk: int, softcap: float | None, num_rows: int = ROWS
) -> dict[str, Tensor]:
    inputs = make_inputs(getattr(torch, dtype_name), num_rows)
    return evaluate(shard(inputs, context, widths), context.group, chunk, softcap)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 6e-3)])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_one_process(world_size: int, cut: str, chunk: int, dtype: str, tolerance: float) -> None:
    softcap = 2.5 if chunk == 5 else None
    expected = evaluate(make_inputs(getattr(torch, dtype)), None, chunk, softcap)
    results = ranks(world_size).values(run_shard, dtype, SHARDS[world_size][cut], chunk, softcap)
    for result in results:
        for name, value in expected.items():
            if name != "grad bias_weight":
                value = value.float() if value.dtype == torch.bfloat16 else value
                torch.testing.assert_close(result[name], value.detach(), rtol=tolerance, atol=tolerance * 10, msg=name)
    whole = torch.cat([result["grad bias_weight"] for result in results])
    expected_gradient = expected["grad bias_weight"]
    torch.testing.assert_close(whole, expected_gradient.to(whole.dtype), rtol=tolerance, atol=tolerance * 10)


def test_no_supervised_row_on_ranks() -> None:
    for result in ranks(2).values(run_all_masked):
        assert all(tensor.eq(0).all() for name, tensor in result.items() if "tokens" not in name)


def run_all_masked(context: RankContext) -> dict[str, Tensor]:
    inputs = shard({**make_inputs(), "mask": torch.zeros(ROWS)}, context, (21, 20))
    return evaluate(inputs, context.group, 4)


def count_collectives(context: RankContext, num_rows: int) -> int:
    """Collectives of one forward and backward with one row a tile."""
    calls = 0
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")}

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        return call

    try:
        for name, original in originals.items():
            setattr(dist, name, counted(original))
        run_shard(context, "float32", (21, 20), 1, None, num_rows)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return calls


def test_collectives_do_not_grow_with_tiles() -> None:
    few, many = ranks(2).values(count_collectives, 3), ranks(2).values(count_collectives, 64)
    assert few == many
    assert few[0] > 0


CHANGES: dict[str, tuple[str, Any]] = {
    "student_hidden": ("shape", lambda t: t[:-1]),
    "output_weight": ("dtype", lambda t: t.float()),
    "teacher_logits": ("rows", lambda t: t[:-1]),
    "teacher_rows": ("values", lambda t: t.roll(1)),
    "target_ids": ("values", lambda t: t.roll(1)),
    "mask": ("values", lambda t: t.roll(1)),
    "bin_ids": ("values", lambda t: t.roll(1)),
    "bias_features": ("dtype", lambda t: t.float()),
    "bias_weight": ("width", lambda t: t[:, :-1]),
    "confidence_logits": ("presence", lambda t: None),
    "weights": ("values", lambda t: t * 2),
}


def run_with_a_difference(context: RankContext, name: str) -> None:
    inputs = shard(make_inputs(), context, (21, 20))
    if context.rank == 1:
        inputs[name] = CHANGES[name][1](inputs[name])
    dspark_projected_vocab_parallel_loss(**inputs, tp_group=context.group)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_one_ranks_difference_raises_on_all(name: str) -> None:
    errors = ranks(2).errors(run_with_a_difference, name)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert name in errors[0][1]


def run_with_a_setting(context: RankContext, setting: str) -> None:
    changed: dict[str, Any] = {"token_chunk_size": 7, "logit_softcap": 3.0}
    settings = {setting: changed[setting]} if context.rank else {}
    dspark_projected_vocab_parallel_loss(**shard(make_inputs(), context, (21, 20)), tp_group=context.group, **settings)


@pytest.mark.parametrize("setting", ["token_chunk_size", "logit_softcap"])
def test_one_ranks_setting_raises_on_all(setting: str) -> None:
    errors = ranks(2).errors(run_with_a_setting, setting)
    assert errors[0] == errors[1]
    assert setting in errors[0][1]


FAULTS = {
    "teacher_logits": (lambda t: t[:, :-1], "teacher_logits must end in 20 columns"),  # its width differs from its own head's
    "mask": (lambda t: t.index_fill(0, torch.tensor([4]), torch.nan), "mask holds nan at flat index 4"),
}


def run_with_a_local_fault(context: RankContext, name: str) -> None:
    inputs = shard(make_inputs(), context, (21, 20))
    if context.rank == 1:
        inputs[name] = FAULTS[name][0](inputs[name])
    dspark_projected_vocab_parallel_loss(**inputs, tp_group=context.group)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_that_one_rank_sees_raises_on_all(name: str) -> None:
    errors = ranks(2).errors(run_with_a_local_fault, name)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert "rank 1" in errors[0][1]
    assert FAULTS[name][1] in errors[0][1]


def run_with_a_bad_target(context: RankContext) -> None:
    inputs = shard(make_inputs(), context, (21, 20))
    inputs["target_ids"] = torch.full((ROWS,), VOCAB)
    dspark_projected_vocab_parallel_loss(**inputs, tp_group=context.group)


def test_a_target_beyond_the_whole_vocabulary_raises_on_all() -> None:
    errors = ranks(2).errors(run_with_a_bad_target)
    assert errors[0] == errors[1]
    assert errors[0][0] == "IndexError"
    assert "must be in [0, 41)" in errors[0][1]
