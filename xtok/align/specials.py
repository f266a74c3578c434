"""Special tokens: outside the lattice, paired between the sides by role.

Only the runs of specials at a document's beginning and end are added by tokenizers; they pair BOS with BOS and EOS with EOS, the
k-th with the k-th, wherever they stand and whatever the other side lacks. Pairs never cross: one that would break the order of
chunks is left out. Padding and unknown tokens pair with nothing.

Shape legend: D = documents, N = tokens of one side, S = special tokens of one side, R = role pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.align.cuts import BoolArray, IntArray
from xtok.tokenizers import ROLES
from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.flat import FlatTokens

__all__ = ["BOS", "EOS", "UNK", "RolePairs", "Specials", "find_specials", "pair_roles"]

BOS, EOS, UNK = (1 + ROLES.index(role) for role in ("bos", "eos", "unk"))


@dataclass(frozen=True, slots=True)
class Specials:
    """Special tokens of one side.

    index: int64 [S], sorted token indices. document: int64 [S]. leads, trails: bool [S], part of the run at the document's beginning or
    end (both in a document of specials only). num_leading, num_trailing: int64 [D], lengths of those runs; all of a document
    of specials only counts as leading.
    """

    index: IntArray
    document: IntArray
    leads: BoolArray
    trails: BoolArray
    num_leading: IntArray
    num_trailing: IntArray


@dataclass(frozen=True, slots=True)
class RolePairs:
    """student, teacher: int64 [R], token indices, both ascending. document: int64 [R]. leads: bool [R], before the content or after it.

    rank: int64 [R], position among the document's pairs on that end.
    """

    student: IntArray
    teacher: IntArray
    document: IntArray
    leads: BoolArray
    rank: IntArray


def find_specials(index: IntArray, offsets: IntArray) -> Specials:
    """index: int64 [S], sorted indices of the special tokens among documents of `offsets` (int64 [D + 1])."""
    bounds = np.searchsorted(index, offsets)
    counts = np.diff(bounds)
    document = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(index))
    leads = index - offsets[document] == position - bounds[document]
    trails = offsets[document + 1] - index == bounds[document + 1] - position
    num_leading = np.bincount(document[leads], minlength=len(counts))
    num_trailing = np.bincount(document[trails & ~leads], minlength=len(counts))
    return Specials(index, document, leads, trails, num_leading, num_trailing)


def pair_roles(
    student: tuple[TokenizerAdapter, FlatTokens, Specials], teacher: tuple[TokenizerAdapter, FlatTokens, Specials]
) -> RolePairs:
    """BOS and EOS of both sides, one to one."""
    student_key, student_index = _role_keys(*student)
    teacher_key, teacher_index = _role_keys(*teacher)
    key, at_student, at_teacher = np.intersect1d(student_key, teacher_key, assume_unique=True, return_indices=True)
    order = np.argsort(student_index[at_student])
    group = key[order] // _KEYS_PER_END
    left, right = student_index[at_student][order], teacher_index[at_teacher][order]
    in_order = right > np.append(-1, np.maximum.accumulate(right)[:-1]) if len(right) else np.empty(0, dtype=bool)
    left, right, group = left[in_order], right[in_order], group[in_order]
    return RolePairs(left, right, group // 2, group % 2 == 0, _rank_in_run(group))


_KEYS_PER_END = 2 * (1 << 32)  # BOS or EOS, times occurrence


def _role_keys(adapter: TokenizerAdapter, tokens: FlatTokens, specials: Specials) -> tuple[IntArray, IntArray]:
    """One distinct key per (document, end, role, occurrence) and the token index that bears it."""
    ids = tokens.ids[specials.index]
    role = adapter.table.role_code[ids].astype(np.int64)
    only_specials = specials.leads & specials.trails
    # Where nothing separates the ends, a BOS is at the beginning and an EOS at the end.
    trails = np.where(only_specials, role != BOS, specials.trails)
    # One id may be both BOS and EOS: where it stands says which.
    role[trails & (ids == _or_none(adapter.eos_token_id))] = EOS
    role[~trails & (ids == _or_none(adapter.bos_token_id))] = BOS
    usable = ((role == BOS) | (role == EOS)) & (specials.leads | specials.trails)
    group = ((specials.document * 2 + trails) * 2 + (role == EOS))[usable]
    index = specials.index[usable]
    order = np.argsort(group, kind="stable")
    group, index = group[order], index[order]
    return group * (1 << 32) + _rank_in_run(group), index


def _or_none(token_id: int | None) -> int:
    return -1 if token_id is None else token_id


def _rank_in_run(group: npt.NDArray[np.int64]) -> IntArray:
    """int64: position of each entry among the equal neighbours it stands with."""
    position = np.arange(len(group))
    begins = np.append(True, group[1:] != group[:-1]) if len(group) else np.empty(0, dtype=bool)
    return position - np.maximum.accumulate(np.where(begins, position, 0))
