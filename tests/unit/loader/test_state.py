"""Resuming, shown by replay: what comes after a state is what would have come without stopping, on any number of ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.unit.loader.synthetic import assert_equal_batches, make_rows, publish
from xtok.batch import BatchedDataDict
from xtok.errors import ConfigError, DatasetMismatchError
from xtok.loader import AlignedShardLoader
from xtok.loader.reader import _RowGroups
from xtok.shards.read import RowGroupRef, Side


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = make_rows(83, refuse=0.1, seed=5)
    return publish(tmp_path_factory.mktemp("dataset"), [rows[:31], rows[31:40], rows[40:]])


def loaders(url: str, world_size: int, batch_size: int, **settings: Any) -> list[AlignedShardLoader]:
    return [
        AlignedShardLoader(url, batch_size=batch_size, rank=rank, world_size=world_size, shuffle_row_groups=3, **settings)
        for rank in range(world_size)
    ]


def take_steps(ranks: list[AlignedShardLoader], num_steps: int | None = None) -> list[int]:
    """idx of the rows of the next global batches, in the global order, fillers left out."""
    iterators = [iter(rank) for rank in ranks]
    seen: list[int] = []
    step = 0
    while num_steps is None or step < num_steps:
        batches = [next(iterator, None) for iterator in iterators]
        assert len({batch is None for batch in batches}) == 1  # every rank ends at the same step
        if batches[0] is None:
            break
        seen += [idx for batch in batches if batch is not None for idx in batch["idx"] if idx != -1]
        step += 1
    return seen


@settings(max_examples=12, deadline=None)
@given(
    epoch=st.integers(0, 2),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_replay_across_world_sizes(url: str, epoch: int, runs: list[tuple[int, int, int]]) -> None:
    undisturbed = take_steps(loaders(url, 1, 1, epoch=epoch))
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world_size, batch_size, num_steps in runs:
        ranks = loaders(url, world_size, batch_size, drop_last=False)
        for rank in ranks:
            if state is None:
                rank.set_epoch(epoch)
            else:
                rank.load_state_dict(state)
        seen += take_steps(ranks, num_steps)
        states = [rank.state_dict() for rank in ranks]
        assert all(found == states[0] for found in states)
        assert states[0]["num_rows_consumed"] == len(seen)
        state = json.loads(json.dumps(states[0]))
    last = loaders(url, 2, 3, drop_last=False)
    for rank in last:
        rank.load_state_dict(state or {})
    assert seen + take_steps(last) == undisturbed


def test_resuming_reads_only_the_windows_that_remain(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loaders(url, 1, 4)[0]
    whole = list(loader)
    fresh = loaders(url, 1, 4, read_ahead=False)[0]
    fresh.load_state_dict(loader.state_after(len(whole) - 1))
    read: list[tuple[int, int]] = []
    original = _RowGroups.read

    def counting(self: _RowGroups, ref: RowGroupRef, side: Side, columns: list[str]) -> Any:
        read.append((ref.part, ref.row_group))
        return original(self, ref, side, columns)

    monkeypatch.setattr(_RowGroups, "read", counting)
    (batch,) = list(fresh)
    assert_equal_batches(batch, whole[-1])
    assert 0 < len(set(read)) <= 2 * 3  # the windows that the last batch touches


def test_state_counts_a_batch_once_it_is_handed_out(url: str) -> None:
    loader = loaders(url, 1, 4)[0]
    assert loader.state_dict() == loader.state_after(0)
    for number, _ in enumerate(loader, 1):
        assert loader.state_dict() == loader.state_after(number)
        assert loader.state_dict()["num_rows_consumed"] == 4 * number


def test_a_second_iteration_starts_the_epoch_again_and_set_epoch_keeps_a_loaded_state(url: str) -> None:
    loader = loaders(url, 1, 4)[0]
    first = [batch["idx"] for batch in loader]
    assert [batch["idx"] for batch in loader] == first
    loader.load_state_dict(loader.state_after(2))
    loader.set_epoch(0)
    assert [batch["idx"] for batch in loader] == first[2:]
    loader.load_state_dict(loader.state_after(2) | {"epoch": 0})
    loader.set_epoch(1)
    assert len(list(loader)) == len(first)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_data_loader_workers_change_nothing(url: str, num_workers: int, drop_last: bool) -> None:
    plain = list(loaders(url, 1, 4, drop_last=drop_last)[0])
    behind = DataLoader(loaders(url, 1, 4, drop_last=drop_last)[0], batch_size=None, num_workers=num_workers)
    assert len(behind) == len(plain)
    found = list(behind)
    assert len(found) == len(plain)
    for batch, wanted in zip(found, plain, strict=True):
        assert type(batch) is BatchedDataDict, "it comes out of a worker as what it is"
        assert_equal_batches(batch, wanted)


def test_workers_go_on_from_a_loaded_state(url: str) -> None:
    plain = [batch["idx"] for batch in loaders(url, 1, 4)[0]]
    loader = loaders(url, 1, 4)[0]
    loader.load_state_dict(loader.state_after(3))
    assert [batch["idx"] for batch in DataLoader(loader, batch_size=None, num_workers=2)] == plain[3:]


def test_workers_that_outlive_an_epoch_follow_set_epoch(url: str) -> None:
    loader = loaders(url, 1, 4)[0]
    behind = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        assert [batch["idx"] for batch in behind] == [batch["idx"] for batch in loaders(url, 1, 4, epoch=epoch)[0]]


def test_position_behind_plain_workers_is_not_guessed(url: str) -> None:
    loader = loaders(url, 1, 4)[0]
    plain = [batch["idx"] for batch in loader]
    for number, _ in enumerate(DataLoader(loader, batch_size=None, num_workers=1), 1):
        if number == 2:
            break
    with pytest.raises(RuntimeError, match="state_after"):
        loader.state_dict()
    loader.load_state_dict(loader.state_after(2))
    assert loader.state_dict()["num_rows_consumed"] == 8
    assert [batch["idx"] for batch in loader] == plain[2:]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_stateful_data_loader(url: str, num_workers: int, stop: int) -> None:
    plain = [batch["idx"] for batch in loaders(url, 1, 4)[0]]
    behind = StatefulDataLoader(loaders(url, 1, 4)[0], batch_size=None, num_workers=num_workers)
    iterator = iter(behind)
    seen = [next(iterator)["idx"] for _ in range(stop)]
    state = behind.state_dict()
    del iterator
    resumed = StatefulDataLoader(loaders(url, 1, 4)[0], batch_size=None, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert seen + [batch["idx"] for batch in resumed] == plain


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle_row_groups": 2}, {"shuffle": False}, {"teachers": [0]}])
def test_state_of_another_order_is_refused(url: str, change: dict[str, Any]) -> None:
    state = loaders(url, 1, 4)[0].state_dict()
    other = AlignedShardLoader(url, batch_size=4, **({"shuffle_row_groups": 3} | change))
    with pytest.raises(DatasetMismatchError, match="another order"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0},
        {"epoch": "x", "num_rows_consumed": 0},
        {"epoch": 0, "num_rows_consumed": 10**6},
        {"epoch": -1, "num_rows_consumed": 0},
    ],
)
def test_what_is_no_state_is_refused(url: str, state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="state"):
        loaders(url, 1, 4)[0].load_state_dict(state)
