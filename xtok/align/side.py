"""One side's documents and the readings their ids have.

Shape legend: D = documents, N = tokens of one side, S = special tokens of one side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from xtok.align.byte_readings import check_ids, document_ranges, readings_of, take_bytes
from xtok.align.cuts import BoolArray, IntArray
from xtok.align.running_count import Lengths
from xtok.align.specials import UNK, Specials, find_specials
from xtok.align.token_codes import Codes, TokenCodes, codes_of
from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.flat import FlatTokens

__all__ = ["Plain", "Side", "SpecialReading", "pair_of_sides", "text_bytes"]

# How special tokens are read. marks: BOS and EOS amid the text are marks of their role, all else is empty. amid: those amid the
# text are their literal text. undeclared: so are those at the ends beyond what the tokenizer adds by itself. all; none.
SpecialReading = Literal["marks", "amid", "undeclared", "all", "none"]


class Side:
    """One side's documents, ready to be read. TokenizerError for ids that the tokenizer does not have.

    codes: int [N], see `TokenCodes`. empty: int64, sorted indices of the tokens without bytes in the plain reading.
    """

    def __init__(self, adapter: TokenizerAdapter, tokens: FlatTokens, lookup: TokenCodes) -> None:
        check_ids(adapter, tokens)
        self.adapter, self.tokens, self.lookup, self.readings = adapter, tokens, lookup, readings_of(adapter)
        self.codes = lookup.of(tokens.ids)
        self.lengths = lookup.lengths(self.codes)
        self.empty: IntArray = np.flatnonzero(self.lengths == 0)
        is_special = self.readings.is_special[tokens.ids[self.empty]]  # special tokens have no bytes in the plain reading
        self.specials: Specials = find_specials(self.empty[is_special], tokens.offsets)
        self.first_content = tokens.offsets[:-1] + self.specials.num_leading
        self.has_content = self.first_content < tokens.offsets[1:]
        ids = tokens.ids if len(tokens.ids) else np.zeros(1, dtype=np.int32)
        self.first_id = ids[np.where(self.has_content, self.first_content, 0)]
        self.begins_blank = self.has_content & self.readings.begins_blank[self.first_id]
        self.may_have_prefix = self.begins_blank & (adapter.prefix_space != "never")

    def select(self, documents: IntArray) -> tuple[Side, IntArray]:
        """The side with only those documents, and the indices of their tokens in this one."""
        index, offsets = document_ranges(self.tokens.offsets, documents)
        return Side(self.adapter, FlatTokens(self.tokens.ids[index], offsets), self.lookup), index

    def remainder_begins_blank(self, *, if_empty: bool = False) -> BoolArray:
        """bool [D]: what follows the first content byte begins with a blank; `if_empty` where nothing follows."""
        ids = self.tokens.ids
        alone = self.readings.is_lone_blank[self.first_id]
        following = self.first_content + 1
        exists = following < self.tokens.offsets[1:] - self.specials.num_trailing
        next_id = ids[np.where(exists, following, 0)] if len(ids) else self.first_id
        following_blank = np.where(exists, self.readings.begins_blank[next_id], if_empty)
        return np.where(alone, following_blank, self.readings.second_blank[self.first_id])

    def without_prefix(self, documents: BoolArray) -> Plain:
        """The plain reading of all tokens, but the first content token of `documents` (bool [D]) without its blank."""
        strip = self.first_content[documents]
        if not len(strip):
            return Plain(self.tokens.ids, self.codes, self.lengths)
        columns, codes, lengths = self.tokens.ids.copy(), self.codes.copy(), self.lengths.copy()
        columns[strip] = self.readings.unprefixed[columns[strip]]
        codes[strip] = self.lookup.of(columns[strip])
        lengths[strip] = self.lookup.lengths(codes[strip])
        return Plain(columns, codes, lengths)

    def columns(self, without_prefix: BoolArray, reading: SpecialReading) -> npt.NDArray[np.int32]:
        """int32 [N]: entry of `readings.values` for each token. without_prefix: bool [D], leave out the dummy prefix blank."""
        literal, marks = self._literal(reading), self._amid() if reading == "marks" else None
        strip = self.first_content[without_prefix]
        if not len(strip) and not literal.any() and (marks is None or not marks.any()):
            return self.tokens.ids
        columns = self.tokens.ids.copy()
        columns[strip] = self.readings.unprefixed[columns[strip]]
        for chosen, other in ((literal, self.readings.literal), (marks, self.readings.role_mark)):
            if chosen is not None:
                index = self.specials.index[chosen]
                columns[index] = other[columns[index]]
        return columns

    def num_literal(self, reading: SpecialReading) -> IntArray:
        """int64 [D]: special tokens that stand for their text in this reading."""
        return np.bincount(self.specials.document[self._literal(reading)], minlength=len(self.first_content))

    def has_unknown(self, reading: SpecialReading) -> BoolArray:
        """bool [D]: some UNK token stands for text that its id does not tell."""
        role_code = self.adapter.table.role_code[self.tokens.ids[self.specials.index]]
        unknown = (role_code == UNK) & ~self._literal(reading)
        return np.bincount(self.specials.document[unknown], minlength=len(self.first_content)) > 0

    def _amid(self) -> BoolArray:
        return ~(self.specials.leads | self.specials.trails)

    def _literal(self, reading: SpecialReading) -> BoolArray:
        if reading == "all":
            return np.ones(len(self.specials.index), dtype=bool)
        if reading == "amid":
            return self._amid()
        if reading == "undeclared":
            return ~self._declared()
        return np.zeros(len(self.specials.index), dtype=bool)

    def _declared(self) -> BoolArray:
        """bool [S]: the tokens that the tokenizer itself puts around a text, where they stand at the ends."""
        index, ids, document = self.specials.index, self.tokens.ids[self.specials.index], self.specials.document
        from_start = index - self.tokens.offsets[document]
        from_end = self.tokens.offsets[document + 1] - 1 - index
        declared = np.zeros(len(index), dtype=bool)
        for at, token_id in enumerate(self.adapter.prefix_ids):
            declared |= (from_start == at) & (ids == token_id)
        for at, token_id in enumerate(self.adapter.suffix_ids[::-1]):
            declared |= (from_end == at) & (ids == token_id)
        return declared


def pair_of_sides(
    student: TokenizerAdapter, teacher: TokenizerAdapter, student_tokens: FlatTokens, teacher_tokens: FlatTokens
) -> tuple[Side, Side]:
    """Both sides of the same documents."""
    codes = codes_of(student, teacher)
    return Side(student, student_tokens, codes[0]), Side(teacher, teacher_tokens, codes[1])


@dataclass(frozen=True, slots=True)
class Plain:
    """One reading of every token: columns int32 [N], entries of `readings.values`; their codes and lengths, see `TokenCodes`."""

    columns: npt.NDArray[np.int32]
    codes: Codes
    lengths: Lengths


def text_bytes(side: Side, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """Concatenated bytes and cuts (int64 [N + 1]) of ids (int32 [N]) as text: special tokens are what they look like."""
    return take_bytes(side.readings, side.readings.text[ids])
