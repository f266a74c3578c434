"""The online path: raw rows in, one padded batch with every teacher's ids and alignment out.

Runs in DataLoader workers. Its numbers are those of the published shards, bit for bit: both tokenize through
`xtok.tokenizers`, align through `xtok.align` and pad through `xtok.padding`. Aligning once, offline, is what `flows.preprocess`
is for; this is for small runs, and for trying things out.

Legend: B rows, Ts and Tt padded student and teacher lengths, P padded number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from schemas.tables import reject_side
from xtok.batch import BatchedDataDict, DatumSpec
from xtok.collate.config import CrossTokenizerCollatorConfig, check_config
from xtok.collate.text import place_spans, text_of, tokenize_texts
from xtok.errors import ConfigError
from xtok.padding import PaddedLayout
from xtok.tokenizers import adapt_tokenizer

if TYPE_CHECKING:
    from xtok.align import AlignmentBatch, TokenAligner
    from xtok.chat import RenderedChatDocument

__all__ = ["ALIGNMENT_FIELDS", "CrossTokenizerCollator"]

ALIGNMENT_FIELDS = (
    "pair_valid",
    "pair_is_correct",
    "student_exact_partition_mask",
    "teacher_exact_partition_mask",
    "student_chunk_id",
    "teacher_chunk_id",
    "num_chunks",
)
_CHAT_MISSING = (
    "mode='chat' is not available in this collator yet: use mode='text', or preprocess the chats offline with flows.preprocess"
)


class CrossTokenizerCollator:
    """Tokenizes a batch for the student once, and tokenizes and aligns it for every teacher with a tokenizer of its own.

    config: mode and thinking options. student_tokenizer, teacher_tokenizers: fast transformers tokenizers, never modified; a
      teacher's may be None where it is the student's. aligners: one a teacher, None for a same-tokenizer teacher, which adds no key.
    ctx_length_student, ctx_length_teachers: tokens that a row is cut to, added specials kept and counted; text mode pads to it.
    drop_first_assistant_chunk_kl_by_teacher: chat mode, one flag a teacher. make_seq_div_by_student, make_seq_div_by_teachers:
      padded lengths are rounded up to multiples. add_special_tokens_student, add_special_tokens_teachers: text mode, whether a
      side gets the specials that its tokenizer adds by itself (default: all do).

    Calling it with a list of `DatumSpec` returns a BatchedDataDict: input_ids, input_lengths, token_mask int64, sample_mask
    float32, idx (list of int), and for every cross-tokenizer teacher i teacher_{i}_input_ids, teacher_{i}_input_lengths,
    teacher_{i}_token_mask and alignment_{i}_<field of AlignmentBatch>.

    Raises ValueError naming the argument; calling it raises RowRefused for a row that offline would be a counted reject.
    """

    def __init__(
        self,
        *,
        config: CrossTokenizerCollatorConfig,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizers: Sequence[PreTrainedTokenizerBase | None],
        aligners: Sequence[TokenAligner | None],
        ctx_length_student: int,
        ctx_length_teachers: Sequence[int],
        drop_first_assistant_chunk_kl_by_teacher: Sequence[bool],
        make_seq_div_by_student: int = 1,
        make_seq_div_by_teachers: Sequence[int] | None = None,
        add_special_tokens_student: bool = True,
        add_special_tokens_teachers: Sequence[bool] | None = None,
    ) -> None:
        num_teachers = len(aligners)
        check_config(config)
        per_teacher = {
            "teacher_tokenizers": teacher_tokenizers,
            "ctx_length_teachers": ctx_length_teachers,
            "drop_first_assistant_chunk_kl_by_teacher": drop_first_assistant_chunk_kl_by_teacher,
            "make_seq_div_by_teachers": make_seq_div_by_teachers,
            "add_special_tokens_teachers": add_special_tokens_teachers,
        }
        for name, values in per_teacher.items():
            if values is not None and len(values) != num_teachers:
                raise ConfigError(f"{name} has {len(values)} entries for {num_teachers} aligners: give one for each teacher")
        self.config = config
        self.student_tokenizer = student_tokenizer
        self.teacher_tokenizers = list(teacher_tokenizers)
        self.aligners = list(aligners)
        self.ctx_length_student = ctx_length_student
        self.ctx_length_teachers = list(ctx_length_teachers)
        self.drop_first_assistant_chunk_kl_by_teacher = list(drop_first_assistant_chunk_kl_by_teacher)
        self.make_seq_div_by_student = make_seq_div_by_student
        self.make_seq_div_by_teachers = list(make_seq_div_by_teachers or [1] * num_teachers)
        self.add_special_tokens_student = add_special_tokens_student
        self.add_special_tokens_teachers = list(
            [True] * num_teachers if add_special_tokens_teachers is None else add_special_tokens_teachers
        )
        self._check_sides()

    def __call__(self, batch: list[DatumSpec]) -> BatchedDataDict:
        """One batch of the rows of `batch`, in order. Raises RowRefused for the first row that cannot be used."""
        if not batch:
            raise ValueError("the batch is empty: there is nothing to collate")
        return self._call_chat(batch) if self.config.mode == "chat" else self._call_text(batch)

    def _call_text(self, batch: list[DatumSpec]) -> BatchedDataDict:
        texts = [text_of(datum) for datum in batch]
        student_ids, student_mask, student_offsets = self._tokenize_batch(
            texts,
            self.student_tokenizer,
            self.ctx_length_student,
            self.make_seq_div_by_student,
            add_special_tokens=self.add_special_tokens_student,
        )
        collated = BatchedDataDict(
            input_ids=student_ids,
            input_lengths=student_mask.sum(dim=1),
            token_mask=student_mask,
            sample_mask=torch.tensor([datum.get("loss_multiplier", 1.0) for datum in batch], dtype=torch.float32),
            idx=[int(datum["idx"]) for datum in batch],
        )
        for index, (tokenizer, aligner) in enumerate(zip(self.teacher_tokenizers, self.aligners, strict=True)):
            if tokenizer is None or aligner is None:
                continue
            ids, mask, offsets = self._tokenize_batch(
                texts,
                tokenizer,
                self.ctx_length_teachers[index],
                self.make_seq_div_by_teachers[index],
                add_special_tokens=self.add_special_tokens_teachers[index],
                side=reject_side(index),
            )
            alignment = aligner.align(
                student_ids,
                ids,
                student_offsets=student_offsets,
                teacher_offsets=offsets,
                student_attention_mask=student_mask,
                teacher_attention_mask=mask,
            )
            collated.update(_teacher_keys(index, ids, mask, alignment))
        return collated

    def _render_document(
        self, tokenizer: PreTrainedTokenizerBase, datum: DatumSpec, ctx_length: int, side: str
    ) -> RenderedChatDocument:
        raise ConfigError(_CHAT_MISSING)

    def _call_chat(self, batch: list[DatumSpec]) -> BatchedDataDict:
        raise ConfigError(_CHAT_MISSING)

    @staticmethod
    def _pad_chat_batch(
        ids_list: list[list[int]],
        off_list: list[list[tuple[int, int]]],
        mask_list: list[list[int]],
        pad_token_id: int,
        make_seq_div_by: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pad to the longest row, rounded up to a multiple of `make_seq_div_by`.

        Returns ids, attention mask, offsets [B, T, 2] and assistant mask, all int64; padding has attention 0, offset (0, 0) and
        assistant mask 0.
        """
        lengths = [len(ids) for ids in ids_list]
        for name, rows in (("off_list", off_list), ("mask_list", mask_list)):
            if [len(row) for row in rows] != lengths:
                raise ValueError(f"{name} has rows of {[len(row) for row in rows]} tokens, ids_list of {lengths}")
        layout = PaddedLayout(lengths, divisor=make_seq_div_by)
        ids = layout.place([np.array(row, dtype=np.int64) for row in ids_list], pad_token_id, np.int64)
        mask = layout.place([np.array(row, dtype=np.int64) for row in mask_list], 0, np.int64)
        spans = [np.array(row, dtype=np.int64).reshape(-1, 2) for row in off_list]
        return ids, layout.real(np.int64), place_spans(layout, spans), mask

    @staticmethod
    def _tokenize_batch(
        texts: list[str],
        tokenizer: PreTrainedTokenizerBase,
        ctx_length: int,
        make_seq_div_by: int,
        *,
        add_special_tokens: bool = True,
        side: str = "student",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokenize, cut to `ctx_length` as Hugging Face does (added specials kept) and pad to it, rounded up to the divisor.

        Returns ids [B, T], attention mask [B, T] and character offsets [B, T, 2], int64; specials and padding have offset (0, 0).
        side: named in RowRefused, which is raised for a text without any token of its own.
        """
        return tokenize_texts(texts, tokenizer, ctx_length, make_seq_div_by, add_special_tokens=add_special_tokens, side=side)

    def _check_sides(self) -> None:
        student = self.ctx_length_student, self.make_seq_div_by_student, self.add_special_tokens_student
        sides = [("student", self.student_tokenizer, *student)]
        for index, (tokenizer, aligner) in enumerate(zip(self.teacher_tokenizers, self.aligners, strict=True)):
            if aligner is None:
                continue
            if tokenizer is None:
                raise ConfigError(f"teacher_tokenizers[{index}] is None, but aligners[{index}] is not: such a teacher needs both")
            context, divisor = self.ctx_length_teachers[index], self.make_seq_div_by_teachers[index]
            sides.append((f"teachers[{index}]", tokenizer, context, divisor, self.add_special_tokens_teachers[index]))
        for name, side_tokenizer, context, divisor, with_specials in sides:
            if divisor < 1:
                raise ConfigError(f"make_seq_div_by_{name} must be at least 1, got {divisor}")
            adapter = adapt_tokenizer(side_tokenizer)
            num_specials = len(adapter.prefix_ids) + len(adapter.suffix_ids) if with_specials else 0
            if context <= num_specials:
                raise ConfigError(
                    f"ctx_length_{name} is {context}: it must hold {num_specials} added special tokens and a token of text"
                )


def _teacher_keys(index: int, ids: torch.Tensor, mask: torch.Tensor, alignment: AlignmentBatch) -> dict[str, Any]:
    keys = {
        f"teacher_{index}_input_ids": ids,
        f"teacher_{index}_input_lengths": mask.sum(dim=1),
        f"teacher_{index}_token_mask": mask,
    }
    return keys | {f"alignment_{index}_{name}": getattr(alignment, name) for name in ALIGNMENT_FIELDS}
