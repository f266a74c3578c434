"""TokenAligner on padded torch batches: fields, shapes, padding, truncation, specials, windows, refusals."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.unit.align.support import BUNDLED, HARD_TEXTS, Shown, bundled, lookup, real
from xtok.align import AlignmentBatch, AlignmentPair, TokenAligner
from xtok.align.lattice import align_flat, keep_chunks, shared_cuts
from xtok.errors import TokenizerError
from xtok.tokenizers import FlatTokens

DOCUMENTS = [*HARD_TEXTS, "The quick brown fox, 1234 jumps."]


def padded(side: Shown, *, pad_id: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [B, T], spans [B, T, 2], attention mask [B, T]) of the documents, padded on the right with two to spare."""
    counts = side.tokens.lengths
    ids = np.full((len(counts), counts.max() + 2), pad_id)
    spans, mask = np.zeros((*ids.shape, 2), dtype=np.int64), np.zeros_like(ids)
    for row, count in enumerate(counts):
        own = slice(*side.tokens.offsets[row : row + 2])
        ids[row, :count], spans[row, :count], mask[row, :count] = side.tokens.ids[own], side.spans[own], 1
    return torch.from_numpy(ids), torch.from_numpy(spans), torch.from_numpy(mask)


def load(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(BUNDLED / "tokenizers" / name))


@pytest.mark.parametrize(
    ("student", "teacher"), [("chatml_bpe", "spm_bpe"), ("spm_bpe", "wordpiece_lower"), ("unigram_nfkc", "chatml_bpe")]
)
def test_a_padded_batch_holds_the_flat_alignment(student: str, teacher: str) -> None:
    left, right = Shown(bundled(student), DOCUMENTS), Shown(bundled(teacher), DOCUMENTS)
    flat = align_flat(left.adapter, right.adapter, left.tokens, right.tokens, spans=lookup(left, right))
    (student_ids, student_spans, student_mask), (teacher_ids, teacher_spans, teacher_mask) = padded(left), padded(right)
    batch = TokenAligner(load(student), load(teacher)).align(
        student_ids,
        teacher_ids,
        student_offsets=student_spans,
        teacher_offsets=teacher_spans,
        student_attention_mask=student_mask,
        teacher_attention_mask=teacher_mask,
    )
    num_rows, most = len(DOCUMENTS), int(flat.num_chunks.max())
    for name, tensor in batch.as_dict().items():
        assert tensor.dtype == (torch.int64 if name.endswith(("chunk_id", "num_chunks")) else torch.bool), name
    assert batch.pair_valid.shape == batch.pair_is_correct.shape == (num_rows, most)
    assert batch.student_chunk_id.shape == batch.student_exact_partition_mask.shape == student_ids.shape
    assert batch.teacher_chunk_id.shape == batch.teacher_exact_partition_mask.shape == teacher_ids.shape
    assert torch.equal(batch.num_chunks, torch.from_numpy(flat.num_chunks))
    assert torch.equal(batch.pair_valid.sum(1), batch.num_chunks)
    assert batch.student_chunk_id[student_mask == 1].tolist() == flat.student_chunk_id.tolist()
    assert batch.teacher_chunk_id[teacher_mask == 1].tolist() == flat.teacher_chunk_id.tolist()
    assert (batch.student_chunk_id[student_mask == 0] == -1).all()
    assert not batch.teacher_exact_partition_mask[teacher_mask == 0].any()
    assert batch.pair_is_correct[batch.pair_valid].tolist() == flat.pair_is_correct.tolist()
    assert not (batch.pair_is_correct & ~batch.pair_valid).any()
    again = AlignmentBatch.from_flat(flat, left.tokens.offsets, right.tokens.offsets, student_ids.shape[1], teacher_ids.shape[1])
    for name, tensor in again.to("cpu").as_dict().items():
        assert torch.equal(tensor, batch.as_dict()[name]), name


def test_pairs_can_be_read(real_tokenizer_folder: Path) -> None:
    student, teacher = (Shown(real(real_tokenizer_folder, name), ["Hello 👩‍👩 world"]) for name in ("llama3_2", "mistral_v3_spm"))
    flat = align_flat(student.adapter, teacher.adapter, student.tokens, teacher.tokens)
    batch = AlignmentBatch.from_flat(flat, student.tokens.offsets, teacher.tokens.offsets, 32, 32)
    pairs = batch.pairs(0)
    assert pairs[0] == AlignmentPair(0, (0, 1), (0, 1), True), "BOS with BOS"
    assert pairs[-1].student[1] == len(student.tokens.ids)
    assert pairs[-1].teacher[1] == len(teacher.tokens.ids)
    for before, after in pairwise(pairs):
        assert before.student[1] == after.student[0]
        assert before.teacher[1] == after.teacher[0]


def test_an_empty_batch_and_empty_rows_have_one_pair_column() -> None:
    aligner = TokenAligner(load("chatml_bpe"), load("spm_bpe"))
    for num_rows in (0, 2):
        empty = torch.zeros((num_rows, 3), dtype=torch.int64)
        mask = torch.zeros_like(empty)
        batch = aligner.align(
            empty, empty, student_offsets=None, teacher_offsets=None, student_attention_mask=mask, teacher_attention_mask=mask
        )
        assert batch.pair_valid.shape == (num_rows, 1)
        assert not batch.pair_valid.any()
        assert batch.num_chunks.tolist() == [0] * num_rows


def test_specials_pair_by_role_and_one_sided_ones_do_not() -> None:
    student, teacher = bundled("chatml_bpe"), bundled("spm_bpe")
    content = [adapter.encode_flat(["one two three"]).ids for adapter in (student, teacher)]
    student_eos, teacher_eos, teacher_bos = student.eos_token_id, teacher.eos_token_id, teacher.bos_token_id
    ids = [np.append(content[0], student_eos), np.concatenate([[teacher_bos], content[1], [teacher_eos]])]
    flat = align_flat(student, teacher, *(FlatTokens(row.astype(np.int32), np.array([0, len(row)])) for row in ids))
    assert flat.teacher_chunk_id[0] == -1, "a BOS that only the teacher has"
    assert flat.student_chunk_id[-1] == flat.teacher_chunk_id[-1] == flat.num_chunks[0] - 1
    # Truncation leaves a tail without a chunk, and the EOS pair as it was.
    cut = np.concatenate([content[0][:2], [student_eos]]).astype(np.int32)
    whole = FlatTokens(ids[1].astype(np.int32), np.array([0, len(ids[1])]))
    flat = align_flat(student, teacher, FlatTokens(cut, np.array([0, len(cut)])), whole)
    assert flat.route.tolist() == [0]
    assert flat.student_chunk_id[-1] == flat.teacher_chunk_id[-1] == flat.num_chunks[0] - 1
    assert (flat.teacher_chunk_id[-3:-1] == -1).all()
    only_eos = FlatTokens(np.array([student_eos], dtype=np.int32), np.array([0, 1]))
    flat = align_flat(student, teacher, only_eos, whole)
    assert flat.student_chunk_id.tolist() == [0]
    assert flat.teacher_chunk_id.tolist() == [-1] * (len(ids[1]) - 1) + [0]


def test_a_window_without_the_dummy_prefix_verifies() -> None:
    sides = [
        Shown(bundled(name), ["one two three four five six"], add_special_tokens=False) for name in ("chatml_bpe", "spm_bpe")
    ]
    whole = align_flat(sides[0].adapter, sides[1].adapter, sides[0].tokens, sides[1].tokens)
    cuts = shared_cuts([whole], sides[0].tokens.offsets, [sides[1].tokens.offsets])
    middle = len(cuts.student) // 2
    windows = [
        FlatTokens(side.tokens.ids[at:], np.array([0, len(side.tokens.ids) - at]))
        for side, at in zip(sides, (cuts.student[middle], cuts.teachers[0][middle]), strict=True)
    ]
    window = align_flat(sides[0].adapter, sides[1].adapter, *windows)
    assert window.route.tolist() == [0]
    assert window.num_chunks[0] == whole.num_chunks[0] - middle - 1
    assert (window.student_chunk_id >= 0).all()


def test_kept_chunks_are_numbered_afresh() -> None:
    sides = [Shown(bundled(name), ["one two three", "four five"]) for name in ("chatml_bpe", "spm_bpe")]
    flat = align_flat(sides[0].adapter, sides[1].adapter, sides[0].tokens, sides[1].tokens)
    keep = np.ones(len(flat.pair_is_correct), dtype=bool)
    keep[flat.pair_offsets[:-1]] = False
    kept = keep_chunks(flat, keep, sides[0].tokens.offsets, sides[1].tokens.offsets)
    assert kept.num_chunks.tolist() == (flat.num_chunks - 1).tolist()
    for before, after in ((flat.student_chunk_id, kept.student_chunk_id), (flat.teacher_chunk_id, kept.teacher_chunk_id)):
        assert after.tolist() == np.maximum(before - 1, -1).tolist()


def test_refusals_say_what_is_wrong() -> None:
    aligner = TokenAligner(load("chatml_bpe"), load("spm_bpe"), projection_matrix_path="projection")
    assert aligner.projection_matrix_path == "projection"
    ids = torch.zeros((2, 3), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(1, 3\)"):
        aligner.align(ids, ids[:1], student_offsets=None, teacher_offsets=None)
    with pytest.raises(ValueError, match="student_attention_mask has shape"):
        aligner.align(ids, ids, student_offsets=None, teacher_offsets=None, student_attention_mask=ids[:, :2])
    with pytest.raises(ValueError, match="teacher_offsets has shape"):
        aligner.align(ids, ids, student_offsets=None, teacher_offsets=ids)
    with pytest.raises(TokenizerError, match="token id 9999999 is outside"):
        aligner.align(ids + 9_999_999, ids, student_offsets=None, teacher_offsets=None)
    with pytest.raises(TokenizerError, match="token id -1 is outside"):
        aligner.align(ids - 1, ids, student_offsets=None, teacher_offsets=None)


def test_a_slow_tokenizer_is_refused_by_name() -> None:
    class SlowTokenizer:
        name_or_path = "some/slow-model"
        is_fast = False

    with pytest.raises((TokenizerError, TypeError), match=r"slow-model|SlowTokenizer"):
        TokenAligner(SlowTokenizer(), load("spm_bpe"))  # type: ignore[arg-type]
