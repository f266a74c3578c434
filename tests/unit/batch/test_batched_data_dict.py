"""BatchedDataDict against what plain Python does with rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtok.batch import BatchedDataDict


def make_batch(num_rows: int, width: int = 3, first: int = 0) -> BatchedDataDict:
    ids = torch.arange(first * 10, first * 10 + num_rows * width).reshape(num_rows, width)
    return BatchedDataDict(
        input_ids=ids, idx=list(range(first, first + num_rows)), meta=[{"row": first + row} for row in range(num_rows)]
    )


def rows_of(batch: BatchedDataDict) -> list[tuple[list[int], int]]:
    return list(zip(batch["input_ids"].tolist(), batch["idx"], strict=True))


def test_size_and_uneven_values() -> None:
    assert BatchedDataDict().size == 0
    assert make_batch(4).size == 4
    with pytest.raises(ValueError, match="'b' has 3 rows, 'a' has 2"):
        BatchedDataDict(a=torch.zeros(2), b=[1, 2, 3]).size  # noqa: B018
    with pytest.raises(TypeError, match=r"'a' must be a tensor .* got str"):
        BatchedDataDict(a="text").size  # noqa: B018
    with pytest.raises(ValueError, match="without dimensions"):
        BatchedDataDict(a=torch.tensor(1)).size  # noqa: B018


def test_slice_shares_memory_and_checks_its_range() -> None:
    batch = make_batch(5)
    part = batch.slice(1, 3)
    assert rows_of(part) == rows_of(batch)[1:3]
    assert part["input_ids"].data_ptr() == batch["input_ids"][1].data_ptr()
    assert batch.slice(2, 2).size == 0
    for start, end in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(IndexError, match=f"slice \\[{start}, {end}\\)"):
            batch.slice(start, end)


def test_select_indices() -> None:
    batch = make_batch(4)
    for indices in ([3, 0, 3], torch.tensor([3, 0, 3])):
        assert rows_of(batch.select_indices(indices)) == [rows_of(batch)[row] for row in (3, 0, 3)]
    assert batch.select_indices([]).size == 0
    with pytest.raises(IndexError, match="from -1 to 2"):
        batch.select_indices([-1, 2])
    with pytest.raises(ValueError, match="one dimension"):
        batch.select_indices(torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("indices", [[True, False, True, False], torch.tensor([False, True]), [1.7], torch.tensor([0.0])])
def test_a_mask_or_fractions_are_no_indices(indices: Any) -> None:
    with pytest.raises(TypeError, match=r"whole numbers, got torch\.(bool|float32); of a mask give mask\.nonzero"):
        make_batch(4).select_indices(indices)


def test_a_copy_is_a_batch() -> None:
    batch = make_batch(3)
    copied = batch.copy()
    del copied["meta"]
    assert type(copied) is BatchedDataDict
    assert (copied.size, "meta" in batch) == (3, True)


def test_batches_may_come_from_a_generator() -> None:
    assert rows_of(BatchedDataDict.from_batches(make_batch(1, first=row) for row in range(3))) == [
        row for first in range(3) for row in rows_of(make_batch(1, first=first))
    ]


def test_from_batches_pads_on_the_right() -> None:
    narrow = BatchedDataDict(
        input_ids=torch.ones(1, 2, dtype=torch.int64), alignment_0_student_chunk_id=torch.zeros(1, 2), idx=[0]
    )
    wide = BatchedDataDict(
        input_ids=torch.ones(2, 4, dtype=torch.int64), alignment_0_student_chunk_id=torch.zeros(2, 4), idx=[1, 2]
    )
    joined = BatchedDataDict.from_batches([narrow, wide], pad_value_dict={"input_ids": 9})
    assert joined["input_ids"].tolist() == [[1, 1, 9, 9], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert joined["alignment_0_student_chunk_id"][0].tolist() == [0, 0, -1, -1]
    assert joined["idx"] == [0, 1, 2]
    assert joined["input_ids"].dtype == torch.int64
    assert BatchedDataDict.from_batches([narrow, wide])["input_ids"][0].tolist() == [1, 1, 0, 0]
    assert BatchedDataDict.from_batches([]) == {}
    flags = [BatchedDataDict(a=torch.ones(1, width, 2, dtype=torch.bool)) for width in (1, 2)]
    assert BatchedDataDict.from_batches(flags)["a"].tolist() == [[[True, True], [False, False]], [[True, True], [True, True]]]


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        ({"b": torch.zeros(1, 2)}, ValueError, "other keys"),
        ({"a": [1]}, TypeError, "a tensor in every batch or a list"),
        ({"a": torch.zeros(1, 2, dtype=torch.int64)}, ValueError, "differs between batches"),
        ({"a": torch.zeros(1)}, ValueError, "differs between batches"),
    ],
)
def test_from_batches_refuses(second: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchedDataDict.from_batches([{"a": torch.zeros(1, 2)}, second])


def test_repeat_interleave_copies_items() -> None:
    batch = make_batch(2)
    repeated = batch.repeat_interleave(3)
    assert rows_of(repeated) == [row for row in rows_of(batch) for _ in range(3)]
    repeated["meta"][0]["row"] = "changed"
    assert repeated["meta"][1] == batch["meta"][0] == {"row": 0}
    assert batch.repeat_interleave(0).size == 0
    with pytest.raises(ValueError, match="-1"):
        batch.repeat_interleave(-1)


@given(num_runs=st.integers(1, 4), shards=st.integers(1, 4), piece=st.integers(1, 3))
def test_shards_take_their_slice_of_every_run(num_runs: int, shards: int, piece: int) -> None:
    run = shards * piece
    batch = make_batch(num_runs * run)
    found = batch.shard_by_batch_size(shards, batch_size=run)
    for shard, part in enumerate(found):
        wanted = [
            row for start in range(0, num_runs * run, run) for row in range(start + shard * piece, start + (shard + 1) * piece)
        ]
        assert part["idx"] == wanted
        assert part["input_ids"].tolist() == batch["input_ids"][wanted].tolist()


@given(num_rows=st.integers(0, 11), chunks=st.integers(1, 5))
def test_chunks_are_neighbouring_and_even_to_one_row(num_rows: int, chunks: int) -> None:
    batch = make_batch(num_rows)
    parts = [batch.chunk(rank, chunks) for rank in range(chunks)]
    assert [idx for part in parts for idx in part["idx"]] == batch["idx"]
    sizes = [part.size for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert [part["idx"] for part in batch.shard_by_batch_size(chunks, allow_uneven_shards=True)] == [
        part["idx"] for part in parts
    ]


def test_sharding_refuses_what_does_not_divide() -> None:
    batch = make_batch(6)
    assert [part["idx"] for part in batch.shard_by_batch_size(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [part.size for part in make_batch(0).shard_by_batch_size(3)] == [0, 0, 0]
    for arguments in ({"shards": 4}, {"shards": 2, "batch_size": 4}, {"shards": 2, "batch_size": 3}):
        with pytest.raises(ValueError, match="do not divide"):
            batch.shard_by_batch_size(**arguments)
    with pytest.raises(ValueError, match="shards must be at least 1"):
        batch.shard_by_batch_size(0)
    with pytest.raises(ValueError, match="batch_size=None"):
        batch.shard_by_batch_size(2, batch_size=2, allow_uneven_shards=True)
    with pytest.raises(IndexError, match="rank 2"):
        batch.chunk(2, 2)


def test_micro_batches() -> None:
    batch = make_batch(6)
    assert [part["idx"] for part in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3], [4, 5]]
    assert [part["idx"] for part in batch.make_microbatch_iterator(4, allow_uneven=True)] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match="6 rows do not divide"):
        batch.make_microbatch_iterator(4)  # at the call, not at the first step
    assert batch.get_batch(1, 4)["idx"] == [4, 5]
    with pytest.raises(IndexError, match="batch 2"):
        batch.get_batch(2, 4)


def test_to_moves_in_place_and_get_dict_is_plain() -> None:
    batch = make_batch(2)
    assert batch.to("meta") is batch
    assert batch["input_ids"].device.type == "meta"
    plain = make_batch(2).get_dict()
    assert type(plain) is dict
    assert plain["idx"] == [0, 1]
