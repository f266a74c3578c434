"""The bytes that ids stand for, in every reading an id can have, and their comparison.

Besides its plain bytes an id has three readings: a first token without the dummy prefix blank, a special token as its literal text (a
document may quote `<|im_end|>`: one tokenizer makes a control token of it, the other spells it), and a BOS or EOS amid the text
as a mark of its role.

Shape legend: D = documents, N = tokens of one side, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from xtok.align.cuts import BoolArray, IntArray
from xtok.align.specials import BOS, EOS
from xtok.errors import TokenizerError
from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.flat import FlatTokens

__all__ = ["TokenReadings", "check_ids", "document_ranges", "equal_prefixes", "readings_of", "take_bytes"]


@dataclass(frozen=True, slots=True)
class TokenReadings:
    """Bytes of every id in every reading.

    values: large_binary [V + extra], the plain readings first. lengths: int32 [V + extra], bytes of each.
    unprefixed, literal, role_mark: int32 [V], where an id's other reading stands in `values` (its own plain one where it has no
    other). text: int32 [V], the reading of the offset route: special tokens are literal, pieces that continue a word have lost
    WordPiece's `##`. begins_blank: bool [V], first byte is a blank. second_blank: bool [V], so is the second. is_lone_blank: bool
    [V], it is nothing but one blank. is_special: bool [V].
    """

    values: pa.LargeBinaryArray
    lengths: npt.NDArray[np.int32]
    unprefixed: npt.NDArray[np.int32]
    literal: npt.NDArray[np.int32]
    role_mark: npt.NDArray[np.int32]
    text: npt.NDArray[np.int32]
    begins_blank: BoolArray
    second_blank: BoolArray
    is_lone_blank: BoolArray
    is_special: BoolArray


_READINGS: WeakKeyDictionary[TokenizerAdapter, TokenReadings] = WeakKeyDictionary()


def readings_of(adapter: TokenizerAdapter) -> TokenReadings:
    """The adapter's readings, built once."""
    readings = _READINGS.get(adapter)
    if readings is None:
        readings = _READINGS[adapter] = _build_readings(adapter)
    return readings


def _build_readings(adapter: TokenizerAdapter) -> TokenReadings:
    table = adapter.table
    vocab_size = len(table.is_special)
    data, cuts = take_bytes_of(table.values, np.arange(vocab_size, dtype=np.int32))
    blank = np.append(data == ord(" "), np.zeros(2, dtype=bool))
    first, second = (blank[cuts[:-1] + at] & (np.diff(cuts) > at) for at in (0, 1))
    blank_ids = np.flatnonzero(first)
    continuing = _continuing_pieces(adapter, data, cuts)
    in_order = np.arange(len(continuing), dtype=np.int32)
    special_ids = np.array(sorted(table.special_content), dtype=np.int64)
    role_ids = np.flatnonzero((table.role_code == BOS) | (table.role_code == EOS))
    role_bytes = [bytes([0xF8 + int(code)]) for code in table.role_code[role_ids]]  # no UTF-8 text holds these bytes
    columns = [np.arange(vocab_size, dtype=np.int32) for _ in range(3)]
    at = vocab_size
    for column, ids in zip(columns, (blank_ids, special_ids, role_ids), strict=True):
        column[ids] = np.arange(at, at + len(ids))
        at += len(ids)
    values = pa.concat_arrays(
        [
            table.values,
            _without_first_byte(*take_bytes_of(table.values, blank_ids.astype(np.int32))),
            pa.array([table.special_content[int(token_id)] for token_id in special_ids], pa.large_binary()),
            pa.array(role_bytes, pa.large_binary()),
            _without_first_byte(*take_bytes_of(_without_first_byte(*take_bytes_of(table.values, continuing)), in_order)),
        ]
    )
    unprefixed, literal, role_mark = columns
    text = literal.copy()
    text[continuing] = np.arange(at, at + len(continuing))
    bounds = np.frombuffer(values.buffers()[1], dtype=np.int64, count=len(values) + 1)
    lengths = (bounds[1:] - bounds[:-1]).astype(np.int32)  # small, so that look-ups find it in the cache
    return TokenReadings(
        values,
        lengths,
        unprefixed,
        literal,
        role_mark,
        text,
        first,
        second,
        first & (table.lengths == 1),
        np.asarray(table.is_special),
    )


def _continuing_pieces(adapter: TokenizerAdapter, data: npt.NDArray[np.uint8], cuts: IntArray) -> npt.NDArray[np.int32]:
    """int32: ids of the pieces that continue a word in a WordPiece vocabulary, none in others.

    A vocabulary on the offset route in which such pieces are common is WordPiece; elsewhere `##` is text (a heading).
    """
    hash_at = np.append(data == ord("#"), np.zeros(2, dtype=bool))
    ids = np.flatnonzero(hash_at[cuts[:-1]] & hash_at[cuts[:-1] + 1] & (np.diff(cuts) > 2)).astype(np.int32)
    is_wordpiece = adapter.route == "offset" and len(ids) > 0.02 * len(cuts)
    return ids if is_wordpiece else ids[:0]


def _without_first_byte(data: npt.NDArray[np.uint8], cuts: IntArray) -> pa.LargeBinaryArray:
    kept = np.ones(len(data), dtype=bool)
    kept[cuts[:-1]] = False
    shorter = cuts - np.arange(len(cuts))
    buffers = [None, pa.py_buffer(shorter.tobytes()), pa.py_buffer(data[kept].tobytes())]
    return pa.Array.from_buffers(pa.large_binary(), len(cuts) - 1, buffers)


def take_bytes(readings: TokenReadings, columns: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """Concatenated bytes (uint8) and cuts (int64 [N + 1]) of entries of `readings.values` (int32 [N])."""
    return take_bytes_of(readings.values, columns)


def take_bytes_of(values: pa.LargeBinaryArray, columns: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """The same of any large_binary array. `columns` must lie inside it: they are not checked."""
    taken = pc.take(values, pa.array(columns), boundscheck=False)
    _, cut_buffer, byte_buffer = taken.buffers()
    cuts = np.frombuffer(cut_buffer, dtype=np.int64, count=len(columns) + 1)
    if byte_buffer is None:
        return np.empty(0, dtype=np.uint8), cuts
    return np.frombuffer(byte_buffer, dtype=np.uint8, count=int(cuts[-1])), cuts


def check_ids(adapter: TokenizerAdapter, tokens: FlatTokens) -> None:
    """TokenizerError for an id that the tokenizer does not have."""
    if len(tokens.ids) == 0:
        return
    highest = int(tokens.ids.view(np.uint32).max())  # a negative id counts as a huge one: one pass finds both
    if highest >= adapter.vocab_size:
        bad = int(np.uint32(highest).astype(np.int32))
        raise TokenizerError(
            f"token id {bad} is outside the {adapter.vocab_size} ids of {adapter.name}: these ids come from another tokenizer"
        )


def equal_prefixes(
    student: npt.NDArray[np.uint8], student_bounds: IntArray, teacher: npt.NDArray[np.uint8], teacher_bounds: IntArray
) -> BoolArray:
    """bool [D]: documents whose bytes are equal up to the end of the shorter side.

    student, teacher: uint8, bytes of all documents; *_bounds: int64 [D + 1]. One comparison where all are equal, else one per document.
    """
    num_documents = len(student_bounds) - 1
    if np.array_equal(student_bounds, teacher_bounds) and np.array_equal(student, teacher):
        return np.ones(num_documents, dtype=bool)
    left, right = student.tobytes(), teacher.tobytes()
    lengths = np.minimum(np.diff(student_bounds), np.diff(teacher_bounds)).tolist()
    rows = zip(student_bounds.tolist(), teacher_bounds.tolist(), lengths, strict=False)
    return np.fromiter((left[a : a + n] == right[b : b + n] for a, b, n in rows), dtype=bool, count=num_documents)


def document_ranges(offsets: IntArray, documents: IntArray, *, at_most: int | None = None) -> tuple[IntArray, IntArray]:
    """(int64 [tokens of those documents]: their token indices in order; int64 [len(documents) + 1]: their offsets among these).

    at_most: only so many of each, the first ones.
    """
    starts, counts = offsets[documents], offsets[documents + 1] - offsets[documents]
    counts = counts if at_most is None else np.minimum(counts, at_most)
    bounds = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum(counts, out=bounds[1:])
    return np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts), bounds
