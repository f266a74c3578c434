"""Exact-partition masks against counting in Python, chunks in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok.loader.partition import exact_masks, num_chunks_of_rows


@st.composite
def rows_of_chunks(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[bool]]]:
    """Rows of (student chunk ids, teacher chunk ids, correct); the teacher's chunks may stand in another order."""
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        num_chunks = draw(st.integers(0, 5))
        teacher_order = draw(st.permutations(range(num_chunks))) if draw(st.booleans()) else list(range(num_chunks))
        sides = []
        for order in (range(num_chunks), teacher_order):
            ids: list[int] = []
            for chunk in order:
                ids += [-1] * draw(st.integers(0, 1)) + [chunk] * draw(st.integers(1, 3))
            sides.append(ids + [-1] * draw(st.integers(0, 2)))
        rows.append((*sides, draw(st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks))))
    return rows


def flat(values: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    joined = np.array([value for row in values for value in row], dtype=np.int32)
    return joined, np.cumsum([0, *map(len, values)], dtype=np.int64)


@given(rows=rows_of_chunks())
def test_equals_counting(rows: list[tuple[list[int], list[int], list[bool]]]) -> None:
    student, student_offsets = flat([row[0] for row in rows])
    teacher, teacher_offsets = flat([row[1] for row in rows])
    correct, pair_offsets = flat([row[2] for row in rows])  # type: ignore[misc]
    found = exact_masks(student, student_offsets, teacher, teacher_offsets, correct.astype(bool), pair_offsets)
    wanted: tuple[list[bool], list[bool]] = ([], [])
    for student_row, teacher_row, is_correct in rows:
        exact = {
            chunk
            for chunk, flag in enumerate(is_correct)
            if flag and student_row.count(chunk) == 1 and teacher_row.count(chunk) == 1
        }
        wanted[0].extend(chunk in exact for chunk in student_row)
        wanted[1].extend(chunk in exact for chunk in teacher_row)
    assert found[0].tolist() == wanted[0]
    assert found[1].tolist() == wanted[1]
    assert num_chunks_of_rows(student, student_offsets).tolist() == [len(row[2]) for row in rows]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_both_routes_agree_where_chunks_change_places(order: list[int]) -> None:
    teacher = np.array([chunk for chunk in order for _ in range(1 + (chunk == 1))], dtype=np.int32)
    student = np.array([0, 1, 2], dtype=np.int32)
    correct = np.array([True, True, True])
    masks = exact_masks(student, np.array([0, 3]), teacher, np.array([0, 4]), correct, np.array([0, 3]))
    assert masks[0].tolist() == [True, False, True]
    assert masks[1].tolist() == [chunk != 1 for chunk in teacher]
