"""A batch: a dict whose values are tensors `[B, ...]` and lists of B items, with the operations a training loop needs.

NeMo-RL users will find the method names of its class of the same name. What differs: it is a plain `dict`, every operation
checks that all values have the same number of rows and names the one that does not, and padding knows that a missing chunk
id is -1.

Legend: B rows, T padded length, K number of batches or shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NotRequired, Self, TypedDict

import torch
import torch.nn.functional as F

__all__ = ["BatchedDataDict", "DatumSpec"]


class DatumSpec(TypedDict):
    """One row as a data set hands it to the collator.

    message_log: list of messages `{"role": str, "content": str, ...}`; in text mode one message whose content is the text.
    idx: the row's number. loss_multiplier: weight of the row's loss, 0 to leave it out (default 1.0).
    tools, chat_template_kwargs: for chat templates. sample_id: the row's name. length: tokens, if known.
    extra_env_info: anything the data set wants to carry; not read here.
    """

    message_log: list[dict[str, Any]]
    idx: int
    loss_multiplier: NotRequired[float]
    tools: NotRequired[list[dict[str, Any]] | None]
    chat_template_kwargs: NotRequired[dict[str, Any] | None]
    sample_id: NotRequired[str]
    length: NotRequired[int]
    extra_env_info: NotRequired[dict[str, Any] | None]


class BatchedDataDict(dict[str, Any]):
    """A dict of tensors `[B, ...]` and lists of length B.

    Methods that give rows back (`slice`, `select_indices`, `repeat_interleave`, `shard_by_batch_size`, `chunk`, `get_batch`,
    the iterator) return new batches; those of `slice` share memory with this one. ValueError when values disagree on B or a
    range does not fit; TypeError for a value that is neither a tensor nor a list.
    """

    @property
    def size(self) -> int:
        """Number of rows B; 0 without keys."""
        size: int | None = None
        first_key = ""
        for key, value in self.items():
            rows = _num_rows(key, value)
            if size is None:
                size, first_key = rows, key
            elif rows != size:
                raise ValueError(f"uneven batch: {key!r} has {rows} rows, {first_key!r} has {size}")
        return size or 0

    @classmethod
    def from_batches(cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None) -> Self:
        """Put K batches under one another: `[sum of B_k, ...]`.

        Dimensions after the first are padded on the right to the longest with `pad_value_dict[key]`, by default -1 for keys
        that end in `chunk_id` and 0 (False) for all others. Lists are joined. ValueError when keys, dtypes or numbers of
        dimensions differ.
        """
        batches = list(batches)
        if not batches:
            return cls()
        keys = list(batches[0])
        pad_values = dict(pad_value_dict or {})
        for number, batch in enumerate(batches):
            if set(batch) != set(keys):
                raise ValueError(f"batch {number} has other keys than batch 0: {sorted(set(batch) ^ set(keys))}")
        joined = cls()
        for key in keys:
            values = [batch[key] for batch in batches]
            if all(isinstance(value, torch.Tensor) for value in values):
                default = -1 if key.endswith("chunk_id") else 0
                joined[key] = _stack_padded(key, values, pad_values.get(key, default))
            elif all(isinstance(value, list) for value in values):
                joined[key] = [item for value in values for item in value]
            else:
                raise TypeError(f"{key!r} must be a tensor in every batch or a list in every batch, got {_type_names(values)}")
        joined.size  # noqa: B018  (raises on uneven values)
        return joined

    def slice(self, start: int, end: int) -> Self:
        """Rows `[start, end)`, sharing memory. IndexError unless 0 <= start <= end <= B."""
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"slice [{start}, {end}) does not lie in a batch of {self.size} rows")
        return type(self)({key: value[start:end] for key, value in self.items()})

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows named, in that order, copied; repeats allowed. IndexError for an index outside [0, B), TypeError for a mask or
        fractions: give `mask.nonzero().flatten()`."""
        index = torch.as_tensor(indices)
        if index.dim() != 1:
            raise ValueError(f"indices must have one dimension, got shape {tuple(index.shape)}")
        if index.numel() and (index.dtype == torch.bool or index.is_floating_point() or index.is_complex()):
            raise TypeError(f"indices must be whole numbers, got {index.dtype}; of a mask give mask.nonzero().flatten()")
        index = index.to(torch.int64)
        numbers = index.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.size:
            raise IndexError(f"indices from {min(numbers)} to {max(numbers)} do not lie in a batch of {self.size} rows")
        return type(self)(
            {
                key: value.index_select(0, index.to(value.device))
                if isinstance(value, torch.Tensor)
                else [value[i] for i in numbers]
                for key, value in self.items()
            }
        )

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row: rows 0, 0, 1, 1, ... List items are copied one level deep."""
        if num_repeats < 0:
            raise ValueError(f"num_repeats must not be negative, got {num_repeats}")
        self.size  # noqa: B018
        return type(self)(
            {
                key: value.repeat_interleave(num_repeats, dim=0)
                if isinstance(value, torch.Tensor)
                else [copy(item) for item in value for _ in range(num_repeats)]
                for key, value in self.items()
            }
        )

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """Rows `[batch_idx * batch_size, (batch_idx + 1) * batch_size)`; the last batch may be shorter."""
        _require_positive("batch_size", batch_size)
        start = batch_idx * batch_size
        if batch_idx < 0 or start >= self.size:
            raise IndexError(f"batch {batch_idx} of {batch_size} rows does not lie in a batch of {self.size} rows")
        return self.slice(start, min(start + batch_size, self.size))

    def chunk(self, rank: int, chunks: int) -> Self:
        """The `rank`-th of `chunks` runs of neighbouring rows; the first B % chunks runs are one row longer."""
        _require_positive("chunks", chunks)
        if not 0 <= rank < chunks:
            raise IndexError(f"rank {rank} does not lie in [0, {chunks})")
        short, longer = divmod(self.size, chunks)
        start = rank * short + min(rank, longer)
        return self.slice(start, start + short + (rank < longer))

    def shard_by_batch_size(self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False) -> list[Self]:
        """Cut into `shards` batches so that every global batch of `batch_size` rows is spread over all of them.

        Each run of `batch_size` rows (default: all rows) is cut into `shards` equal neighbouring pieces; shard r holds the
        r-th piece of every run, in order. With `allow_uneven_shards` (and no batch_size) shards may differ by one row.
        ValueError when the sizes do not divide.
        """
        _require_positive("shards", shards)
        if allow_uneven_shards:
            if batch_size is not None:
                raise ValueError(f"allow_uneven_shards goes with batch_size=None, got batch_size={batch_size}")
            return [self.chunk(rank, shards) for rank in range(shards)]
        total = self.size
        run = total if batch_size is None else batch_size
        if run == 0:
            return [self.slice(0, 0) for _ in range(shards)]
        _require_positive("batch_size", run)
        if total % run or run % shards:
            raise ValueError(f"{total} rows do not divide into runs of {run} rows with {shards} equal shards each")
        piece = run // shards
        if run == total:
            return [self.slice(rank * piece, (rank + 1) * piece) for rank in range(shards)]
        rows = torch.arange(total).view(total // run, shards, piece)
        return [self.select_indices(rows[:, rank].reshape(-1)) for rank in range(shards)]

    def make_microbatch_iterator(self, microbatch_size: int, allow_uneven: bool = False) -> Iterator[Self]:
        """Yield runs of `microbatch_size` rows, sharing memory. ValueError when B does not divide, unless `allow_uneven`."""
        _require_positive("microbatch_size", microbatch_size)
        total = self.size
        if total % microbatch_size and not allow_uneven:
            raise ValueError(f"{total} rows do not divide into micro-batches of {microbatch_size}; allow_uneven=True lets them")
        # A generator of its own, so that the check above happens at the call and not at the first step.
        return (self.slice(start, min(start + microbatch_size, total)) for start in range(0, total, microbatch_size))

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Self:
        """Move every tensor to `device`, in place, and return this batch."""
        for key, value in self.items():
            if isinstance(value, torch.Tensor):
                self[key] = value.to(device, non_blocking=non_blocking)
        return self

    def copy(self) -> Self:
        """The same values in a batch of its own (shallow)."""
        return type(self)(self)

    def get_dict(self) -> dict[str, Any]:
        """The same values as an ordinary dict (shallow)."""
        return dict(self)


def _num_rows(key: str, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise ValueError(f"{key!r} is a tensor without dimensions; a batch needs [B, ...]")
        return value.shape[0]
    if isinstance(value, list):
        return len(value)
    raise TypeError(f"{key!r} must be a tensor [B, ...] or a list of B items, got {type(value).__name__}")


def _stack_padded(key: str, tensors: Sequence[torch.Tensor], pad_value: int | float) -> torch.Tensor:
    first = tensors[0]
    for tensor in tensors:
        _num_rows(key, tensor)
        if tensor.dtype != first.dtype or tensor.dim() != first.dim():
            raise ValueError(
                f"{key!r} differs between batches: {first.dtype} with {first.dim()} dimensions, {tensor.dtype} with {tensor.dim()}"
            )
    longest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_pad_right(tensor, longest, pad_value) for tensor in tensors])


def _pad_right(tensor: torch.Tensor, sizes: Sequence[int], pad_value: int | float) -> torch.Tensor:
    missing = [size - have for size, have in zip(sizes, tensor.shape[1:], strict=True)]
    if not any(missing):
        return tensor
    # F.pad counts from the last dimension backwards, (left, right) for each.
    return F.pad(tensor, [amount for size in reversed(missing) for amount in (0, size)], value=pad_value)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _type_names(values: Sequence[Any]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values}))
