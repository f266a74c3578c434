"""Running sums of small numbers: the steps that cut and number chunks.

numpy adds up one entry after the other, each waiting for the one before. Here a machine word of eight marks, or of four lengths, is summed
by one product: byte k of `word * 0x0101010101010101` is the sum of the word's bytes 0 to k. Only the words' totals are left to be added
up in turn.

Shape legend: N = entries, E = places where the sum jumps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_LENGTH", "Lengths", "running_count", "running_ends"]

Lengths = npt.NDArray[np.uint16] | npt.NDArray[np.int64]
MAX_LENGTH = (1 << 14) - 1  # four of them fit 16 bits
_PER_WORD = 8
_LENGTHS_PER_WORD = 4
_WORD = np.dtype("<u8")  # little-endian wherever it runs, so that byte k is entry k
_ALL_BYTES = _WORD.type(0x0101010101010101)
_ALL_PAIRS = _WORD.type(0x0001000100010001)


def running_count(
    marks: npt.NDArray[Any], jump_at: npt.NDArray[np.int64] | None = None, jump_by: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int32]:
    """int32 [N]: sum of the entries up to and with each, as `np.cumsum`.

    marks: [N] of one byte each, bool or integers from 0 to 31. jump_at, jump_by: int64 [E], numbers added to all sums from a place (an
    index of `marks`) on.
    """
    num_words = len(marks) // _PER_WORD + 1
    lanes = np.zeros(num_words * _PER_WORD, dtype=np.uint8)
    lanes[: len(marks)] = marks.view(np.uint8)
    words = lanes.view(_WORD)
    np.multiply(words, _ALL_BYTES, out=words)
    before = np.zeros(num_words, dtype=np.int32)  # the sum of all words before
    before[1:] = lanes[_PER_WORD - 1 : -1 : _PER_WORD]
    if jump_at is not None and jump_by is not None:
        # Whole words take a jump by their sum, the rest of the word it lies in one by one.
        word = jump_at // _PER_WORD + 1
        np.add.at(before, word[word < num_words], jump_by[word < num_words].astype(np.int32))
    np.cumsum(before, out=before)
    counts = np.repeat(before, _PER_WORD)
    counts += lanes
    if jump_at is not None and jump_by is not None:
        rest = jump_at[:, None] + np.arange(_PER_WORD)
        same_word = rest // _PER_WORD == (jump_at // _PER_WORD)[:, None]
        by = np.broadcast_to(jump_by[:, None], rest.shape)
        np.add.at(counts, rest[same_word], by[same_word].astype(np.int32))
    return counts[: len(marks)]


def running_ends(lengths: Lengths) -> npt.NDArray[np.int64]:
    """int64 [N + 1]: 0, then the sum of the entries up to and with each. lengths: uint16 [N] of at most MAX_LENGTH each, or int64 [N]."""
    if lengths.dtype != np.uint16:
        return np.append(0, np.cumsum(lengths))
    num_words = len(lengths) // _LENGTHS_PER_WORD + 1
    lanes = np.zeros(num_words * _LENGTHS_PER_WORD, dtype="<u2")
    lanes[1 : len(lengths) + 1] = lengths
    words = lanes.view(_WORD)
    np.multiply(words, _ALL_PAIRS, out=words)
    before = np.zeros(num_words, dtype=np.int64)
    np.cumsum(lanes[_LENGTHS_PER_WORD - 1 : -1 : _LENGTHS_PER_WORD], out=before[1:])
    ends = np.repeat(before, _LENGTHS_PER_WORD)
    ends += lanes
    return ends[: len(lengths) + 1]
