"""The cross-tokenizer loss over real gloo ranks: vocabulary-parallel student, data parallel, and both, equal to one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.harness import RankContext, ranks
from tests.parity.distillation_problems import Problem, random_problem
from xtok.losses.cross_tokenizer import CrossTokenizerDistillationConfig, CrossTokenizerDistillationLoss, HiddenLogits

BATCH, COLUMNS, HIDDEN = 4, 15, 5  # the head has two columns beyond the 13 ids
SHARDS = {1: {"whole": (15,)}, 2: {"even": (8, 7), "uneven": (1, 14), "padding only": (13, 2)}, 4: {"uneven": (2, 7, 0, 6)}}
CASES: list[dict[str, Any]] = [
    {"mode": "p_kl", "vocab_topk": None},
    {"mode": "p_kl", "chunk_reduction": "geometric", "vocab_topk": 4},
    {"mode": "p_kl", "chunk_reduction": "nemo", "vocab_topk": None},
    {"mode": "gold", "uncommon_topk": 3},
    {"mode": "h_kl"},
    {"mode": "alm"},
]


def make_problem() -> tuple[Problem, list[Tensor]]:
    problem = random_problem(21, batch_size=BATCH)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*problem.student.shape[:2], HIDDEN, generator=generator, dtype=torch.float64)
    return problem, [hidden, torch.randn(COLUMNS, HIDDEN, generator=generator, dtype=torch.float64)]


@cache
def groups(tp: int) -> tuple[Any, Any]:
    """(this rank's tp group, this rank's dp group) of a dp × tp layout over all ranks; tp ranks are neighbours."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine: list[Any] = [None, None]
    for start in range(0, world, tp):
        group = dist.new_group(list(range(start, start + tp)))
        mine[0] = group if start <= rank < start + tp else mine[0]
    for start in range(tp):
        group = dist.new_group(list(range(start, world, tp)))
        mine[1] = group if rank % tp == start else mine[1]
    return mine[0], mine[1]


def evaluate(
    context: RankContext | None, case: dict[str, Any], tp: int, shard: tuple[int, ...], as_hidden: bool, topk_all: bool
) -> dict[str, Any]:
    """This rank's loss and gradients, for its samples and its columns; the whole problem without a context."""
    config = CrossTokenizerDistillationConfig(**case, token_tile_size=3, ce_weight=0.3)
    problem, (hidden, weight) = make_problem()
    counts = problem.counts(config)
    tp_group, tp_rank, rows = None, 0, slice(None)
    if context is not None:
        tp_rank, dp_rank, dp = context.rank % tp, context.rank // tp, context.world_size // tp
        tp_group = groups(tp)[0] if tp > 1 else None
        rows = slice(dp_rank * BATCH // dp, (dp_rank + 1) * BATCH // dp)
    columns = slice(sum(shard[:tp_rank]), sum(shard[: tp_rank + 1]))
    batch = {key: value[rows] for key, value in problem.batch.items()}
    hidden, weight = hidden[rows].clone().requires_grad_(), weight[columns].clone().requires_grad_()
    logits = problem.student[rows][..., columns].clone().requires_grad_()
    loss, metrics = CrossTokenizerDistillationLoss(config, problem.projections)(
        student_logits=HiddenLogits(hidden, weight) if as_hidden else logits,
        teacher_logits=[teacher[rows] for teacher in problem.teachers],
        batch=batch,
        num_valid_tokens=counts[0],
        num_valid_chunks=counts[1],
        tp_group=tp_group,
    )
    loss.backward()
    sums = {name: torch.stack([metric.numerator, metric.denominator]) for name, metric in metrics.items()}
    gradients = {"hidden": hidden.grad, "weight": weight.grad} if as_hidden else {"logits": logits.grad}
    return {"loss": loss.detach(), "metrics": sums, **gradients}


def check(case: dict[str, Any], world: int, tp: int, shard: tuple[int, ...], as_hidden: bool) -> None:
    want = evaluate(None, case, 1, (COLUMNS,), as_hidden, True)
    got = ranks(world).values(evaluate, case, tp, shard, as_hidden, True)
    dp = world // tp
    replicas = [got[i * tp : (i + 1) * tp] for i in range(dp)]
    close = {"rtol": 1e-9, "atol": 1e-11}
    for ranks_of_one in replicas:
        for other in ranks_of_one[1:]:
            torch.testing.assert_close(other["loss"], ranks_of_one[0]["loss"], **close)
    torch.testing.assert_close(sum(r[0]["loss"] for r in replicas), want["loss"], **close)
    for name, metric in want["metrics"].items():
        if not name.startswith("teacher_weight"):
            total = sum(r[0]["metrics"][name] for r in replicas)
            torch.testing.assert_close(total[0], metric[0], **close)
    if as_hidden:
        for rank in range(tp):
            torch.testing.assert_close(torch.cat([r[rank]["hidden"] for r in replicas]), want["hidden"], **close)
        weight = torch.cat([sum(replica[rank]["weight"] for replica in replicas) for rank in range(tp)])
        torch.testing.assert_close(weight, want["weight"], **close)
    else:
        logits = torch.cat([torch.cat([r["logits"] for r in replica], dim=-1) for replica in replicas])
        torch.testing.assert_close(logits, want["logits"], **close)


@pytest.mark.parametrize("as_hidden", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("layout", SHARDS[2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_vocabulary_parallel_equals_one_process(case: dict[str, Any], layout: str, as_hidden: bool) -> None:
    check(case, 2, 2, SHARDS[2][layout], as_hidden)


@pytest.mark.parametrize("as_hidden", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("case", [c for c in CASES if c.get("vocab_topk") != 4], ids=lambda c: "-".join(map(str, c.values())))
def test_data_parallel_equals_one_process(case: dict[str, Any], as_hidden: bool) -> None:
    # vocab_topk chooses columns a micro-batch, so only "all columns" is the same under another layout
    case = {**case, "vocab_topk": None}
    check(case, 2, 1, SHARDS[1]["whole"], as_hidden)


@pytest.mark.parametrize("case", [c for c in CASES if c.get("vocab_topk") != 4], ids=lambda c: "-".join(map(str, c.values())))
def test_both_at_once_equal_one_process(case: dict[str, Any]) -> None:
    case = {**case, "vocab_topk": None}
    check(case, 4, 2, SHARDS[2]["even"], True)
    check(case, 4, 4, SHARDS[4]["uneven"], False)


def count_collectives(context: RankContext, tile: int, empty: bool) -> tuple[int, float]:
    """All-reduces of one forward and backward of CE and ALM, and the loss; `empty` leaves no valid chunk."""
    problem, (hidden, weight) = make_problem()
    if empty:
        problem.batch["alignment_0_pair_valid"][:] = False
    config = CrossTokenizerDistillationConfig(mode="alm", token_tile_size=tile, vocab_topk=None)
    loss_fn = CrossTokenizerDistillationLoss(config, problem.projections[:1])
    counts = loss_fn.count_valid(problem.batch)
    half = slice(0, 8) if context.rank == 0 else slice(8, 15)
    calls, original = [0], dist.all_reduce

    def counting(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return original(*arguments, **options)

    dist.all_reduce = counting
    try:
        loss, _ = loss_fn(
            student_logits=HiddenLogits(hidden.requires_grad_(), weight[half].clone().requires_grad_()),
            teacher_logits=problem.teachers[:1],
            batch=problem.batch,
            num_valid_tokens=counts.num_valid_tokens,
            num_valid_chunks=counts.num_valid_chunks,
            tp_group=context.group,
        )
        loss.backward()
    finally:
        dist.all_reduce = original
    return calls[0], float(loss)


def test_collectives_of_cross_entropy_and_alm_do_not_grow_with_tiles() -> None:
    numbers = {tile: ranks(2).values(count_collectives, tile, False)[0] for tile in (1, 1000)}
    assert numbers[1][0] == numbers[1000][0]
    assert numbers[1][1] == pytest.approx(numbers[1000][1], rel=1e-12)
    assert ranks(2).values(count_collectives, 1, True)[0][0] == numbers[1][0]
