"""Global batches by tokens, the same rows in the same steps on every layout, then divided over ranks and micro-batches.

A step takes rows of the loader's global order until they hold `batch_tokens` student tokens (or the epoch ends). Its rows are dealt to
data-parallel ranks by length, longest first, each to the lightest; a rank's rows are cut into micro-batches of similar length, so that
little is padding. Every rank walks the whole order (the loader is far
faster than a step) and builds only its own rows. The position is the number of global rows consumed, so a run resumes on any layout.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xtok.batch import BatchedDataDict
from xtok.errors import ConfigError
from xtok.loader import AlignedShardLoader

__all__ = ["StepBatch", "StepBatches", "cut_by_length", "deal_rows"]

BLOCK_ROWS = 32
QUEUED_STEPS = 2


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of a global batch.

    micro_batches: `accumulation` of them, the same number on every rank (one without rows of its own holds one masked-out row).
    idx: ordinals of all rows of the global batch. num_tokens: student tokens of the global batch, padding left out.
    state: loader position after this batch. wait_seconds: how long the step waited for it.
    """

    micro_batches: list[BatchedDataDict]
    idx: list[int]
    num_tokens: int
    epoch: int
    state: dict[str, Any]
    wait_seconds: float = 0.0


def deal_rows(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Rows to bins: longest first, each to the bin with the fewest tokens (ties: lowest bin). Rows of a bin ascend."""
    heap = [(0, place) for place in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, place = heapq.heappop(heap)
        bins[place].append(row)
        heapq.heappush(heap, (tokens + lengths[row], place))
    return [sorted(rows) for rows in bins]


def cut_by_length(lengths: Sequence[int], num_runs: int) -> list[list[int]]:
    """Rows sorted by length and cut into `num_runs` runs (some may be empty) whose largest padded size, rows times the longest of them,
    is the smallest possible: that is what a micro-batch costs. Rows of a run ascend."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def runs_under(limit: int) -> list[list[int]]:
        runs: list[list[int]] = []
        for row in order:
            if runs and lengths[runs[-1][0]] * (len(runs[-1]) + 1) <= limit:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    low, high = max(lengths, default=0), max(lengths, default=0) * len(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs_under(middle)) <= num_runs else (middle + 1, high)
    runs = [sorted(run) for run in runs_under(low)]
    return runs + [[] for _ in range(num_runs - len(runs))]


class StepBatches:
    """Iterates over `StepBatch`es without end (or one epoch), reading ahead in a thread.

    Raises ConfigError for a dataset without a usable row, and what the loader raises, in the step that needed the row.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_tokens: int,
        accumulation: int,
        dp_rank: int,
        dp_size: int,
        teachers: Sequence[int],
        seed: int,
        shuffle_row_groups: int = 8,
        shuffle: bool = True,
        one_epoch: bool = False,
        max_rows: int | None = None,
        state: dict[str, Any] | None = None,
        cache_folder: str | None = None,
        cache_bytes: int = 20_000_000_000,
    ) -> None:
        self.loader = AlignedShardLoader(
            url,
            batch_size=BLOCK_ROWS,
            teachers=teachers,
            seed=seed,
            shuffle=shuffle,
            shuffle_row_groups=shuffle_row_groups,
            drop_last=False,
            cache_folder=cache_folder,
            cache_bytes=cache_bytes,
        )
        if self.loader.num_rows == 0:
            raise ConfigError(
                f"{url} has no row that the student and teachers {list(teachers)} all accept: there is nothing to learn"
            )
        manifest = self.loader.dataset.manifest
        self._pad_values = {"input_ids": manifest.student.pad_token_id}
        self._pad_values |= {f"teacher_{i}_input_ids": manifest.teachers[i].pad_token_id for i in teachers}
        self._batch_tokens, self._accumulation = batch_tokens, accumulation
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._one_epoch, self._max_rows = one_epoch, max_rows
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[StepBatch]:
        ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(QUEUED_STEPS)
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(ready, stop), name="xtok-batches", daemon=True)
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                item = ready.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield replace(item, wait_seconds=time.perf_counter() - began)
        finally:
            stop.set()
            thread.join(timeout=10)

    def _fill(self, ready: queue.Queue[StepBatch | BaseException | None], stop: threading.Event) -> None:
        def put(item: StepBatch | BaseException | None) -> None:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.2)
                    return
                except queue.Full:
                    continue

        try:
            for batch in self._steps():
                put(batch)
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:  # handed to the step that waits for it
            put(error)

    def _steps(self) -> Iterator[StepBatch]:
        while True:
            yield from self._epoch()
            if self._one_epoch:
                return
            self.loader.set_epoch(self.loader.epoch + 1)

    def _epoch(self) -> Iterator[StepBatch]:
        consumed = int(self.loader.state_dict()["num_rows_consumed"])
        pending: list[BatchedDataDict] = []
        num_tokens = 0
        for row in self._rows():
            pending.append(row)
            num_tokens += int(row["input_lengths"][0])
            if num_tokens >= self._batch_tokens:
                consumed += len(pending)
                yield self._step(pending, num_tokens, consumed)
                pending, num_tokens = [], 0
        if pending:
            yield self._step(pending, num_tokens, consumed + len(pending))

    def _rows(self) -> Iterator[BatchedDataDict]:
        """Rows one by one, as views of the loader's blocks; filler rows left out."""
        taken = 0
        for block in self.loader:
            for place in range(block.size):
                if block["idx"][place] < 0:
                    continue
                if self._max_rows is not None and taken >= self._max_rows:
                    return
                taken += 1
                yield block.slice(place, place + 1)

    def _step(self, rows: list[BatchedDataDict], num_tokens: int, consumed: int) -> StepBatch:
        lengths = [int(row["input_lengths"][0]) for row in rows]
        mine = deal_rows(lengths, self._dp_size)[self._dp_rank]
        runs = cut_by_length([lengths[i] for i in mine], self._accumulation)
        shortest = min(range(len(rows)), key=lambda i: lengths[i])
        micro = [self._batch([rows[mine[i]] for i in run]) if run else self._masked(rows[shortest]) for run in runs]
        state = {**self.loader.state_dict(), "num_rows_consumed": consumed}
        state.pop("first_row", None)
        return StepBatch(micro, [int(row["idx"][0]) for row in rows], num_tokens, self.loader.epoch, state)

    def _batch(self, rows: list[BatchedDataDict]) -> BatchedDataDict:
        return BatchedDataDict.from_batches([_trimmed(row) for row in rows], self._pad_values)

    def _masked(self, row: BatchedDataDict) -> BatchedDataDict:
        batch = self._batch([row])
        batch["sample_mask"] = torch.zeros_like(batch["sample_mask"])
        return batch


def _trimmed(row: BatchedDataDict) -> BatchedDataDict:
    """A one-row batch without padding: each tensor cut to its side's length, pairs to those that exist."""
    out = BatchedDataDict()
    for key, value in row.items():
        if not isinstance(value, Tensor) or value.ndim < 2:
            out[key] = value
        else:
            out[key] = value[:, : _length(key, row)]
    return out


def _length(key: str, row: BatchedDataDict) -> int:
    """Real length of the second dimension of `key`."""
    if key.startswith("alignment_"):
        teacher = key.split("_")[1]
        if "_pair_" in key:
            return max(1, int(row[f"alignment_{teacher}_num_chunks"][0]))
        if "_student_" in key:
            return int(row["input_lengths"][0])
        return int(row[f"teacher_{teacher}_input_lengths"][0])
    if key.startswith("teacher_"):
        return int(row[f"teacher_{key.split('_')[1]}_input_lengths"][0])
    return int(row["input_lengths"][0])
