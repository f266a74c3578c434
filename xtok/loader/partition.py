"""Exact-partition masks of many rows at once: tokens on a correct one-to-one pair.

The same masks as `xtok.align.flat.exact_partition_masks`, which counts the tokens of every chunk. The loader computes them for
every token it reads, so the ordinary case has a shorter way: where the chunks of each row stand in order on both sides, each one
run of tokens, a pass of comparisons is enough. A check finds the other cases (special tokens paired by role) and counts.

Legend: Ns, Nt student and teacher tokens, D rows, P chunks of all rows together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xtok.align.flat import FlatAlignment, exact_partition_masks

__all__ = ["exact_masks", "num_chunks_of_rows"]

Ints = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def exact_masks(
    student_chunk_id: Ints,
    student_offsets: Offsets,
    teacher_chunk_id: Ints,
    teacher_offsets: Offsets,
    pair_is_correct: Flags,
    pair_offsets: Offsets,
) -> tuple[Flags, Flags]:
    """(student bool [Ns], teacher bool [Nt]): True where the token is alone in its chunk on both sides and the pair is correct.

    chunk ids are int32, numbered within each row, -1 for none; offsets are int64 [D + 1]; pair_is_correct is bool [P].
    """
    student = _run_starts(student_chunk_id, student_offsets)
    teacher = _run_starts(teacher_chunk_id, teacher_offsets)
    if not (_in_order(student_chunk_id, student[0], pair_offsets) and _in_order(teacher_chunk_id, teacher[0], pair_offsets)):
        num_chunks = np.diff(pair_offsets)
        route = np.zeros(len(num_chunks), dtype=np.uint8)  # not looked at
        alignment = FlatAlignment(student_chunk_id, teacher_chunk_id, num_chunks, pair_is_correct, pair_offsets, route)
        return exact_partition_masks(alignment, student_offsets, teacher_offsets)
    # Run number r is chunk number r on both sides, so that flags of runs compare without any lookup.
    exact = student[1] & teacher[1] & pair_is_correct
    return _flags_at(student[0], exact, len(student_chunk_id)), _flags_at(teacher[0], exact, len(teacher_chunk_id))


def num_chunks_of_rows(chunk_id: Ints, offsets: Offsets) -> Offsets:
    """int64 [D]: one more than the largest chunk id of each row, 0 for rows without chunks."""
    counts = np.zeros(len(offsets) - 1, dtype=np.int64)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        counts[filled] = np.maximum.reduceat(chunk_id, offsets[filled]) + np.int64(1)
    return counts


def _run_starts(chunk_id: Ints, offsets: Offsets) -> tuple[Offsets, Flags]:
    """First position of every run of one chunk, and whether the run is one token long."""
    changes = np.ones(len(chunk_id) + 1, dtype=bool)
    np.not_equal(chunk_id[1:], chunk_id[:-1], out=changes[1:-1])
    changes[offsets] = True
    starts = np.flatnonzero(changes[:-1] & (chunk_id >= 0))
    return starts, np.take(changes[1:], starts, mode="clip")  # "clip" spares numpy the check


def _in_order(chunk_id: Ints, starts: Offsets, pair_offsets: Offsets) -> bool:
    """Whether the runs are the chunks 0, 1, 2, ... of every row."""
    num_pairs = int(pair_offsets[-1])
    if len(starts) != num_pairs:
        return False
    if num_pairs == 0:
        return True
    runs = np.take(chunk_id, starts, mode="clip")
    first_of_row = pair_offsets[:-1][np.diff(pair_offsets) > 0]
    follows = np.empty(num_pairs, dtype=bool)
    np.equal(runs[1:], runs[:-1] + 1, out=follows[1:])
    follows[first_of_row] = runs[first_of_row] == 0
    return bool(follows.all())


def _flags_at(positions: Offsets, flags: Flags, length: int) -> Flags:
    spread = np.zeros(length, dtype=bool)
    spread[positions] = flags
    return spread
