"""The harness itself: results and errors of every rank, a rank that hangs is named, and the group comes back."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import RankContext, RankGroup, ranks


def total(context: RankContext, values: torch.Tensor) -> torch.Tensor:
    result = values * (context.rank + 1)
    dist.all_reduce(result, group=context.group)
    return result


def fail_alone(context: RankContext, rank: int) -> int:
    if context.rank == rank:
        raise ValueError(f"rank {rank} alone")
    return context.rank


def fail_everywhere(context: RankContext) -> None:
    raise ValueError(f"rank {context.rank}")


def sleep_alone(context: RankContext, rank: int, seconds: float) -> None:
    if context.rank == rank:
        time.sleep(seconds)


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_of_every_rank(world_size: int) -> None:
    values = ranks(world_size).values(total, torch.tensor([1.0, 2.0]))
    factor = world_size * (world_size + 1) / 2
    assert [value.tolist() for value in values] == [[factor, 2 * factor]] * world_size


def test_an_error_of_one_rank_is_seen_and_the_group_is_replaced() -> None:
    group = ranks(2)
    with pytest.raises(AssertionError, match=r"ranks \[0\] raised nothing; the others: .*rank 1 alone"):
        group.errors(fail_alone, 1)
    assert ranks(2) is not group
    assert ranks(2).errors(fail_everywhere) == [("ValueError", "rank 0"), ("ValueError", "rank 1")]


def test_a_silent_rank_is_named_in_time() -> None:
    group = RankGroup(2)
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 2 gave no answer"):
        group.run(sleep_alone, 1, 60.0, timeout_seconds=1.0)
    group.close()
    assert time.monotonic() - began < 30
