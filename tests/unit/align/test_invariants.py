"""What holds for every alignment: order, contiguity, coverage, numbering; on bundled and production tokenizers and on any text."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.align.support import BUNDLED_NAMES, REAL_NAMES, TEXTS, Shown, bundled, lookup, real, texts
from xtok.align.lattice import FlatAlignment, align_flat, exact_partition_masks, shared_cuts

ALL_PAIRS = list(permutations(BUNDLED_NAMES, 2))


def check_invariants(alignment: FlatAlignment, student: Shown, teacher: Shown) -> None:
    masks = exact_partition_masks(alignment, student.tokens.offsets, teacher.tokens.offsets)
    chunk_ids = alignment.student_chunk_id, alignment.teacher_chunk_id
    for row in range(student.tokens.num_texts):
        rows = [slice(*side.tokens.offsets[row : row + 2]) for side in (student, teacher)]
        ids = [chunk_id[tokens] for chunk_id, tokens in zip(chunk_ids, rows, strict=True)]
        correct = alignment.pair_is_correct[slice(*alignment.pair_offsets[row : row + 2])]
        for side, tokens, own, mask in zip((student, teacher), rows, ids, masks, strict=True):
            valid = own[own >= 0]
            assert (np.diff(valid) >= 0).all(), "ordered"
            assert np.array_equal(np.unique(valid), np.arange(alignment.num_chunks[row])), "numbered from 0 without gaps"
            for chunk in np.unique(valid):
                run = np.flatnonzero(own == chunk)
                inside = slice(run[0], run[-1] + 1)
                assert ((own[inside] == chunk) | side.is_special[tokens][inside]).all(), "one contiguous run"
            exact = [chunk >= 0 and correct[chunk] and all((other == chunk).sum() == 1 for other in ids) for chunk in own]
            assert mask[tokens].tolist() == exact


def check_coverage(alignment: FlatAlignment, student: Shown, teacher: Shown) -> None:
    """Every content token of a verified, untruncated document is in a chunk (one that a tokenizer drops whole has no other side)."""
    has_both = np.ones(student.tokens.num_texts, dtype=bool)
    for side in (student, teacher):
        has_both &= (
            np.add.reduceat(np.append(~side.is_special, False).astype(int), side.tokens.offsets[:-1]) * side.tokens.lengths > 0
        )
    for side, chunk_id in ((student, alignment.student_chunk_id), (teacher, alignment.teacher_chunk_id)):
        by_bytes = np.repeat((alignment.route == 0) & has_both, side.tokens.lengths)
        assert (chunk_id[by_bytes & ~side.is_special] >= 0).all()
    verified = np.repeat(alignment.route == 0, alignment.num_chunks)
    assert alignment.pair_is_correct[verified].all()


@pytest.mark.parametrize(("student", "teacher"), ALL_PAIRS)
def test_bundled_pairs(student: str, teacher: str) -> None:
    left, right = Shown(bundled(student), texts()), Shown(bundled(teacher), texts())
    alignment = align_flat(left.adapter, right.adapter, left.tokens, right.tokens, spans=lookup(left, right))
    check_coverage(alignment, left, right)
    documents = texts()[:40]
    left, right = Shown(bundled(student), documents, limit=60), Shown(bundled(teacher), documents, limit=50)
    check_invariants(align_flat(left.adapter, right.adapter, left.tokens, right.tokens, spans=lookup(left, right)), left, right)


@pytest.mark.parametrize("student", REAL_NAMES)
def test_real_pairs(student: str, real_tokenizer_folder: Path) -> None:
    left = Shown(real(real_tokenizer_folder, student), texts())
    for teacher in REAL_NAMES:
        if teacher != student:
            right = Shown(real(real_tokenizer_folder, teacher), texts())
            alignment = align_flat(left.adapter, right.adapter, left.tokens, right.tokens, spans=lookup(left, right))
            check_coverage(alignment, left, right)
            assert (alignment.student_chunk_id[~left.is_special] >= 0).all()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    documents=st.lists(TEXTS, min_size=1, max_size=4),
    pair=st.sampled_from(ALL_PAIRS),
    limits=st.tuples(*(st.one_of(st.none(), st.integers(0, 8)) for _ in range(2))),
    specials=st.tuples(st.booleans(), st.booleans()),
)
def test_any_text(
    documents: list[str], pair: tuple[str, str], limits: tuple[int | None, int | None], specials: tuple[bool, bool]
) -> None:
    left, right = (
        Shown(bundled(name), documents, limit=limit, add_special_tokens=added)
        for name, limit, added in zip(pair, limits, specials, strict=True)
    )
    alignment = align_flat(left.adapter, right.adapter, left.tokens, right.tokens, spans=lookup(left, right))
    check_invariants(alignment, left, right)
    if limits == (None, None):
        check_coverage(alignment, left, right)


def test_windows_between_shared_cuts_lose_nothing() -> None:
    documents = [text for text in texts()[30:60] if text]
    sides = [Shown(bundled(name), documents, add_special_tokens=False) for name in ("chatml_bpe", "spm_bpe", "unigram_nfkc")]
    student, teachers = sides[0], sides[1:]
    alignments = [
        align_flat(student.adapter, teacher.adapter, student.tokens, teacher.tokens, spans=lookup(student, teacher))
        for teacher in teachers
    ]
    cuts = shared_cuts(alignments, student.tokens.offsets, [teacher.tokens.offsets for teacher in teachers])
    for row, text in enumerate(documents):
        own = slice(*cuts.offsets[row : row + 2])
        for side, column in zip(sides, (cuts.student, *cuts.teachers), strict=True):
            places = column[own]
            assert (np.diff(places) > 0).all()
            assert places[-1] == side.tokens.lengths[row], "the end of a document is a cut"
        if all(alignment.route[row] == 0 for alignment in alignments):
            half = len(cuts.student[own]) // 2
            heads = [
                side.adapter.token_bytes(side.tokens.row(row)[: column[own][half]])[0].tobytes().lstrip()
                for side, column in zip(sides, (cuts.student, *cuts.teachers), strict=True)
            ]
            assert heads[0] == heads[1] == heads[2]
            assert text.encode().lstrip().startswith(heads[0])
