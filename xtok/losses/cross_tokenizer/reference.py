"""The slow oracle: the cross-tokenizer loss written chunk by chunk, dense, in float64, from the formulas alone.

It shares no code with the fast path. Use it on small problems to check values and gradients.

Shapes: B samples, T student positions, U teacher positions, P pairs; V_s and V_t vocabularies; K compared columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig
from xtok.projection.projection import Projection

__all__ = ["reference_distillation_loss", "reference_valid_chunks"]

FLOOR = 1e-30
Chunk = tuple[int, list[int], list[int], float]  # sample, student positions, teacher positions, weight


def reference_valid_chunks(batch: Mapping[str, Any], teacher_index: int, *, exact_match_only: bool) -> list[Chunk]:
    """Every valid chunk of one teacher, by a loop over samples and pairs."""
    prefix = f"alignment_{teacher_index}_"
    chunks: list[Chunk] = []
    for sample in range(batch["input_ids"].shape[0]):
        weight = float(batch["sample_mask"][sample])
        if weight == 0:
            continue
        for pair in range(batch[prefix + "pair_valid"].shape[1]):
            student = [t for t, c in enumerate(batch[prefix + "student_chunk_id"][sample].tolist()) if c == pair]
            teacher = [u for u, c in enumerate(batch[prefix + "teacher_chunk_id"][sample].tolist()) if c == pair]
            if not bool(batch[prefix + "pair_valid"][sample, pair]) or not student or not teacher:
                continue
            if 0 in student or 0 in teacher or not all(bool(batch["token_mask"][sample, t]) for t in student):
                continue
            if exact_match_only and not bool(batch[prefix + "pair_is_correct"][sample, pair]):
                continue
            chunks.append((sample, student, teacher, weight))
    return chunks


def _dense_projection(projection: Projection) -> Tensor:
    dense = torch.zeros(projection.student_vocab_size, projection.teacher_vocab_size, dtype=torch.float64)
    for row in range(projection.student_vocab_size):
        for index, weight in zip(projection.indices[row].tolist(), projection.weights[row].tolist(), strict=True):
            if index >= 0:
                dense[row, index] += weight
    return dense


def _largest_columns(candidates: Tensor, teacher: Tensor, chunks_rows: list[tuple[int, int]], topk: int | None) -> Tensor:
    """`candidates` ids with the largest logit anywhere in the given (sample, row) places; ties to the lowest id; ascending."""
    if topk is None or topk >= len(candidates) or not chunks_rows:
        return candidates
    highest = torch.stack([teacher[b, u] for b, u in chunks_rows]).amax(dim=0)[candidates].tolist()
    order = sorted(range(len(candidates)), key=lambda i: (-highest[i], int(candidates[i])))[:topk]
    return candidates[torch.tensor(sorted(order), dtype=torch.int64)]


def _kl(config: CrossTokenizerDistillationConfig, log_teacher: Tensor, log_student: Tensor) -> Tensor:
    if config.reverse_kl:
        return (log_student.exp() * (log_student - log_teacher)).sum()
    return (log_teacher.exp() * (log_teacher - log_student)).sum()


def _p_kl(
    config: CrossTokenizerDistillationConfig, projection: Projection, student: Tensor, teacher: Tensor, chunks: list[Chunk]
) -> Tensor:
    dense = _dense_projection(projection)
    candidates = dense.sum(dim=0).nonzero().flatten()
    rows = [(b, u - 1) for b, _, teacher_positions, _ in chunks for u in teacher_positions]
    columns = _largest_columns(candidates, teacher, rows, config.vocab_topk)
    matrix = dense[:, columns]
    total = student.sum() * 0
    for b, student_positions, teacher_positions, weight in chunks:
        projected = torch.stack([torch.softmax(student[b, t - 1] / config.temperature, -1) @ matrix for t in student_positions])
        if float(projected.detach().sum()) == 0:
            continue
        log_q = torch.stack([torch.log_softmax(teacher[b, u - 1, columns] / config.temperature, -1) for u in teacher_positions])
        log_q = log_q.clamp_min(torch.tensor(FLOOR, dtype=torch.float64).log())
        log_p = (projected / projected.sum(-1, keepdim=True)).clamp_min(FLOOR).log()
        if config.chunk_reduction == "mixture":
            student_side, teacher_side = log_p.exp().mean(0).log(), log_q.exp().mean(0).log()
        elif config.chunk_reduction == "geometric":
            student_side, teacher_side = torch.log_softmax(log_p.mean(0), -1), torch.log_softmax(log_q.mean(0), -1)
        else:
            mean = projected.mean(0)
            student_side, teacher_side = (mean / mean.sum()).clamp_min(FLOOR).log(), log_q.mean(0)
        total = total + weight * _kl(config, teacher_side, student_side)
    return total * config.temperature**2


def reference_common_map(projection: Projection, *, strict: bool, threshold: float) -> list[tuple[int, int]]:
    """(student id, teacher id) pairs of the common map, ascending by student id."""
    claims: dict[int, tuple[float, int]] = {}
    for row in range(projection.student_vocab_size):
        entries = [
            (w, i)
            for i, w in zip(projection.indices[row].tolist(), projection.weights[row].tolist(), strict=True)
            if i >= 0 and w > 0
        ]
        if not entries:
            continue
        weight, index = max(entries, key=lambda entry: (entry[0], -entry[1]))
        allowed = len(entries) == 1 and abs(weight - 1) < 1e-6 if strict else weight >= threshold
        if allowed and (index not in claims or weight > claims[index][0]):
            claims[index] = (weight, row)
    return sorted((row, index) for index, (_, row) in claims.items())


def _common(
    config: CrossTokenizerDistillationConfig,
    projection: Projection,
    student: Tensor,
    teacher: Tensor,
    chunks: list[Chunk],
    *,
    strict: bool,
) -> Tensor:
    pairs = reference_common_map(projection, strict=strict, threshold=config.relaxed_threshold)
    student_common = torch.tensor([s for s, _ in pairs], dtype=torch.int64)
    teacher_common = torch.tensor([t for _, t in pairs], dtype=torch.int64)
    student_rest = torch.tensor(sorted(set(range(student.shape[-1])) - set(student_common.tolist())), dtype=torch.int64)
    teacher_rest = torch.tensor(sorted(set(range(teacher.shape[-1])) - set(teacher_common.tolist())), dtype=torch.int64)
    total = student.sum() * 0
    for b, student_positions, teacher_positions, weight in chunks:
        log_p = torch.stack([torch.log_softmax(student[b, t - 1] / config.temperature, -1) for t in student_positions]).mean(0)
        log_q = torch.stack([torch.log_softmax(teacher[b, u - 1] / config.temperature, -1) for u in teacher_positions]).mean(0)
        value = _kl(config, log_q[teacher_common], log_p[student_common])
        p = log_p[student_rest].exp().sort(descending=True).values[: config.uncommon_topk]
        q = log_q[teacher_rest].exp().sort(descending=True).values[: config.uncommon_topk]
        length = max(len(p), len(q))
        p, q = (torch.nn.functional.pad(x, (0, length - len(x))) for x in (p, q))
        total = total + weight * (value + (p - q).abs().sum())
    return total * config.temperature**2


def _alm(
    config: CrossTokenizerDistillationConfig,
    student: Tensor,
    teacher: Tensor,
    batch: Mapping[str, Any],
    teacher_index: int,
    chunks: list[Chunk],
) -> Tensor:
    total = student.sum() * 0
    for b, student_positions, teacher_positions, weight in chunks:
        student_ids, teacher_ids = batch["input_ids"][b], batch[f"teacher_{teacher_index}_input_ids"][b]
        x = torch.stack([torch.log_softmax(student[b, t - 1], -1)[student_ids[t]] for t in student_positions]).sum()
        y = torch.stack([torch.log_softmax(teacher[b, u - 1], -1)[teacher_ids[u]] for u in teacher_positions]).sum()
        x, y = ((v / config.alm_temperature).exp().clamp(config.alm_epsilon, 1 - config.alm_epsilon) for v in (x, y))
        total = total + weight * (y * (y / x).log() + (1 - y) * ((1 - y) / (1 - x)).log())
    return total


def _same_tokenizer(
    config: CrossTokenizerDistillationConfig, student: Tensor, teacher: Tensor, batch: Mapping[str, Any]
) -> Tensor:
    places = _supervised(batch)
    columns = _largest_columns(torch.arange(student.shape[-1]), teacher, [(b, t - 1) for b, t, _ in places], config.vocab_topk)
    total = student.sum() * 0
    for b, t, weight in places:
        log_p = torch.log_softmax(student[b, t - 1, columns] / config.temperature, -1)
        log_q = torch.log_softmax(teacher[b, t - 1, columns] / config.temperature, -1)
        total = total + weight * _kl(config, log_q, log_p)
    return total * config.temperature**2


def _supervised(batch: Mapping[str, Any]) -> list[tuple[int, int, float]]:
    rows, length = batch["input_ids"].shape
    weight = [[float(batch["token_mask"][b, t]) * float(batch["sample_mask"][b]) for t in range(length)] for b in range(rows)]
    return [(b, t, weight[b][t]) for b in range(rows) for t in range(1, length) if weight[b][t] != 0]


def reference_distillation_loss(
    config: CrossTokenizerDistillationConfig,
    projections: Sequence[Projection | None],
    *,
    student_logits: Tensor,
    teacher_logits: Sequence[Tensor],
    batch: Mapping[str, Any],
    num_valid_tokens: float,
    num_valid_chunks: Sequence[float | None],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Total, one KD per teacher (normalized, unweighted), and CE; float64; fixed weights and `sum` only, no dynamic scaling."""
    student = student_logits.double()
    vocab_size = next((p.student_vocab_size for p in projections if p is not None), student.shape[-1])
    student = student[..., :vocab_size]
    losses = []
    for index, (projection, mode) in enumerate(zip(projections, config.modes(len(projections)), strict=True)):
        teacher = teacher_logits[index].double()
        if projection is None:
            value, count = _same_tokenizer(config, student, teacher[..., :vocab_size], batch), num_valid_tokens
        else:
            teacher = teacher[..., : projection.teacher_vocab_size]
            chunks = reference_valid_chunks(batch, index, exact_match_only=config.exact_match_only)
            count = float(num_valid_chunks[index] or 0)
            if mode == "p_kl":
                value = _p_kl(config, projection, student, teacher, chunks)
            elif mode == "alm":
                value = _alm(config, student, teacher, batch, index, chunks)
            else:
                value = _common(config, projection, student, teacher, chunks, strict=mode == "gold")
        losses.append(value / count if count else value * 0)
    ce = student.sum() * 0
    for b, t, weight in _supervised(batch):
        ce = ce - weight * torch.log_softmax(student[b, t - 1], -1)[batch["input_ids"][b, t]]
    ce = ce / num_valid_tokens if num_valid_tokens else ce * 0
    weights = config.teacher_weights or [1.0] * len(losses)
    kd = sum((w * loss for w, loss in zip(weights, losses, strict=True)), student.sum() * 0)
    return config.kd_weight * kd + config.ce_weight * ce, losses, ce
