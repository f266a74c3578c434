"""What the alignment asks of every token, in one number: which bytes it stands for, and how many they are.

Two readings of a pair of tokenizers have equal codes exactly when their bytes are equal; the low bits of a code are the bytes' length.
So one look-up a token serves the cuts and most of the comparison.

Shape legend: N = tokens of one side, V = readings of one side's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from xtok.align.byte_readings import readings_of
from xtok.align.running_count import MAX_LENGTH, Lengths
from xtok.tokenizers.adapter import TokenizerAdapter

__all__ = ["Codes", "TokenCodes", "codes_of"]

Codes = npt.NDArray[np.signedinteger[Any]]
_NARROW = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class TokenCodes:
    """The codes of one side's readings, of worth beside the other side's only.

    table: int32 or int64 [V]. length_mask: the bits that hold a length.
    """

    table: pa.Array
    length_mask: int

    def of(self, columns: npt.NDArray[np.int32]) -> Codes:
        """Codes (int32 or int64 [N], not to be written to) of readings (int32 [N]), which must lie in the table: they are not checked."""
        # Arrow looks 32-bit indices up as they are; numpy would widen them first.
        codes: Codes = pc.take(self.table, pa.array(columns), boundscheck=False).to_numpy()
        return codes

    def lengths(self, codes: Codes) -> Lengths:
        """Bytes of each: uint16 [N], or int64 for a vocabulary with a token longer than MAX_LENGTH."""
        if self.length_mask > MAX_LENGTH:
            return (codes & self.length_mask).astype(np.int64)
        lengths = np.empty(len(codes), dtype=np.uint16)
        np.bitwise_and(codes, self.length_mask, out=lengths, casting="unsafe")
        return lengths


_CODES: WeakKeyDictionary[TokenizerAdapter, WeakKeyDictionary[TokenizerAdapter, tuple[TokenCodes, TokenCodes]]] = (
    WeakKeyDictionary()
)


def codes_of(student: TokenizerAdapter, teacher: TokenizerAdapter) -> tuple[TokenCodes, TokenCodes]:
    """The codes of both sides, made once for each pair."""
    known = _CODES.setdefault(student, WeakKeyDictionary())
    found = known.get(teacher)
    if found is None:
        found = known[teacher] = _build_codes(student, teacher)
    return found


def _build_codes(student: TokenizerAdapter, teacher: TokenizerAdapter) -> tuple[TokenCodes, TokenCodes]:
    left, right = readings_of(student), readings_of(teacher)
    same_bytes = pc.dictionary_encode(pa.concat_arrays([left.values, right.values])).indices.to_numpy().astype(np.int64)
    lengths = np.concatenate([left.lengths, right.lengths])
    num_bits = int(lengths.max(initial=0)).bit_length()
    codes = (same_bytes << num_bits) | lengths
    if codes.max(initial=0) <= np.iinfo(_NARROW).max:  # so it is for all but enormous vocabularies; half the memory
        codes = codes.astype(_NARROW)
    sides = codes[: len(left.lengths)], codes[len(left.lengths) :]
    return TokenCodes(pa.array(sides[0]), (1 << num_bits) - 1), TokenCodes(pa.array(sides[1]), (1 << num_bits) - 1)
