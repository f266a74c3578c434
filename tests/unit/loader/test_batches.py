"""Batches against plain loops over the same rows, and the order they come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.loader.synthetic import assert_equal_batches, make_rows, publish, reference_batch
from xtok.loader import AlignedShardLoader


def rows_by_idx(parts: list[Any]) -> dict[int, Any]:
    return {row.idx: row for part in parts for row in part}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("refuse", [0.0, 0.3])
@pytest.mark.parametrize("read_ahead", [True, False])
def test_every_batch_equals_the_reference(tmp_path: Path, plain: bool, refuse: float, read_ahead: bool) -> None:
    rows = make_rows(45, refuse=refuse, plain=plain)
    parts = [rows[:13], rows[13:20], rows[20:]]
    loader = AlignedShardLoader(
        publish(tmp_path, parts), batch_size=5, pad_divisor=4, shuffle_row_groups=2, read_ahead=read_ahead
    )
    batches = list(loader)
    assert len(batches) == len(loader) > 3
    known = rows_by_idx(parts)
    for batch in batches:
        assert_equal_batches(batch, reference_batch([known[idx] for idx in batch["idx"]], (0, 1), divisor=4))
    seen = [idx for batch in batches for idx in batch["idx"]]
    usable = [row.idx for row in rows if None not in row.teachers]
    assert len(set(seen)) == len(seen) == len(usable) - loader.num_dropped_rows
    assert set(seen) <= set(usable)


def test_pads_to_the_context_rounded_up(tmp_path: Path) -> None:
    rows = make_rows(12)
    loader = AlignedShardLoader(publish(tmp_path, [rows]), batch_size=6, pad_to="context", pad_divisor=7)
    known = rows_by_idx([rows])
    for batch in loader:
        assert batch["input_ids"].shape[1] == 70  # 64 rounded up to a multiple of 7
        assert_equal_batches(batch, reference_batch([known[idx] for idx in batch["idx"]], (0, 1), divisor=7, context=True))


def test_teacher_divisors_are_their_own(tmp_path: Path) -> None:
    loader = AlignedShardLoader(publish(tmp_path, [make_rows(8)]), batch_size=4, pad_divisor=3, teacher_pad_divisors=[16, 5])
    for batch in loader:
        assert batch["input_ids"].shape[1] % 3 == 0
        assert batch["teacher_0_input_ids"].shape[1] % 16 == 0
        assert batch["teacher_1_input_ids"].shape[1] % 5 == 0


def test_without_shuffling_rows_come_as_stored(tmp_path: Path) -> None:
    rows = make_rows(20)
    loader = AlignedShardLoader(publish(tmp_path, [rows[:9], rows[9:]]), batch_size=4, shuffle=False)
    assert [idx for batch in loader for idx in batch["idx"]] == [row.idx for row in rows]


def test_subset_of_teachers_keeps_their_index_and_more_rows(tmp_path: Path) -> None:
    rows = make_rows(40, refuse=0.4)
    url = publish(tmp_path, [rows])
    loader = AlignedShardLoader(url, batch_size=1, teachers=[1])
    known = rows_by_idx([rows])
    seen = []
    for batch in loader:
        assert_equal_batches(batch, reference_batch([known[idx] for idx in batch["idx"]], (1,)))
        seen += batch["idx"]
    assert set(seen) == {row.idx for row in rows if row.teachers[1] is not None}
    both = [idx for batch in AlignedShardLoader(url, batch_size=1) for idx in batch["idx"]]
    # Leaving rows out never moves the others.
    assert both == [idx for idx in seen if known[idx].teachers[0] is not None]
    none = [idx for batch in AlignedShardLoader(url, batch_size=1, teachers=[]) for idx in batch["idx"]]
    assert sorted(none) == [row.idx for row in rows]


def test_same_tokenizer_teacher_adds_no_key(tmp_path: Path) -> None:
    rows = make_rows(8)
    loader = AlignedShardLoader(publish(tmp_path, [rows], same_as_student=(True, False)), batch_size=4)
    known = rows_by_idx([rows])
    for batch in loader:
        assert_equal_batches(batch, reference_batch([known[idx] for idx in batch["idx"]], (1,)))


def test_order_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    rows = make_rows(64)
    url = publish(tmp_path, [rows[:30], rows[30:]])

    def order(**settings: Any) -> list[int]:
        return [idx for batch in AlignedShardLoader(url, batch_size=1, shuffle_row_groups=3, **settings) for idx in batch["idx"]]

    assert order() == order(teachers=[0]) == order(seed=0, epoch=0)
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}) == 9
    loader = AlignedShardLoader(url, batch_size=1, shuffle_row_groups=3)
    loader.set_epoch(2)
    assert [idx for batch in loader for idx in batch["idx"]] == order(epoch=2)
    assert sorted(order(seed=-5)) == sorted(row.idx for row in rows)


def test_the_order_is_fixed_for_good(tmp_path: Path) -> None:
    # A changed order would make every saved state of every user wrong: this list may never change.
    rows = make_rows(12)
    loader = AlignedShardLoader(publish(tmp_path, [rows], row_group_rows=3), batch_size=1, seed=1, epoch=2, shuffle_row_groups=2)
    assert [idx // 3 for batch in loader for idx in batch["idx"]] == [8, 2, 1, 7, 6, 0, 9, 11, 3, 5, 4, 10]


def test_windows_hold_neighbouring_row_groups_only(tmp_path: Path) -> None:
    rows = make_rows(48)
    loader = AlignedShardLoader(publish(tmp_path, [rows]), batch_size=1, shuffle_row_groups=2)
    order = np.array([idx // 3 for batch in loader for idx in batch["idx"]])
    groups = order // 4
    windows = groups.reshape(-1, 8)
    assert all(len(set(window)) == 2 for window in windows.tolist())
    assert len({tuple(sorted(set(window))) for window in windows.tolist()}) == 6
    assert any(window[0] == window[-1] or len(np.flatnonzero(np.diff(window))) > 1 for window in windows)  # mixed within


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_each_global_batch(tmp_path: Path, world_size: int) -> None:
    rows = make_rows(50, refuse=0.1)
    url = publish(tmp_path, [rows[:21], rows[21:]], row_group_rows=5)
    whole = [idx for batch in AlignedShardLoader(url, batch_size=1) for idx in batch["idx"]]
    ranks = [
        AlignedShardLoader(url, batch_size=3, rank=rank, world_size=world_size, shuffle_row_groups=8)
        for rank in range(world_size)
    ]
    by_rank = [list(loader) for loader in ranks]
    assert {len(batches) for batches in by_rank} == {len(ranks[0])}
    merged = [idx for step in zip(*by_rank, strict=True) for batch in step for idx in batch["idx"]]
    assert merged == whole[: len(merged)]
    assert len(whole) - len(merged) == ranks[0].num_dropped_rows < 3 * world_size


def test_remainder_is_completed_with_rows_that_count_for_nothing(tmp_path: Path) -> None:
    rows = make_rows(14)
    url = publish(tmp_path, [rows])
    loaders = [AlignedShardLoader(url, batch_size=4, rank=rank, world_size=3, drop_last=False) for rank in range(3)]
    by_rank = [list(loader) for loader in loaders]
    assert [len(batches) for batches in by_rank] == [2, 2, 2]
    assert loaders[0].num_filler_rows == 10
    assert loaders[0].num_dropped_rows == 0
    last = [batches[-1] for batches in by_rank]
    assert [sum(idx == -1 for idx in batch["idx"]) for batch in last] == [2, 4, 4]
    known = rows_by_idx([rows])
    real = last[0].slice(0, 2)
    assert torch.equal(real["input_lengths"], torch.tensor([len(known[idx].input_ids) for idx in real["idx"]]))
    for batch in last:
        filler = batch.select_indices([row for row, idx in enumerate(batch["idx"]) if idx == -1])
        assert filler["sample_mask"].tolist() == [0.0] * filler.size
        assert filler["input_lengths"].tolist() == [1] * filler.size
        assert not filler["token_mask"].any()
        assert (filler["input_ids"] == 7).all()
        for index in (0, 1):
            assert filler[f"alignment_{index}_num_chunks"].tolist() == [0] * filler.size
            assert not filler[f"alignment_{index}_pair_valid"].any()
            assert (filler[f"alignment_{index}_student_chunk_id"] == -1).all()
            assert (filler[f"alignment_{index}_teacher_chunk_id"] == -1).all()
    seen = [idx for batches in by_rank for batch in batches for idx in batch["idx"] if idx != -1]
    assert sorted(seen) == [row.idx for row in rows]


def test_a_batch_may_span_many_windows(tmp_path: Path) -> None:
    rows = make_rows(30)
    loader = AlignedShardLoader(publish(tmp_path, [rows], row_group_rows=2), batch_size=15, shuffle_row_groups=1)
    known = rows_by_idx([rows])
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert_equal_batches(batch, reference_batch([known[idx] for idx in batch["idx"]], (0, 1)))


def test_dataset_without_rows_gives_no_batch(tmp_path: Path) -> None:
    loader = AlignedShardLoader(publish(tmp_path, []), batch_size=2)
    assert len(loader) == 0
    assert list(loader) == []
