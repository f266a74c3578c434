"""TokenAligner: alignment of padded torch batches, by the same code that makes the shards.

Shape legend: B = rows, Ts, Tt = padded student and teacher lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from xtok.align.batch import AlignmentBatch
from xtok.align.byte_readings import document_ranges
from xtok.align.cuts import IntArray
from xtok.align.lattice import SpanLookup, align_flat
from xtok.tokenizers import FlatTokens, adapt_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenAligner"]


class TokenAligner:
    """Aligns a student's and a teacher's tokenizations of the same texts.

    student, teacher: the adapted tokenizers. projection_matrix_path: carried for the loss, not read here.
    """

    def __init__(
        self,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        projection_matrix_path: str | Path | None = None,
    ) -> None:
        """student_tokenizer, teacher_tokenizer: fast Hugging Face tokenizers, left as they are; TokenizerError names a slow one."""
        self.student = adapt_tokenizer(student_tokenizer)
        self.teacher = adapt_tokenizer(teacher_tokenizer)
        self.projection_matrix_path = projection_matrix_path

    def align(
        self,
        student_ids: torch.Tensor,
        teacher_ids: torch.Tensor,
        *,
        student_offsets: torch.Tensor | None,
        teacher_offsets: torch.Tensor | None,
        student_attention_mask: torch.Tensor | None = None,
        teacher_attention_mask: torch.Tensor | None = None,
    ) -> AlignmentBatch:
        """Align B rows.

        student_ids: integer [B, Ts], teacher_ids: integer [B, Tt], as shown to the models (specials and padding included).
        student_offsets: integer [B, Ts, 2], teacher_offsets: integer [B, Tt, 2], half-open character spans, (0, 0) on specials
        and padding; used only for rows whose bytes do not verify. None means unknown: such rows keep role pairs only. Attention
        masks: [B, T], 0 marks padding (on either end); None means that there is no padding. Returns CPU tensors; see
        `AlignmentBatch`. ValueError for shapes that do not fit, TokenizerError for ids that a tokenizer does not have.
        """
        if student_ids.ndim != 2 or teacher_ids.ndim != 2 or len(student_ids) != len(teacher_ids):
            raise ValueError(
                f"student_ids {tuple(student_ids.shape)} and teacher_ids {tuple(teacher_ids.shape)} must be [B, T] with the same B"
            )
        student, student_places = _flat(student_ids, student_attention_mask, "student_attention_mask")
        teacher, teacher_places = _flat(teacher_ids, teacher_attention_mask, "teacher_attention_mask")
        student_spans = _spans(student_offsets, student_ids, "student_offsets")
        teacher_spans = _spans(teacher_offsets, teacher_ids, "teacher_offsets")

        def spans(rows: IntArray) -> SpanLookup | None:
            if student_spans is None or teacher_spans is None:
                return None
            return SpanLookup(
                student_spans[student_places[document_ranges(student.offsets, rows)[0]]],
                teacher_spans[teacher_places[document_ranges(teacher.offsets, rows)[0]]],
            )

        alignment = align_flat(self.student, self.teacher, student, teacher, spans=spans)
        return AlignmentBatch.from_flat(
            alignment,
            student.offsets,
            teacher.offsets,
            student_ids.shape[1],
            teacher_ids.shape[1],
            student_places=student_places,
            teacher_places=teacher_places,
        )


def _flat(ids: torch.Tensor, mask: torch.Tensor | None, name: str) -> tuple[FlatTokens, IntArray]:
    """(the real tokens of all rows, int64 [N]: place of each in the flattened [B, T])."""
    num_rows, length = ids.shape
    flat = ids.detach().cpu().numpy().reshape(-1)
    if mask is None:
        places = np.arange(len(flat))
        counts = np.full(num_rows, length, dtype=np.int64)
    else:
        if mask.shape != ids.shape:
            raise ValueError(f"{name} has shape {tuple(mask.shape)} for ids of shape {tuple(ids.shape)}")
        is_real = mask.detach().cpu().numpy() != 0
        places = np.flatnonzero(is_real)
        counts = np.count_nonzero(is_real, axis=1)
        flat = flat[places]
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    if len(flat) and (int(flat.min()) < -(2**31) or int(flat.max()) >= 2**31):
        raise ValueError(f"token ids reach {int(flat.max())}: no tokenizer has such ids")
    return FlatTokens(flat.astype(np.int32), offsets), places


def _spans(offsets: torch.Tensor | None, ids: torch.Tensor, name: str) -> npt.NDArray[np.integer] | None:
    """[B * T, 2]."""
    if offsets is None:
        return None
    if offsets.shape != (*ids.shape, 2):
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}, not {(*ids.shape, 2)}: one (start, end) a token")
    flat: npt.NDArray[np.integer] = offsets.detach().cpu().numpy().reshape(-1, 2)
    return flat
