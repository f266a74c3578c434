"""From two tokenizers to the sparse row-stochastic map between their vocabularies.

A student token whose bytes a teacher token has maps to it with weight 1. Every other one is written in the teacher's pieces, the weight
falling by ten from piece to piece (0.9, 0.09, …, divided by their sum). With the reverse pass, a teacher token that no student token
equals is written in the student's pieces, and gives its weight to those of them that have no exact partner. Special tokens map by role.

Shapes: V_s and V_t vocabulary sizes, k entries a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtok.errors import ProjectionError
from xtok.projection.pieces import ordinary_ids_by_bytes, split_into_pieces
from xtok.projection.roles import role_ids
from xtok.tokenizers import FlatTokens, TokenizerAdapter

__all__ = ["ProjectionTable", "build_projection"]

FALLOFF = 0.1
IdArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ProjectionTable:
    """A projection as arrays, without torch.

    indices: int32 `[V_s, k]`, teacher ids, −1 = no entry, largest weight first. weights: float32 `[V_s, k]`, rows with an entry sum to 1.
    is_exact: bool `[V_s]`, rows mapped by equal bytes. student_fingerprint, teacher_fingerprint: content fingerprints.
    """

    indices: IdArray
    weights: npt.NDArray[np.float32]
    is_exact: npt.NDArray[np.bool_]
    student_fingerprint: str
    teacher_fingerprint: str
    teacher_vocab_size: int
    reverse: bool

    @property
    def num_ordinary(self) -> int:
        """Rows with an entry."""
        return int((self.indices[:, 0] >= 0).sum())


def build_projection(
    student: TokenizerAdapter, teacher: TokenizerAdapter, *, k: int = 4, reverse: bool = False
) -> ProjectionTable:
    """Build the map. Raises ProjectionError when k < 1 or when not a single token could be mapped."""
    if k < 1:
        raise ProjectionError(f"k must be at least 1, got {k}")
    teacher_ids, student_ids = ordinary_ids_by_bytes(teacher), ordinary_ids_by_bytes(student)
    indices = np.full((student.vocab_size, k), -1, dtype=np.int32)
    weights = np.zeros((student.vocab_size, k), dtype=np.float64)
    usable = np.flatnonzero((student.table.lengths > 0) & ~student.table.is_special)
    values = student.table.values.to_pylist()
    partner = np.array([teacher_ids.get(values[i], -1) for i in usable.tolist()], dtype=np.int32)
    exact = usable[partner >= 0]
    indices[exact, 0], weights[exact, 0] = partner[partner >= 0], 1.0
    others = usable[partner < 0]
    entries = [_forward_entries(others, split_into_pieces(teacher, [values[i] for i in others.tolist()], teacher_ids))]
    is_exact = np.zeros(student.vocab_size, dtype=bool)
    is_exact[exact] = True
    if reverse:
        entries.append(_reverse_entries(student, teacher, student_ids, is_exact))
    _fill(indices, weights, np.concatenate([np.stack(part) for part in entries], axis=1))
    _map_roles(student, teacher, indices, weights)
    if not (indices >= 0).any():
        raise ProjectionError(f"no token of {student.name} could be written in {teacher.name}'s vocabulary")
    return ProjectionTable(
        indices=indices,
        weights=weights.astype(np.float32),
        is_exact=is_exact,
        student_fingerprint=student.content_fingerprint,
        teacher_fingerprint=teacher.content_fingerprint,
        teacher_vocab_size=teacher.vocab_size,
        reverse=reverse,
    )


Entries = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]  # student id, teacher id, weight


def _place_weights(pieces: FlatTokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For every piece: which string it belongs to, and 0.9 · 0.1^(its place in the string)."""
    owner = np.repeat(np.arange(pieces.num_texts, dtype=np.int64), pieces.lengths)
    place = np.arange(len(pieces.ids), dtype=np.float64) - pieces.offsets[owner]
    return owner, (1 - FALLOFF) * np.power(FALLOFF, place)


def _forward_entries(student_ids: npt.NDArray[np.int64], pieces: FlatTokens) -> Entries:
    owner, weight = _place_weights(pieces)
    return student_ids[owner].astype(np.float64), pieces.ids.astype(np.float64), weight


def _reverse_entries(
    student: TokenizerAdapter, teacher: TokenizerAdapter, student_ids: dict[bytes, int], is_exact: npt.NDArray[np.bool_]
) -> Entries:
    """Teacher tokens without an equal, written in student pieces that have no exact partner themselves."""
    usable = np.flatnonzero((teacher.table.lengths > 0) & ~teacher.table.is_special)
    values = teacher.table.values.to_pylist()
    lonely = np.array([i for i in usable.tolist() if values[i] not in student_ids], dtype=np.int64)
    pieces = split_into_pieces(student, [values[i] for i in lonely.tolist()], student_ids)
    owner, weight = _place_weights(pieces)
    keep = ~is_exact[pieces.ids]
    return pieces.ids[keep].astype(np.float64), lonely[owner[keep]].astype(np.float64), weight[keep]


def _fill(indices: IdArray, weights: npt.NDArray[np.float64], entries: npt.NDArray[np.float64]) -> None:
    """Sum entries `[3, E]` of one (student, teacher) pair, keep the k heaviest of each row (ties: lowest id), divide by their sum."""
    if entries.shape[1] == 0:
        return
    width = int(entries[1].max()) + 1
    pair, inverse = np.unique(entries[0].astype(np.int64) * width + entries[1].astype(np.int64), return_inverse=True)
    weight = np.bincount(inverse, weights=entries[2])
    row, column = pair // width, pair % width
    order = np.lexsort((column, -weight, row))
    row, column, weight = row[order], column[order], weight[order]
    first = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])
    place = np.arange(len(row)) - np.repeat(first, np.diff(np.r_[first, len(row)]))
    keep = place < indices.shape[1]
    indices[row[keep], place[keep]] = column[keep]
    weights[row[keep], place[keep]] = weight[keep]
    touched = row[first]
    weights[touched] /= weights[touched].sum(axis=1, keepdims=True)


def _map_roles(student: TokenizerAdapter, teacher: TokenizerAdapter, indices: IdArray, weights: npt.NDArray[np.float64]) -> None:
    """One entry of weight 1 for a special token whose role both sides have; an id of several roles takes the first."""
    partners = role_ids(teacher)
    done: set[int] = set()
    for role, token_id in role_ids(student).items():
        if token_id in done or role not in partners:
            continue
        is_marker = role in ("think_open", "think_close")
        if not student.table.is_special[token_id] and not is_marker:
            continue
        done.add(token_id)
        indices[token_id], weights[token_id] = -1, 0.0
        indices[token_id, 0], weights[token_id, 0] = partners[role], 1.0
