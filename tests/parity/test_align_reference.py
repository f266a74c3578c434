"""The lattice against the brute-force reference, on bundled and production tokenizers, with truncation and without added specials."""

from __future__ import annotations

from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.align.support import BUNDLED_NAMES, HARD_TEXTS, REAL_NAMES, TEXTS, Shown, bundled, real, texts
from xtok.align.cuts import TokenPlaces, chunks_from_cuts
from xtok.align.lattice import align_flat
from xtok.align.reference import reference_align


def check_equal(student: Shown, teacher: Shown) -> int:
    """Every document equal to the reference; returns how many verified."""
    alignment = align_flat(student.adapter, teacher.adapter, student.tokens, teacher.tokens)
    num_verified = 0
    for row in range(student.tokens.num_texts):
        left, right = (slice(*side.tokens.offsets[row : row + 2]) for side in (student, teacher))
        expected = reference_align(
            student.adapter, teacher.adapter, student.tokens.ids[left].tolist(), teacher.tokens.ids[right].tolist()
        )
        assert (alignment.route[row] == 0) == expected.is_verified, row
        assert alignment.student_chunk_id[left].tolist() == expected.student_chunk_id, row
        assert alignment.teacher_chunk_id[right].tolist() == expected.teacher_chunk_id, row
        assert alignment.num_chunks[row] == expected.num_chunks, row
        num_verified += expected.is_verified
    return num_verified


@pytest.mark.parametrize(("student", "teacher"), list(permutations(BUNDLED_NAMES, 2)))
def test_bundled_pairs_equal_the_reference(student: str, teacher: str) -> None:
    documents = [*HARD_TEXTS, *(text[:400] for text in texts()[len(HARD_TEXTS) :: 9])]
    for limits in ((None, None), (7, None), (None, 9), (1, 3)):
        left = Shown(bundled(student), documents, limit=limits[0])
        check_equal(left, Shown(bundled(teacher), documents, limit=limits[1]))
        check_equal(left, Shown(bundled(teacher), documents, limit=limits[1], add_special_tokens=False))


@pytest.mark.parametrize("student", REAL_NAMES)
def test_real_pairs_equal_the_reference(student: str, real_tokenizer_folder: Path) -> None:
    documents = [*HARD_TEXTS, *(text[:300] for text in texts()[len(HARD_TEXTS) :: 17])]
    for teacher in REAL_NAMES:
        if teacher != student:
            left, right = (Shown(real(real_tokenizer_folder, name), documents) for name in (student, teacher))
            assert check_equal(left, right) > 0.75 * len(documents)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    documents=st.lists(TEXTS, min_size=1, max_size=4),
    pair=st.sampled_from(list(permutations(BUNDLED_NAMES, 2))),
    limits=st.tuples(*(st.one_of(st.none(), st.integers(0, 8)) for _ in range(2))),
    specials=st.tuples(st.booleans(), st.booleans()),
)
def test_any_text_equals_the_reference(
    documents: list[str], pair: tuple[str, str], limits: tuple[int | None, int | None], specials: tuple[bool, bool]
) -> None:
    sides = [
        Shown(bundled(name), documents, limit=limit, add_special_tokens=added)
        for name, limit, added in zip(pair, limits, specials, strict=True)
    ]
    check_equal(sides[0], sides[1])


def slow_chunks(student: list[tuple[int, int]], teacher: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Chunks of one document of active tokens by the definition: neighbouring shared cuts that both sides cover without a hole."""
    cuts = [{place for span in side for place in span} for side in (student, teacher)]
    shared = sorted(cuts[0] & cuts[1])
    chunks = [
        (begin, end)
        for begin, end in pairwise(shared)
        if all(sum(b - a for a, b in side if begin <= a and b <= end) == end - begin for side in (student, teacher))
    ]

    def of(span: tuple[int, int]) -> int:
        return next((at for at, (begin, end) in enumerate(chunks) if begin <= span[0] and span[1] <= end), -1)

    return [of(span) for span in student], [of(span) for span in teacher]


SIDE = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=8)


@settings(max_examples=300, deadline=None)
@given(documents=st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=4))
def test_places_with_holes_and_inactive_tokens_equal_the_definition(documents: list[tuple[list, list]]) -> None:
    """Each token: (hole before it, width, takes part)."""
    places = []
    for side in range(2):
        starts, ends, active, offsets = [], [], [], [0]
        for document in documents:
            at = 0
            for hole, width, takes_part in document[side]:
                starts.append(at + hole)
                ends.append(at := at + hole + width)
                active.append(takes_part)
            offsets.append(len(starts))
        columns = (np.array(column, dtype=np.int64) for column in (starts, ends, offsets))
        places.append(TokenPlaces(*columns, np.array(active, dtype=bool)))
    chunks = chunks_from_cuts(*places)
    for row in range(len(documents)):
        spans, found = [], []
        for side, ids in zip(places, (chunks.student_chunk_id, chunks.teacher_chunk_id), strict=True):
            tokens = [at for at in range(*side.offsets[row : row + 2]) if side.active[at]]
            spans.append([(int(side.starts[at]), int(side.ends[at])) for at in tokens])
            found.append([int(ids[at]) for at in tokens])
            assert all(ids[at] == -1 for at in range(*side.offsets[row : row + 2]) if not side.active[at])
        assert tuple(found) == slow_chunks(*spans)
        assert chunks.num_chunks[row] == len({number for number in found[0] if number >= 0})
