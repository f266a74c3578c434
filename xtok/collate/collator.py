"""The online path: raw rows in, one padded batch with every teacher's ids and alignment out.

Runs in DataLoader workers. Its numbers are those of the published shards, bit for bit: both tokenize through
`xtok.tokenizers`, render through `xtok.chat`, align through `xtok.align` and pad through `xtok.padding`. Aligning once, offline, is
what `flows.preprocess` is for; this is for small runs, and for trying things out.

Legend: B rows, Ts and Tt padded student and teacher lengths, P padded number of chunks.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from schemas.tables import reject_side
from xtok.align import AlignmentBatch
from xtok.batch import BatchedDataDict, DatumSpec
from xtok.chat import ChatRenderer, RenderedChatDocument, align_chats
from xtok.collate.chat import ChatSides, SideArguments, conversations_of, pad_chats, raise_refusals, teacher_arguments
from xtok.collate.config import CrossTokenizerCollatorConfig, check_aligner, check_config, check_per_teacher, whole_numbers
from xtok.collate.rows import row_numbers, sample_mask
from xtok.collate.text import text_of, tokenize_texts
from xtok.errors import ConfigError
from xtok.settings import whole_number
from xtok.tokenizers import adapt_tokenizer

if TYPE_CHECKING:
    from xtok.align import TokenAligner

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
_MAY_BE_NONE = (
    "make_seq_div_by_teachers",
    "add_special_tokens_teachers",
    "chat_template_kwargs_teachers",
    "allow_special_tokens_in_content_teachers",
    "accept_dropped_reasoning_teachers",
)


class CrossTokenizerCollator:
    """Tokenizes a batch for the student once, and tokenizes and aligns it for every teacher with a tokenizer of its own.

    config: mode and thinking options. student_tokenizer, teacher_tokenizers: fast transformers tokenizers, never modified; a
      teacher's may be None where it is the student's. aligners: one a teacher, None for a same-tokenizer teacher, which adds no key.
    ctx_length_student, ctx_length_teachers: tokens that a text is cut to, added specials kept and counted; text mode pads to it. A
      chat that is longer is refused, never cut; chat mode pads to the longest row.
    make_seq_div_by_student, make_seq_div_by_teachers: padded lengths are rounded up to multiples.
    add_special_tokens_student, add_special_tokens_teachers: text mode, whether a side gets the specials that its tokenizer adds by
      itself (default: all do).
    Chat mode only: drop_first_assistant_chunk_kl_by_teacher: whether a teacher's alignment leaves out the final message's first
      pair. render_date: the day that templates see (default: today, UTC). chat_template_kwargs_…: arguments of a side's template,
      under those of a row. allow_special_tokens_in_content_…, accept_dropped_reasoning_…: rows that a side then accepts. An entry
      a teacher in the `_teachers` ones; a teacher without an aligner is shown what the student is.

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
        render_date: datetime.date | None = None,
        chat_template_kwargs_student: Mapping[str, Any] | None = None,
        chat_template_kwargs_teachers: Sequence[Mapping[str, Any] | None] | None = None,
        allow_special_tokens_in_content_student: bool = False,
        allow_special_tokens_in_content_teachers: Sequence[bool] | None = None,
        accept_dropped_reasoning_student: bool = False,
        accept_dropped_reasoning_teachers: Sequence[bool] | None = None,
    ) -> None:
        check_config(config)
        per_teacher = {
            "aligners": aligners,
            "teacher_tokenizers": teacher_tokenizers,
            "ctx_length_teachers": ctx_length_teachers,
            "drop_first_assistant_chunk_kl_by_teacher": drop_first_assistant_chunk_kl_by_teacher,
            "make_seq_div_by_teachers": make_seq_div_by_teachers,
            "add_special_tokens_teachers": add_special_tokens_teachers,
            "chat_template_kwargs_teachers": chat_template_kwargs_teachers,
            "allow_special_tokens_in_content_teachers": allow_special_tokens_in_content_teachers,
            "accept_dropped_reasoning_teachers": accept_dropped_reasoning_teachers,
        }
        num_teachers = check_per_teacher(per_teacher, may_be_none=_MAY_BE_NONE)
        self.config = config
        self.student_tokenizer = student_tokenizer
        self.teacher_tokenizers = list(teacher_tokenizers)
        self.aligners = list(aligners)
        self.ctx_length_student = whole_number("ctx_length_student", ctx_length_student)
        self.ctx_length_teachers = whole_numbers("ctx_length_teachers", ctx_length_teachers)
        self.drop_first_assistant_chunk_kl_by_teacher = list(drop_first_assistant_chunk_kl_by_teacher)
        self.make_seq_div_by_student = whole_number("make_seq_div_by_student", make_seq_div_by_student, 1)
        divisors = [1] * num_teachers if make_seq_div_by_teachers is None else make_seq_div_by_teachers
        self.make_seq_div_by_teachers = whole_numbers("make_seq_div_by_teachers", divisors, 1)
        self.add_special_tokens_student = add_special_tokens_student
        self.add_special_tokens_teachers = list(
            [True] * num_teachers if add_special_tokens_teachers is None else add_special_tokens_teachers
        )
        self._check_sides()
        self._chat_sides = ChatSides(
            config,
            SideArguments(
                chat_template_kwargs_student or {}, allow_special_tokens_in_content_student, accept_dropped_reasoning_student
            ),
            teacher_arguments(
                self.aligners,
                chat_template_kwargs_student,
                chat_template_kwargs_teachers,
                allow_special_tokens_in_content_teachers,
                accept_dropped_reasoning_teachers,
            ),
            render_date,
        )
        if config.mode == "chat":
            self._renderers()  # a side without a usable template is told at once

    def __call__(self, batch: list[DatumSpec]) -> BatchedDataDict:
        """One batch of the rows of `batch`, in order. Raises RowRefused for the first row that cannot be used."""
        if not batch:
            raise ValueError("the batch is empty: there is nothing to collate")
        return self._call_chat(batch) if self.config.mode == "chat" else self._call_text(batch)

    def _call_text(self, batch: list[DatumSpec]) -> BatchedDataDict:
        numbers, weights = row_numbers(batch), sample_mask(batch)
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
            sample_mask=weights,
            idx=numbers,
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
            collated.update(_teacher_keys(index, ids, mask, mask, alignment))
        return collated

    def _render_document(
        self, tokenizer: PreTrainedTokenizerBase, datum: DatumSpec, ctx_length: int, side: str
    ) -> RenderedChatDocument:
        """One chat as one side is shown it. side: `student` or `teacher=<index>`. Raises RowRefused."""
        renderer = self._chat_sides.renderer(tokenizer, ctx_length, side)
        return self._chat_sides.locate([datum], conversations_of([datum]), renderer)[1][0]

    def _call_chat(self, batch: list[DatumSpec]) -> BatchedDataDict:
        """Render complete conversations and align their final assistant turns."""
        numbers, weights = row_numbers(batch), sample_mask(batch)
        conversations = conversations_of(batch)
        renderer, *teachers = self._renderers()
        assert renderer is not None, "the student is shown every chat"
        student, documents = self._chat_sides.locate(batch, conversations, renderer)
        ids, attention, mask = self._pad_documents(documents, renderer, self.make_seq_div_by_student)
        collated = BatchedDataDict(
            input_ids=ids,
            input_lengths=attention.sum(dim=1),
            token_mask=mask,
            sample_mask=weights,
            idx=numbers,
        )
        for index, renderer in enumerate(teachers):
            if renderer is None:
                continue
            teacher, documents = self._chat_sides.locate(batch, conversations, renderer)
            teacher_ids, attention, mask = self._pad_documents(documents, renderer, self.make_seq_div_by_teachers[index])
            aligned = align_chats(student, teacher, drop_first_chunk=self.drop_first_assistant_chunk_kl_by_teacher[index])
            raise_refusals(batch, aligned.refusals)
            alignment = AlignmentBatch.from_flat(
                aligned.flat, student.tokens.offsets, teacher.tokens.offsets, ids.shape[1], teacher_ids.shape[1]
            )
            collated.update(_teacher_keys(index, teacher_ids, attention, mask, alignment))
        return collated

    def _renderers(self) -> list[ChatRenderer | None]:
        """The student's, then one for each teacher, None for those without an aligner."""
        found: list[ChatRenderer | None] = [self._chat_sides.renderer(self.student_tokenizer, self.ctx_length_student, "student")]
        for index, (tokenizer, aligner) in enumerate(zip(self.teacher_tokenizers, self.aligners, strict=True)):
            if tokenizer is None or aligner is None:
                found.append(None)
            else:
                found.append(self._chat_sides.renderer(tokenizer, self.ctx_length_teachers[index], reject_side(index)))
        return found

    def _pad_documents(
        self, documents: list[RenderedChatDocument], renderer: ChatRenderer, divisor: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, attention mask and assistant mask, int64 [B, T]."""
        ids, attention, _, mask = self._pad_chat_batch(
            [document.input_ids.tolist() for document in documents],
            [document.offsets.tolist() for document in documents],
            [document.assistant_mask.tolist() for document in documents],
            renderer.side.adapter.pad_token_id,
            divisor,
        )
        return ids, attention, mask

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
        return pad_chats(ids_list, off_list, mask_list, pad_token_id, make_seq_div_by)

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
        sides = [("student", self.student_tokenizer, self.ctx_length_student, self.add_special_tokens_student)]
        for index, (tokenizer, aligner) in enumerate(zip(self.teacher_tokenizers, self.aligners, strict=True)):
            if aligner is None:
                continue
            if tokenizer is None:
                raise ConfigError(f"teacher_tokenizers[{index}] is None, but aligners[{index}] is not: such a teacher needs both")
            check_aligner(index, aligner, self.student_tokenizer, tokenizer)
            context = self.ctx_length_teachers[index]
            sides.append((f"teachers[{index}]", tokenizer, context, self.add_special_tokens_teachers[index]))
        for name, side_tokenizer, context, with_specials in sides:
            adapter = adapt_tokenizer(side_tokenizer)
            num_specials = len(adapter.prefix_ids) + len(adapter.suffix_ids) if with_specials else 0
            if context <= num_specials:
                raise ConfigError(
                    f"ctx_length_{name} is {context}: it must hold {num_specials} added special tokens and a token of text"
                )


def _teacher_keys(
    index: int, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor, alignment: AlignmentBatch
) -> dict[str, Any]:
    keys = {
        f"teacher_{index}_input_ids": ids,
        f"teacher_{index}_input_lengths": attention.sum(dim=1),
        f"teacher_{index}_token_mask": mask,
    }
    return keys | {f"alignment_{index}_{name}": getattr(alignment, name) for name in ALIGNMENT_FIELDS}
