"""Random small distillation problems: batches with ragged chunks, masks, one-token samples, tokens at position 0, no valid chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer import CrossTokenizerDistillationConfig, CrossTokenizerDistillationLoss
from xtok.losses.cross_tokenizer.reference import reference_distillation_loss
from xtok.projection import Projection


@dataclass
class Problem:
    """One batch with a cross-tokenizer teacher 0 and a same-tokenizer teacher 1."""

    batch: dict[str, Any]
    projections: list[Projection | None]
    student: Tensor
    teachers: list[Tensor]

    def counts(self, config: CrossTokenizerDistillationConfig) -> tuple[float, list[float | None]]:
        """N_t and N_c of this batch alone."""
        counted = CrossTokenizerDistillationLoss(config, self.projections).count_valid(self.batch)
        return float(counted.num_valid_tokens), [None if c is None else float(c) for c in counted.num_valid_chunks]

    def reference(
        self, config: CrossTokenizerDistillationConfig, *, counts: tuple[float, list[float | None]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Value and student gradient of the oracle, float64."""
        student = self.student.double().clone().requires_grad_()
        tokens, chunks = counts or self.counts(config)
        total, _, _ = reference_distillation_loss(
            config,
            self.projections,
            student_logits=student,
            teacher_logits=self.teachers,
            batch=self.batch,
            num_valid_tokens=tokens,
            num_valid_chunks=chunks,
        )
        total.backward()
        return total.detach(), student.grad


def random_projection(generator: torch.Generator, student_vocab: int, teacher_vocab: int, k: int = 3) -> Projection:
    """Rows with one entry, several entries, or none."""
    indices = torch.full((student_vocab, k), -1, dtype=torch.int32)
    weights = torch.zeros(student_vocab, k)
    for row in range(student_vocab):
        num = int(torch.randint(0, k + 1, (), generator=generator))
        num = 1 if row % 2 == 0 else num
        indices[row, :num] = torch.randperm(teacher_vocab, generator=generator)[:num].int()
        raw = 0.9 * 0.1 ** torch.arange(num)
        weights[row, :num] = raw / raw.sum() if num else raw
    return Projection(indices, weights, "student", "teacher", teacher_vocab)


def _chunks(
    generator: torch.Generator, student_length: int, teacher_length: int, width: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk ids of both sides by random runs of 1-3 tokens, with gaps of -1; pair_is_correct."""
    student, teacher = torch.full((width[0],), -1), torch.full((width[1],), -1)
    at = [0, 0]
    chunk = 0
    while at[0] < student_length and at[1] < teacher_length:
        sizes = [int(torch.randint(1, 4, (), generator=generator)) for _ in range(2)]
        if float(torch.rand((), generator=generator)) < 0.8:
            student[at[0] : min(at[0] + sizes[0], student_length)] = chunk
            teacher[at[1] : min(at[1] + sizes[1], teacher_length)] = chunk
            chunk += 1
        at = [at[0] + sizes[0], at[1] + sizes[1]]
    return student, teacher, torch.rand(chunk, generator=generator) < 0.7


def random_problem(
    seed: int, *, batch_size: int = 3, student_vocab: int = 13, teacher_vocab: int = 11, masked: bool = True
) -> Problem:
    """A problem whose last sample has one token and whose head has columns beyond both vocabularies."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        (int(torch.randint(8, 26, (), generator=generator)), int(torch.randint(8, 26, (), generator=generator)))
        for _ in range(batch_size)
    ]
    lengths[-1] = (1, 1)
    width = max(s for s, _ in lengths), max(t for _, t in lengths)
    rows = [_chunks(generator, s, t, width) for s, t in lengths]
    num_pairs = max(1, max(len(correct) for _, _, correct in rows))
    pair = lambda values: torch.stack([torch.nn.functional.pad(v, (0, num_pairs - len(v))) for v in values])  # noqa: E731
    token_mask = torch.stack([(torch.arange(width[0]) < s).long() for s, _ in lengths])
    sample_mask = torch.ones(batch_size)
    if masked:
        token_mask *= (torch.rand(token_mask.shape, generator=generator) < 0.85).long()
        sample_mask[0] = 0.5
    projection = random_projection(generator, student_vocab, teacher_vocab)
    batch = {
        "input_ids": torch.randint(0, student_vocab, (batch_size, width[0]), generator=generator),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "teacher_0_input_ids": torch.randint(0, teacher_vocab, (batch_size, width[1]), generator=generator),
        "teacher_0_token_mask": torch.stack([(torch.arange(width[1]) < t).long() for _, t in lengths]),
        "alignment_0_student_chunk_id": torch.stack([s for s, _, _ in rows]),
        "alignment_0_teacher_chunk_id": torch.stack([t for _, t, _ in rows]),
        "alignment_0_pair_valid": pair([torch.ones_like(c) for _, _, c in rows]),
        "alignment_0_pair_is_correct": pair([c for _, _, c in rows]),
    }
    logits = lambda length, vocab: 2 * torch.randn(batch_size, length, vocab + 2, generator=generator, dtype=torch.float64)  # noqa: E731
    student = logits(width[0], student_vocab)
    return Problem(batch, [projection, None], student, [logits(width[1], teacher_vocab), logits(width[0], student_vocab)])
