"""The columns of student and teachers (chat mode adds masks and regions), and the rejects of tokenizing text.

Shape legend: R = rows of a table.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.tables import RejectReason, reject_side
from xtok.shards.alignments import AlignedSide
from xtok.shards.columns import list_column, null_regions
from xtok.shards.rows import Reject, RowBlock
from xtok.shards.sides import LoadedSide
from xtok.shards.windows import Windows, slice_rows
from xtok.tokenizers import FlatTokens

__all__ = ["by_reason", "no_cut", "no_tokens", "no_tokens_on", "overlong", "rows_of", "student_columns", "teacher_columns"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_ROUTES = pa.array(["byte", "offset"])


def rows_of(tokens: FlatTokens, rows: IntArray, keep: BoolArray) -> FlatTokens:
    """The rows that `keep` marks (`rows`: their indices)."""
    if keep.all():
        return tokens
    return slice_rows(tokens, tokens.offsets[:-1][rows], tokens.lengths[rows])


def student_columns(
    block: RowBlock,
    rows: IntArray,
    tokens: FlatTokens,
    windows: Windows | None = None,
    *,
    token_mask: BoolArray | None = None,
    regions: pa.Array | None = None,
) -> dict[str, pa.Array]:
    """The student's columns; rows: int64 [R], the block's row of each row, one row many times where it was split.

    token_mask: None where every token is supervised; regions: None in text mode.
    """
    chosen = rows.tolist()
    document = [block.sample_id[row] for row in chosen]
    number = np.zeros(len(rows), dtype=np.int32) if windows is None else windows.number.astype(np.int32)
    sample = document if windows is None else [f"{name}#{window}" for name, window in zip(document, number.tolist(), strict=True)]
    return {
        "sample_id": pa.array(sample, pa.string()),
        "idx": pa.array([block.idx[row] for row in chosen], pa.int64()),
        "source": pa.array([block.source[row] for row in chosen], pa.string()),
        "line": pa.array([block.line[row] for row in chosen], pa.int64()),
        "document_id": pa.array(document, pa.string()),
        "window": pa.array(number),
        "input_ids": list_column(tokens.ids, tokens.offsets),
        "token_mask": list_column(np.ones(len(tokens.ids), dtype=bool) if token_mask is None else token_mask, tokens.offsets),
        "regions": null_regions(len(rows)) if regions is None else regions,
        "num_tokens": pa.array(tokens.lengths.astype(np.int32)),
        "loss_multiplier": pa.array([block.loss_multiplier[row] for row in chosen], pa.float32()),
    }


def teacher_columns(
    side: AlignedSide,
    student_offsets: IntArray,
    valid: BoolArray,
    *,
    token_mask: BoolArray | None = None,
    regions: pa.Array | None = None,
) -> dict[str, pa.Array]:
    """A teacher's columns but for the names; valid: bool [R], False for rows that it refuses, which are null.

    token_mask: None where every token is supervised; regions: all R rows', None in text mode.
    """
    alignment = side.alignment
    num_rows = len(valid)

    def lists(values: npt.NDArray[np.generic], offsets: IntArray) -> pa.Array:
        lengths = np.zeros(num_rows, dtype=np.int64)
        lengths[valid] = np.diff(offsets)
        return list_column(values, np.append(0, np.cumsum(lengths)), valid)

    def scalars(values: npt.NDArray[np.generic]) -> pa.Array:
        spread = np.zeros(num_rows, dtype=values.dtype)
        spread[valid] = values
        return pa.array(spread, mask=~valid)

    return {
        "input_ids": lists(side.tokens.ids, side.tokens.offsets),
        "token_mask": lists(np.ones(len(side.tokens.ids), dtype=bool) if token_mask is None else token_mask, side.tokens.offsets),
        "student_chunk_id": lists(alignment.student_chunk_id, student_offsets),
        "teacher_chunk_id": lists(alignment.teacher_chunk_id, side.tokens.offsets),
        "pair_is_correct": lists(alignment.pair_is_correct, alignment.pair_offsets),
        "regions": null_regions(num_rows) if regions is None else regions,
        "route": _ROUTES.take(scalars(alignment.route)),
        "coverage": scalars(side.coverage),
    }


def _refusal(block: RowBlock, row: int, side: LoadedSide, reason: RejectReason, message: str) -> Reject:
    return Reject(
        block.source[row], block.line[row], block.sample_id[row], "tokenize", reject_side(side.index), reason.value, message
    )


def no_tokens(block: RowBlock, row: int, side: LoadedSide) -> Reject:
    return _refusal(block, row, side, RejectReason.NO_TOKENS, f"{side.name} gives the text no tokens")


def no_tokens_on(block: RowBlock, row: int, sides: list[LoadedSide], contents: list[FlatTokens]) -> Reject:
    empty = next(side for side, tokens in zip(sides, contents, strict=True) if tokens.lengths[row] == 0)
    message = f"{empty.name} gives the text no tokens, and windows need all sides"
    return _refusal(block, row, sides[0], RejectReason.NO_TOKENS, message)


def overlong(block: RowBlock, row: int, side: LoadedSide, num_tokens: int) -> Reject:
    message = f"the text has {num_tokens} tokens, the context leaves {side.capacity} beside the added specials"
    return _refusal(block, row, side, RejectReason.OVERLENGTH, message)


def no_cut(block: RowBlock, row: int, sides: list[LoadedSide]) -> Reject:
    capacities = ", ".join(str(side.capacity) for side in sides)
    message = f"a run of the text that no side may cut is longer than a context (content tokens: {capacities})"
    return _refusal(block, row, sides[0], RejectReason.NO_SHARED_CUT, message)


def by_reason(rejects: list[Reject]) -> dict[str, int]:
    return dict(sorted(Counter(reject.reason for reject in rejects).items()))
