"""From a batch's alignment tensors to the flat tables the loss walks over: valid chunks, supervised tokens, tiles.

Shapes: B samples, T student positions, U teacher positions, P pairs; C valid chunks; R student rows and S teacher rows of them.
A "row" is a place in the flattened logits, b·T + t − 1 for the token at position t: the logits that predict it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ChunkTable", "ChunkTile", "SupervisedTokens", "require_keys", "supervised_tokens", "valid_chunks"]


@dataclass(frozen=True)
class SupervisedTokens:
    """Student tokens that are supervised and have a predictor, in (sample, position) order.

    rows int64 `[R]` of the flattened logits; labels int64 `[R]` token ids; weights float `[R]` (token mask times sample mask);
    row_place int64 `[B·T]`: index into `rows`, or −1.
    """

    rows: Tensor
    labels: Tensor
    weights: Tensor
    row_place: Tensor

    @property
    def count(self) -> Tensor:
        """Sum of the weights: this batch's part of N_t, float64 scalar."""
        return self.weights.double().sum()


@dataclass(frozen=True)
class ChunkTile:
    """A run of whole chunks: rows of each side and the tile-local chunk of each row."""

    student_rows: Tensor
    teacher_rows: Tensor
    student_chunk: Tensor
    teacher_chunk: Tensor
    weights: Tensor

    @property
    def num_chunks(self) -> int:
        """Chunks in the tile."""
        return int(self.weights.shape[0])


@dataclass(frozen=True)
class ChunkTable:
    """All valid chunks of one teacher in one batch, ordered by sample and chunk.

    student_rows `[R]`, teacher_rows `[S]` int64, grouped by chunk; student_labels, teacher_labels their tokens;
    student_chunk `[R]`, teacher_chunk `[S]` int64 in [0, C); weights float `[C]` (sample mask).
    """

    student_rows: Tensor
    teacher_rows: Tensor
    student_labels: Tensor
    teacher_labels: Tensor
    student_chunk: Tensor
    teacher_chunk: Tensor
    weights: Tensor

    @property
    def num_chunks(self) -> int:
        """Number of valid chunks C (not their weight)."""
        return int(self.weights.shape[0])

    @property
    def count(self) -> Tensor:
        """Sum of the weights: this batch's part of N_c, float64 scalar."""
        return self.weights.double().sum()

    def tiles(self, token_tile_size: int) -> Iterator[ChunkTile]:
        """Split into runs of whole chunks with at most `token_tile_size` rows on either side (one chunk at least)."""
        if self.num_chunks == 0:
            return
        student_ends = torch.bincount(self.student_chunk, minlength=self.num_chunks).cumsum(0).cpu()
        teacher_ends = torch.bincount(self.teacher_chunk, minlength=self.num_chunks).cumsum(0).cpu()
        first, student_at, teacher_at = 0, 0, 0
        while first < self.num_chunks:
            fits = min(
                int(torch.searchsorted(student_ends, student_at + token_tile_size, right=True)),
                int(torch.searchsorted(teacher_ends, teacher_at + token_tile_size, right=True)),
            )
            last = max(fits, first + 1)
            student_end, teacher_end = int(student_ends[last - 1]), int(teacher_ends[last - 1])
            yield ChunkTile(
                student_rows=self.student_rows[student_at:student_end],
                teacher_rows=self.teacher_rows[teacher_at:teacher_end],
                student_chunk=self.student_chunk[student_at:student_end] - first,
                teacher_chunk=self.teacher_chunk[teacher_at:teacher_end] - first,
                weights=self.weights[first:last],
            )
            first, student_at, teacher_at = last, student_end, teacher_end


def require_keys(batch: Mapping[str, Any], keys: list[str], *, why: str) -> None:
    """Raise KeyError naming every key of `keys` the batch lacks, and why it is needed."""
    missing = [key for key in keys if key not in batch]
    if missing:
        raise KeyError(f"the batch lacks {missing} ({why}); it has {sorted(map(str, batch))}")


def _require_shapes(batch: Mapping[str, Any], groups: list[tuple[str, list[str]]]) -> None:
    """Raise ValueError for a key whose tensor has another shape than the key it belongs to."""
    for key, others in groups:
        for other in others:
            if batch[other].shape != batch[key].shape:
                raise ValueError(
                    f"batch[{other!r}] is {tuple(batch[other].shape)}, but batch[{key!r}] is {tuple(batch[key].shape)}"
                )


def supervised_tokens(batch: Mapping[str, Any]) -> SupervisedTokens:
    """The supervised student tokens of a batch. Needs `input_ids`, `token_mask` `[B, T]` and `sample_mask` `[B]`."""
    require_keys(batch, ["input_ids", "token_mask", "sample_mask"], why="the student's tokens and masks")
    _require_shapes(batch, [("input_ids", ["token_mask"])])
    ids, weights = batch["input_ids"], batch["token_mask"].float() * batch["sample_mask"].float()[:, None]
    weights = weights.clone()
    weights[:, 0] = 0  # the token at position 0 has no predictor
    place = weights.flatten().nonzero().flatten()
    row_place = torch.full((ids.numel(),), -1, dtype=torch.int64, device=ids.device)
    row_place[place - 1] = torch.arange(place.numel(), device=ids.device)
    return SupervisedTokens(place - 1, ids.flatten()[place], weights.flatten()[place], row_place)


def valid_chunks(batch: Mapping[str, Any], teacher_index: int, *, exact_match_only: bool) -> ChunkTable:
    """The valid chunks of one teacher: both sides there, every token predicted and (student) supervised, sample not masked out."""
    prefix = f"alignment_{teacher_index}_"
    names = [prefix + name for name in ("pair_valid", "pair_is_correct", "student_chunk_id", "teacher_chunk_id")]
    ids_key = f"teacher_{teacher_index}_input_ids"
    require_keys(batch, ["input_ids", "token_mask", "sample_mask", *names, ids_key], why=f"teacher {teacher_index}")
    _require_shapes(batch, [("input_ids", ["token_mask", names[2]]), (ids_key, [names[3]]), (names[0], [names[1]])])
    pair_valid, pair_is_correct, student_id, teacher_id = (batch[name] for name in names)
    num_pairs = pair_valid.shape[1]
    valid = pair_valid & pair_is_correct if exact_match_only else pair_valid.clone()
    valid &= batch["sample_mask"][:, None] != 0
    student_key, student_in = _keys(student_id, num_pairs)
    teacher_key, teacher_in = _keys(teacher_id, num_pairs)
    flat = valid.flatten()
    student_size = torch.bincount(student_key[student_in], minlength=flat.numel())
    teacher_size = torch.bincount(teacher_key[teacher_in], minlength=flat.numel())
    flat &= (student_size > 0) & (teacher_size > 0)
    unsupervised = student_in & (batch["token_mask"] == 0)
    for key, bad in ((student_key, unsupervised), (student_key, _first(student_in)), (teacher_key, _first(teacher_in))):
        flat[key[bad]] = False
    number = torch.cumsum(flat, 0) - 1
    student = _side(student_key, student_in, flat, number)
    teacher = _side(teacher_key, teacher_in, flat, number)
    weights = batch["sample_mask"].float()[:, None].expand_as(pair_valid).flatten()[flat]
    teacher_ids = batch[f"teacher_{teacher_index}_input_ids"]
    return ChunkTable(
        student_rows=student[0] - 1,
        teacher_rows=teacher[0] - 1,
        student_labels=batch["input_ids"].flatten()[student[0]],
        teacher_labels=teacher_ids.flatten()[teacher[0]],
        student_chunk=student[1],
        teacher_chunk=teacher[1],
        weights=weights,
    )


def _keys(chunk_id: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Chunk key b·P + id of every token, and which tokens are in a chunk at all."""
    sample = torch.arange(chunk_id.shape[0], device=chunk_id.device)[:, None]
    return chunk_id + sample * num_pairs, (chunk_id >= 0) & (chunk_id < num_pairs)


def _first(mask: Tensor) -> Tensor:
    """The part of a `[B, T]` mask that lies at position 0."""
    first = torch.zeros_like(mask)
    first[:, 0] = mask[:, 0]
    return first


def _side(key: Tensor, inside: Tensor, valid: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Flat places and chunk numbers of one side's tokens in valid chunks, grouped by chunk."""
    place = inside.flatten().nonzero().flatten()
    place = place[valid[key.flatten()[place]]]
    chunk = number[key.flatten()[place]]
    chunk, order = torch.sort(chunk, stable=True)
    return place[order], chunk
