"""Global batches: the same rows in the same steps on every layout, exact positions, epochs, and errors in the step that needs the row."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from itertools import combinations_with_replacement, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.config import PreprocessConfig
from tests.unit.train.support import BUNDLED
from xtok.errors import ConfigError, DamagedPartError
from xtok.shards.pipeline import preprocess
from xtok.train.batches import StepBatch, StepBatches, cut_by_length, deal_rows


def batches(world: dict[str, Any], **changes: Any) -> StepBatches:
    settings: dict[str, Any] = {
        "batch_tokens": 300,
        "accumulation": 1,
        "dp_rank": 0,
        "dp_size": 1,
        "teachers": [0, 1],
        "seed": 3,
        "shuffle_row_groups": 2,
    }
    url = changes.pop("url", world.get("dataset"))
    return StepBatches(url, **{**settings, **changes})


def take(steps: StepBatches, number: int) -> list[StepBatch]:
    iterator: Iterator[StepBatch] = iter(steps)
    return list(islice(iterator, number))


def test_rows_are_dealt_evenly_and_once() -> None:
    lengths = [5, 9, 1, 7, 7, 3, 2, 8]
    bins = deal_rows(lengths, 3)
    assert sorted(row for rows in bins for row in rows) == list(range(8))
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    assert max(loads) - min(loads) <= 3
    assert deal_rows([4], 3) == [[0], [], []]


def test_micro_batches_hold_rows_of_similar_length() -> None:
    lengths = [900, 20, 30, 25, 890, 40, 35, 10]
    assert cut_by_length(lengths, 2) == [[0, 4], [1, 2, 3, 5, 6, 7]]
    assert cut_by_length([5, 4], 3) == [[0], [1], []]
    assert cut_by_length([], 2) == [[], []]
    drawn = random.Random(3)
    for _ in range(200):
        rows = [drawn.randint(1, 30) for _ in range(drawn.randint(1, 7))]
        runs = cut_by_length(rows, 3)
        assert sorted(row for run in runs for row in run) == list(range(len(rows)))
        assert max(padded_size(rows, run) for run in runs) == smallest_largest(rows, 3)


def padded_size(lengths: list[int], run: list[int]) -> int:
    return len(run) * max((lengths[i] for i in run), default=0)


def smallest_largest(lengths: list[int], num_runs: int) -> int:
    """Over every way to cut the sorted rows."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    sizes = []
    for cuts in combinations_with_replacement(range(len(order) + 1), num_runs - 1):
        bounds = [0, *cuts, len(order)]
        sizes.append(max(padded_size(lengths, order[a:b]) for a, b in pairwise(bounds)))
    return min(sizes)


def test_every_layout_takes_the_same_rows(world: dict[str, Any]) -> None:
    whole = take(batches(world), 6)
    for dp_size, accumulation in [(2, 1), (3, 2)]:
        ranks = [take(batches(world, dp_rank=rank, dp_size=dp_size, accumulation=accumulation), 6) for rank in range(dp_size)]
        for step, want in enumerate(whole):
            parts = [part for rank in ranks for part in rank[step].micro_batches]
            assert len(parts) == dp_size * accumulation
            rows = [row for part in parts for row, mask in zip(part["idx"], part["sample_mask"], strict=True) if mask > 0]
            assert sorted(rows) == sorted(want.idx)
            for rank in ranks:
                assert rank[step].idx == want.idx
                assert rank[step].state == want.state


def test_a_rank_without_rows_holds_one_masked_out(world: dict[str, Any]) -> None:
    [step] = take(batches(world, batch_tokens=1, dp_rank=1, dp_size=2), 1)
    [part] = step.micro_batches
    assert len(step.idx) == part.size == 1
    assert float(part["sample_mask"].sum()) == 0.0


def test_rows_are_those_of_the_loader_without_their_padding(world: dict[str, Any]) -> None:
    [step] = take(batches(world, batch_tokens=2000), 1)
    [part] = step.micro_batches
    assert int(part["input_lengths"].max()) == part["input_ids"].shape[1]
    assert int(part["teacher_0_input_lengths"].max()) == part["teacher_0_input_ids"].shape[1]
    assert int(part["input_lengths"].sum()) == step.num_tokens
    chunks = part["alignment_0_student_chunk_id"]
    assert int(chunks.max()) + 1 == int(part["alignment_0_num_chunks"].max()) == part["alignment_0_pair_valid"].shape[1]
    outside = torch.arange(chunks.shape[1]) >= part["input_lengths"][:, None]
    assert bool((chunks[outside] == -1).all())


def test_positions_are_exact_within_and_across_epochs(world: dict[str, Any]) -> None:
    """From the state after any step, the end of an epoch included, the same steps follow."""
    whole = take(batches(world, batch_tokens=900), 12)
    per_epoch = sum(step.epoch == 0 for step in whole)
    assert 1 < per_epoch < 11
    assert sorted(row for step in whole[:per_epoch] for row in step.idx) == list(range(64))
    assert [step.epoch for step in whole[per_epoch : per_epoch + 2]] == [1, 1]
    assert whole[0].idx != whole[per_epoch].idx, "another order each epoch"
    for done in (1, per_epoch - 1, per_epoch, per_epoch + 1):
        rest = take(batches(world, batch_tokens=900, state=whole[done - 1].state), 2)
        assert [step.idx for step in rest] == [step.idx for step in whole[done : done + 2]]
        assert [step.state for step in rest] == [step.state for step in whole[done : done + 2]]


def test_a_dataset_smaller_than_a_batch_is_one_step_an_epoch(world: dict[str, Any]) -> None:
    steps = take(batches(world, url=world["held_out"], batch_tokens=10**6), 3)
    assert [step.epoch for step in steps] == [0, 1, 2]
    assert all(sorted(step.idx) == list(range(16)) for step in steps)


def test_one_epoch_ends_and_takes_no_more_rows_than_told(world: dict[str, Any]) -> None:
    steps = list(batches(world, url=world["held_out"], shuffle=False, one_epoch=True, max_rows=5))
    assert [row for step in steps for row in step.idx] == [0, 1, 2, 3, 4]


def test_a_dataset_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"id": "a", "text": "a text that is longer than two tokens"}\n')
    side = {"tokenizer": str(BUNDLED / "tokenizers/chatml_bpe"), "context_length": 96}
    teacher = {"tokenizer": str(BUNDLED / "tokenizers/spm_bpe"), "context_length": 2}
    document = {"sources": [str(source)], "student": side, "teachers": [teacher], "overlength": "reject", "workers": 1}
    limits = {"max_reject_fraction": 1.0, "min_coverage": 0.0}
    preprocess(PreprocessConfig.model_validate({**document, **limits, "output": str(tmp_path / "empty")}))
    with pytest.raises(ConfigError, match="nothing to learn"):
        batches({}, url=str(tmp_path / "empty"), teachers=[0])


def test_a_damaged_row_group_is_raised_by_the_step_that_needs_it(world: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(world["dataset"], tmp_path / "damaged")
    file = tmp_path / "damaged/student/part-00000.parquet"
    data = bytearray(file.read_bytes())
    data[40:4000] = bytes(3960)
    file.write_bytes(data)
    with pytest.raises(DamagedPartError, match="part-00000"):
        take(batches(world, url=str(tmp_path / "damaged")), 20)
