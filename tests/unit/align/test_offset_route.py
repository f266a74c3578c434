"""Documents that a tokenizer changes: holes, shared spans, blanks, missing and wrong spans; and what is never called equal."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.align.support import HARD_TEXTS, Shown, bundled, lookup, real, texts
from xtok.align.lattice import OFFSET_ROUTE, SpanLookup, align_flat
from xtok.align.same_text import has_same_text, is_loosely_equal

DECOMPOSED = "Le cafe\u0301 de\u0301ja\u0300 vu, q\u0323\u0307 \u1112\u1161\u11ab\u1100\u116e\u11a8 fin."


def pairs_of(student: Shown, teacher: Shown, row: int = 0) -> list[tuple[bytes, bytes, bool]]:
    """(student bytes, teacher bytes, correct) of each chunk of a document."""
    alignment = align_flat(student.adapter, teacher.adapter, student.tokens, teacher.tokens, spans=lookup(student, teacher))
    assert alignment.route[row] == OFFSET_ROUTE
    found = []
    for chunk in range(alignment.num_chunks[row]):
        texts_of_chunk = []
        for side, chunk_id in ((student, alignment.student_chunk_id), (teacher, alignment.teacher_chunk_id)):
            tokens = slice(*side.tokens.offsets[row : row + 2])
            texts_of_chunk.append(side.adapter.token_bytes(side.tokens.ids[tokens][chunk_id[tokens] == chunk])[0].tobytes())
        found.append((*texts_of_chunk, bool(alignment.pair_is_correct[alignment.pair_offsets[row] + chunk])))
    return found


def test_a_composed_character_is_one_correct_chunk(real_tokenizer_folder: Path) -> None:
    student, teacher = (Shown(real(real_tokenizer_folder, name), ["cafe\u0301 noir"]) for name in ("qwen3", "llama3_2"))
    pairs = pairs_of(student, teacher)
    assert all(correct for _, _, correct in pairs)
    assert b"".join(one for one, _, _ in pairs).decode() == "caf\u00e9 noir"
    assert b"".join(other for _, other, _ in pairs).decode() == "cafe\u0301 noir"
    assert (b" noir", b" noir", True) in pairs


@pytest.mark.parametrize("teacher", ["llama3_2", "gpt_oss", "mistral_nemo", "deepseek_v4", "mistral_v3_spm"])
def test_nfc_pairs_cover_all_and_are_right(teacher: str, real_tokenizer_folder: Path) -> None:
    documents = [DECOMPOSED, "e\u0301", "ends in e\u0301", *(text for text in texts() if text)]
    student, other = (
        Shown(real(real_tokenizer_folder, "qwen3"), documents),
        Shown(real(real_tokenizer_folder, teacher), documents),
    )
    alignment = align_flat(student.adapter, other.adapter, student.tokens, other.tokens, spans=lookup(student, other))
    by_offset = np.repeat(alignment.route == OFFSET_ROUTE, student.tokens.lengths)
    assert by_offset.any()
    content = by_offset & ~student.is_special
    assert (alignment.student_chunk_id[content] >= 0).all()
    chunk = alignment.student_chunk_id + np.repeat(alignment.pair_offsets[:-1], student.tokens.lengths)
    assert alignment.pair_is_correct[chunk[content]].mean() >= 0.99


@pytest.mark.parametrize(
    ("student", "teacher"), [("chatml_bpe", "unigram_nfkc"), ("unigram_nfkc", "spm_bpe"), ("spm_bpe", "chatml_bpe")]
)
def test_normalizing_pairs_cover_all_and_are_right(student: str, teacher: str) -> None:
    changed = [DECOMPOSED, "a\n\nb  c\td\u00a0e ", "\uff46\uff55\uff4c\uff4c \ufb01ne"]
    documents = [text for text in texts()[len(HARD_TEXTS) :] if text] + changed
    left, right = Shown(bundled(student), documents), Shown(bundled(teacher), documents)
    alignment = align_flat(left.adapter, right.adapter, left.tokens, right.tokens, spans=lookup(left, right))
    content = ~left.is_special
    assert (alignment.student_chunk_id[content] >= 0).all()
    chunk = alignment.student_chunk_id + np.repeat(alignment.pair_offsets[:-1], left.tokens.lengths)
    assert alignment.pair_is_correct[chunk[content]].mean() >= 0.99


def test_wordpiece_covers_all_and_lower_case_is_not_equal() -> None:
    documents = ["The cat sat, on The mat.", "nothing changes here"]
    student, teacher = Shown(bundled("chatml_bpe"), documents), Shown(bundled("wordpiece_lower"), documents)
    alignment = align_flat(student.adapter, teacher.adapter, student.tokens, teacher.tokens, spans=lookup(student, teacher))
    assert (alignment.student_chunk_id[~student.is_special] >= 0).all()
    for one, other, correct in pairs_of(student, teacher):
        assert correct == (one.decode().replace(" ", "") == other.decode().replace("##", ""))
    assert any(not correct for _, _, correct in pairs_of(student, teacher))


def test_without_spans_only_roles_pair() -> None:
    documents = [DECOMPOSED, "plain"]
    student, teacher = Shown(bundled("spm_bpe"), documents), Shown(bundled("unigram_nfkc"), documents)
    missing = SpanLookup(*(np.zeros((side.tokens.offsets[1], 2), dtype=np.int32) for side in (student, teacher)))
    alignments = [
        align_flat(student.adapter, teacher.adapter, student.tokens, teacher.tokens, spans=spans)
        for spans in (None, lambda _: None, lambda _: missing)
    ]
    for alignment in alignments:
        assert alignment.route.tolist() == [1, 0]
        first = slice(*student.tokens.offsets[:2])
        assert (alignment.student_chunk_id[first][~student.is_special[first]] == -1).all()
        assert alignment.pair_is_correct.all()
    assert alignments[0].num_chunks.tolist() == alignments[1].num_chunks.tolist() == alignments[2].num_chunks.tolist()


def test_wrong_spans_are_never_believed() -> None:
    """Spans that point elsewhere may misplace chunks, but no chunk of unlike text is called correct."""
    student, teacher = Shown(bundled("chatml_bpe"), [DECOMPOSED]), Shown(bundled("unigram_nfkc"), [DECOMPOSED])
    teacher.spans[:] = np.where(teacher.spans[:, 1:] > 0, teacher.spans[::-1], 0)
    for one, other, correct in pairs_of(student, teacher):
        if correct:
            assert has_same_text(one, other, student_may_lack_blanks=True, teacher_may_lack_blanks=True)


def test_span_arrays_of_another_shape_are_refused() -> None:
    student, teacher = Shown(bundled("chatml_bpe"), [DECOMPOSED]), Shown(bundled("unigram_nfkc"), [DECOMPOSED])
    with pytest.raises(ValueError, match="student spans have shape"):
        align_flat(
            student.adapter,
            teacher.adapter,
            student.tokens,
            teacher.tokens,
            spans=lambda _: SpanLookup(student.spans[1:], teacher.spans),
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("_foo", " foo"),
        ("\t", "\n"),
        ("a\tb", "a\nb"),
        (" ,", ","),
        ("\\n", "\n"),
        ("Foo", "foo"),
        ("\u2581foo", " foo"),
        (" ", ""),
    ],
)
def test_text_equality_is_never_claimed(one: str, other: str) -> None:
    for left, right in ((one, other), (other, one)):
        assert not has_same_text(left.encode(), right.encode(), student_may_lack_blanks=False, teacher_may_lack_blanks=False)


@pytest.mark.parametrize(
    ("one", "other", "lacks"),
    [
        ("cafe\u0301", "caf\u00e9", False),
        ("\ufb01ne", "fine", False),
        ("\n\nfoo", " foo", False),
        (" foo", "foo", True),
        ("a  b", "a b", False),
    ],
)
def test_what_normalizers_do_is_equal(one: str, other: str, lacks: bool) -> None:
    for left, right in ((one, other), (other, one)):
        assert has_same_text(left.encode(), right.encode(), student_may_lack_blanks=lacks, teacher_may_lack_blanks=lacks)


def test_invalid_bytes_are_equal_only_to_themselves() -> None:
    assert not has_same_text(b"\xf0\x9f", b"\xf0\x9e", student_may_lack_blanks=True, teacher_may_lack_blanks=True)
    assert not has_same_text(b"\xf0\x9f", "\ufffd".encode(), student_may_lack_blanks=True, teacher_may_lack_blanks=True)


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="aAe\u0301\u00e9 \u00df\t\ud55c\u1112\u1161\u200d\ufb01\U0001f469", max_size=120),
    st.booleans(),
    st.integers(0, 300),
)
def test_loosely_equal_is_the_comparison_of_whole_texts(text: str, composed: bool, cut: int) -> None:
    """The look at the ends first, which spares most comparisons, changes nothing."""

    def whole(data: bytes) -> str:
        folded = unicodedata.normalize("NFKD", data.decode("utf-8", "ignore")).casefold()
        return "".join(char for char in folded if not char.isspace() and unicodedata.category(char)[0] not in "MC")

    long = text * 3
    other = unicodedata.normalize("NFC" if composed else "NFKD", long).upper()
    left, right = long.encode(), other.encode()[: cut or None]
    assert is_loosely_equal(left, right) == (whole(left) == whole(right))
    assert is_loosely_equal(right, left) == (whole(left) == whole(right))


def test_a_lone_blank_is_no_beginning_of_another_text() -> None:
    """One side made a blank of a no-break space, the other puts its dummy blank before it."""
    student, teacher = (Shown(bundled(name), ["\xa0"]) for name in ("unigram_nfkc", "spm_bpe"))
    assert len(pairs_of(student, teacher)) == 1
