"""`AlignedShardLoader`: a published dataset as an endless supply of ready batches, the same for every rank count and worker count.

Design:
- The order of rows is a pure function of (dataset, seed, epoch); see `xtok.loader.order`. Global batch s is a run of
  `batch_size * world_size` consecutive rows of it and rank r takes the r-th slice.
- DataLoader worker w of n builds the batches s with s % n == w, counted from where the iteration began. The DataLoader asks its
  workers in turn, so the batches come out in order, each once.
- The state is the epoch and the number of global rows consumed: it means the same on any number of ranks.
- One window (`shuffle_row_groups` row groups) is in memory, and the next one is read ahead in a thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from schemas.plan import PlannedSide
from xtok import storage
from xtok.batch import BatchedDataDict
from xtok.errors import ConfigError, DatasetMismatchError
from xtok.loader.assemble import BatchShape, SideShape, assemble
from xtok.loader.fingerprints import check_tokenizers
from xtok.loader.order import EpochOrder
from xtok.loader.reader import WindowReader, build_catalog
from xtok.loader.rows import GroupRows
from xtok.settings import whole_number
from xtok.shards.read import open_dataset

if TYPE_CHECKING:
    from xtok.loader.fingerprints import AnyTokenizer

__all__ = ["AlignedShardLoader"]

MAX_EPOCH = 2**63 - 1


class AlignedShardLoader(IterableDataset[BatchedDataDict]):
    """Batches of a published dataset, with the keys, dtypes and values of `xtok.collate.CrossTokenizerCollator`.

    url: folder or fsspec URL. batch_size: rows of one rank's batch. teachers: teacher indices whose keys are wanted (default all);
      rows that one of them refused are left out; keys keep the dataset's index; a teacher with the student's tokenizer adds none.
    seed, epoch, shuffle, shuffle_row_groups: the order; without `shuffle` the dataset's own. A larger window mixes better and
      takes more memory: all its rows are held (twice, while the next is read ahead).
    rank, world_size: this process among those that share each global batch.
    pad_to: "longest" row of the batch, or the "context" length of each side. pad_divisor, teacher_pad_divisors: padded lengths are
      multiples of it (default for the teachers, a list over all of the dataset's teachers: `pad_divisor`).
    drop_last: drop the rows that do not fill a global batch (`num_dropped_rows`), else complete it with filler rows: `sample_mask`
      0, `idx` -1, one pad token outside the mask, no chunk.
    read_ahead: read the next window in a thread while this one is used.
    cache_folder, cache_bytes: a remote dataset's files are kept in a local folder (default $XTOK_CACHE or the user's cache folder),
      shared by all processes of the machine, the oldest leaving beyond so many bytes; 0 reads ranges of the remote files instead.
    student_tokenizer, teacher_tokenizers (one or None for every teacher of the dataset): refused when they are not the dataset's.

    Use it by itself, or as `DataLoader(loader, batch_size=None, num_workers=n)`, or in torchdata's `StatefulDataLoader`.
    Raises ConfigError for settings, UnpublishedDatasetError, DamagedPartError, FingerprintMismatchError.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: int,
        teachers: Sequence[int] | None = None,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pad_divisor: int = 1,
        teacher_pad_divisors: Sequence[int] | None = None,
        pad_to: Literal["longest", "context"] = "longest",
        shuffle: bool = True,
        shuffle_row_groups: int = 8,
        drop_last: bool = True,
        read_ahead: bool = True,
        cache_folder: str | None = None,
        cache_bytes: int = 20_000_000_000,
        student_tokenizer: AnyTokenizer | None = None,
        teacher_tokenizers: Sequence[AnyTokenizer | None] | None = None,
    ) -> None:
        batch_size = whole_number("batch_size", batch_size, 1)
        world_size, rank = whole_number("world_size", world_size, 1), whole_number("rank", rank, 0)
        pad_divisor = whole_number("pad_divisor", pad_divisor, 1)
        # Of the order: an int of another library would be another seed to a later run.
        seed, epoch = whole_number("seed", seed, most=None), whole_number("epoch", epoch, 0, MAX_EPOCH)
        shuffle_row_groups = whole_number("shuffle_row_groups", shuffle_row_groups, 1, most=None)
        cache_bytes = whole_number("cache_bytes", cache_bytes, 0, most=None)
        if rank >= world_size:
            raise ConfigError(f"rank must be smaller than world_size, got rank={rank} of world_size={world_size}")
        if pad_to not in ("longest", "context"):
            raise ConfigError(f'pad_to must be "longest" or "context", got {pad_to!r}')
        self.dataset = open_dataset(str(url))
        manifest = self.dataset.manifest
        check_tokenizers(manifest, student_tokenizer, teacher_tokenizers)
        self.teachers = _requested_teachers(teachers, len(manifest.teachers))
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.seed, self.shuffle, self.shuffle_row_groups = seed, shuffle, shuffle_row_groups
        self.drop_last, self.read_ahead = drop_last, read_ahead
        divisors = _teacher_divisors(teacher_pad_divisors, pad_divisor, len(manifest.teachers))
        self._with_files = tuple(index for index in self.teachers if not manifest.teachers[index].same_as_student)
        self._shape = BatchShape(
            batch_size,
            _side_shape(manifest.student, pad_to, pad_divisor),
            {index: _side_shape(manifest.teachers[index], pad_to, divisors[index]) for index in self._with_files},
        )
        self._cache = _cache_for(str(url), cache_folder, cache_bytes)
        self._catalog = build_catalog(self.dataset, self._with_files)
        self.num_rows = int(self._catalog.num_usable().sum())
        self._order_digest = self._catalog.digest(
            seed, shuffle, shuffle_row_groups if shuffle else None, [part.student_file.sha256 for part in manifest.parts]
        )
        # Shared with DataLoader workers, so that set_epoch reaches workers that outlive an epoch: (epoch, used by workers).
        self._shared = torch.tensor([epoch, 0], dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._first_row = self._num_consumed = 0  # of the running iteration
        self._resume: tuple[int, int] | None = None  # (first_row, num_consumed) for the next iteration

    @property
    def epoch(self) -> int:
        """The epoch whose order is used."""
        return int(self._shared[0])

    @property
    def global_batch_size(self) -> int:
        """Rows that all ranks together take in one step."""
        return self.batch_size * self.world_size

    @property
    def num_dropped_rows(self) -> int:
        """Rows of the running epoch that are left over and dropped; 0 without `drop_last`."""
        return (self.num_rows - self._start()) % self.global_batch_size if self.drop_last else 0

    @property
    def num_filler_rows(self) -> int:
        """Filler rows over all ranks that complete the epoch's last global batch; 0 with `drop_last`."""
        return 0 if self.drop_last else -(self.num_rows - self._start()) % self.global_batch_size

    def __len__(self) -> int:
        """Batches of one whole epoch, the same on every rank."""
        return self._num_steps(0)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch` from the next iteration on. A loaded state stays in force when it is of this epoch."""
        epoch = whole_number("epoch", epoch, 0, MAX_EPOCH)
        if epoch != self.epoch:
            self._first_row = self._num_consumed = 0
            self._resume = None
        self._shared[0] = epoch

    def state_dict(self) -> dict[str, Any]:
        """Epoch and global rows consumed, batches handed out so far counted: `load_state_dict` goes on with the next one.

        Behind plain DataLoader workers the main process cannot know what they handed out: use `state_after` there, or torchdata's
        StatefulDataLoader. Raises RuntimeError in that case.
        """
        if get_worker_info() is None and self._resume is None and bool(self._shared[1]):
            raise RuntimeError(
                "DataLoader workers iterate over this loader, so its copy here has no position: call state_after(num_batches) with "
                "the number of batches you have taken in this epoch, or use torchdata's StatefulDataLoader"
            )
        return self._state(self._num_consumed if self._resume is None else self._resume[1])

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The state after `num_batches` batches since this epoch's iteration began (at its start, or where a state was loaded)."""
        num_batches = whole_number("num_batches", num_batches, 0)
        return self._state(min(self._start() + num_batches * self.global_batch_size, self.num_rows))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rows that `state` counts, whatever the world size, batch size or workers it was saved with.

        ConfigError for a state that is none, DatasetMismatchError for one of another dataset, seed or shuffling.
        """
        try:
            epoch, consumed = (whole_number(name, state[name], most=MAX_EPOCH) for name in ("epoch", "num_rows_consumed"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"not a state of AlignedShardLoader, it lacks the whole numbers epoch and num_rows_consumed: {state!r}"
            ) from error
        if state.get("order_digest", self._order_digest) != self._order_digest:
            raise DatasetMismatchError(
                f"the state counts rows of another order (digest {state['order_digest'][:12]}, here {self._order_digest[:12]}): it was "
                f"saved with other files, seed, shuffling, or teachers that refuse other rows than {self.dataset.url}, seed={self.seed}, "
                f"shuffle={self.shuffle}, shuffle_row_groups={self.shuffle_row_groups}, teachers={list(self.teachers)}"
            )
        if epoch < 0 or not 0 <= consumed <= self.num_rows:
            raise ConfigError(
                f"the state lies outside the dataset of {self.num_rows} rows: epoch {epoch}, {consumed} rows consumed"
            )
        # A worker goes on with its own share of the batches, so it must count them from where the iteration began.
        in_worker = get_worker_info() is not None
        first_row = whole_number("first_row", state.get("first_row", consumed), 0, MAX_EPOCH) if in_worker else consumed
        self._shared[0] = epoch
        self._resume = (first_row, consumed)

    def __iter__(self) -> Iterator[BatchedDataDict]:
        """The batches of this rank (and DataLoader worker) from the loaded state, or from the start of the epoch."""
        worker = get_worker_info()
        self._shared[1] = worker is not None
        self._first_row, self._num_consumed = self._resume or (0, 0)
        self._resume = None
        return self._batches(worker.id if worker else 0, worker.num_workers if worker else 1)

    def _batches(self, worker: int, num_workers: int) -> Iterator[BatchedDataDict]:
        first_row, size = self._first_row, self.global_batch_size
        next_step = -(-(self._num_consumed - first_row) // size)
        mine = range(next_step + (worker - next_step) % num_workers, self._num_steps(first_row), num_workers)
        pending: list[tuple[GroupRows, int]] = []
        used = 0
        windows = self._windows(first_row, mine)
        try:
            for step in mine:
                while len(pending) - used < self.batch_size and (window := next(windows, None)) is not None:
                    pending, used = pending[used:] + window, 0
                batch = assemble(pending[used : used + self.batch_size], self._shape)
                used = min(used + self.batch_size, len(pending))
                if used == len(pending):
                    pending, used = [], 0  # lets the window go before the next one is asked for
                # Before the yield: whoever asks for the state after this batch must find it counted.
                self._num_consumed = min(first_row + (step + 1) * size, self.num_rows)
                yield batch
        finally:
            windows.close()

    def _windows(self, first_row: int, steps: range) -> Generator[list[tuple[GroupRows, int]], None, None]:
        """Windows that hold rows of this rank's `steps`, in order; the next one is read ahead."""
        if not steps:
            return
        order = EpochOrder(
            self._catalog, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, shuffle_row_groups=self.shuffle_row_groups
        )
        reader = WindowReader(self.dataset, self._with_files, self._cache)
        size = self.global_batch_size

        def read(index: int) -> list[tuple[GroupRows, int]]:
            offset = np.arange(order.window_starts[index], order.window_starts[index + 1]) - first_row
            step = offset // size
            selected = (offset % size) // self.batch_size == self.rank
            selected &= (step >= steps.start) & (step < steps.stop) & ((step - steps.start) % steps.step == 0)
            return reader.read(order.window(index), selected) if selected.any() else []

        last_row = min(first_row + (steps[-1] + 1) * size, self.num_rows) - 1
        indices = range(order.window_of(first_row + steps.start * size), order.window_of(last_row) + 1)
        if not self.read_ahead:
            yield from map(read, indices)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="xtok-read-ahead") as pool:
            ahead: Future[list[tuple[GroupRows, int]]] = pool.submit(read, indices[0])
            for index in indices:
                window = ahead.result()
                if index + 1 < indices.stop:
                    ahead = pool.submit(read, index + 1)
                yield window

    def _num_steps(self, first_row: int) -> int:
        rows = self.num_rows - first_row
        return rows // self.global_batch_size if self.drop_last else -(-rows // self.global_batch_size)

    def _start(self) -> int:
        return self._first_row if self._resume is None else self._resume[0]

    def _state(self, consumed: int) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "num_rows_consumed": consumed,
            "first_row": self._start(),
            "order_digest": self._order_digest,
        }


def _cache_for(url: str, folder: str | None, max_bytes: int) -> storage.FileCache | None:
    """The cache of a remote dataset; a local one needs none."""
    if not max_bytes or storage.local_path(url) is not None:
        return None
    return storage.FileCache(folder or storage.default_cache_folder(), max_bytes)


def _side_shape(side: PlannedSide, pad_to: str, divisor: int) -> SideShape:
    return SideShape(side.pad_token_id, side.context_length if pad_to == "context" else 1, divisor)


def _requested_teachers(teachers: Sequence[int] | None, num_teachers: int) -> tuple[int, ...]:
    if teachers is None:
        return tuple(range(num_teachers))
    if not isinstance(teachers, Iterable):
        raise ConfigError(f"teachers must be a list of indices, got {teachers!r}")
    requested = tuple(whole_number(f"teachers[{place}]", index, most=None) for place, index in enumerate(teachers))
    if len(set(requested)) != len(requested) or not all(0 <= index < num_teachers for index in requested):
        raise ConfigError(f"teachers must be different indices of the dataset's {num_teachers} teachers, got {list(requested)}")
    return requested


def _teacher_divisors(divisors: Sequence[int] | None, default: int, num_teachers: int) -> list[int]:
    if divisors is None:
        return [default] * num_teachers
    if len(divisors) != num_teachers:
        raise ConfigError(f"teacher_pad_divisors must hold one number for each of {num_teachers} teachers, got {list(divisors)}")
    return [whole_number(f"teacher_pad_divisors[{index}]", divisor, 1) for index, divisor in enumerate(divisors)]
