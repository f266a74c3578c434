"""The cross-tokenizer loss against the dense way: peak memory and time of one forward and backward."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

import torch

from xtok.losses.cross_tokenizer import CrossTokenizerDistillationConfig, CrossTokenizerDistillationLoss, HiddenLogits
from xtok.projection import Projection

NAME = "distillation"
DESCRIPTION = "P-KL with hidden states against dense logits, projection and one-hot chunks (T=2048, V=32k/32k, k=4, float32)"

TOKENS, HIDDEN, VOCAB, ENTRIES, TILE = 2048, 512, 32768, 4, 64


def _problem() -> tuple[dict[str, Any], Projection, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 4, (TOKENS,), generator=generator)
    student = torch.repeat_interleave(torch.arange(TOKENS), sizes)[:TOKENS]
    teacher = torch.repeat_interleave(torch.arange(TOKENS), sizes.flip(0))[:TOKENS]
    num_pairs = int(min(student.max(), teacher.max())) + 1
    student, teacher = (torch.where(x < num_pairs, x, -1)[None] for x in (student, teacher))
    ids = torch.randint(0, VOCAB, (1, TOKENS), generator=generator)
    batch = {
        "input_ids": ids, "token_mask": torch.ones_like(ids), "sample_mask": torch.ones(1),
        "teacher_0_input_ids": ids, "teacher_0_token_mask": torch.ones_like(ids),
        "alignment_0_student_chunk_id": student, "alignment_0_teacher_chunk_id": teacher,
        "alignment_0_pair_valid": torch.ones(1, num_pairs, dtype=torch.bool),
        "alignment_0_pair_is_correct": torch.ones(1, num_pairs, dtype=torch.bool),
    }  # fmt: skip
    indices = torch.full((VOCAB, ENTRIES), -1, dtype=torch.int32)
    indices[:, 0] = torch.randperm(VOCAB, generator=generator).int()
    weights = torch.zeros(VOCAB, ENTRIES)
    weights[:, 0] = 1.0
    split = torch.arange(0, VOCAB, 3)  # a third of the rows in pieces, as between production vocabularies
    falling = 0.9 * 0.1 ** torch.arange(ENTRIES)
    indices[split] = torch.stack([torch.randperm(VOCAB, generator=generator)[: len(split)] for _ in range(ENTRIES)], 1).int()
    weights[split] = falling / falling.sum()
    tensors = [torch.randn(*shape, generator=generator) * 0.05 for shape in [(1, TOKENS, HIDDEN), (VOCAB, HIDDEN)] * 2]
    return batch, Projection(indices, weights, "student", "teacher", VOCAB), tensors


def _tiled(batch: dict[str, Any], projection: Projection, tensors: list[torch.Tensor], topk: int | None) -> torch.Tensor:
    config = CrossTokenizerDistillationConfig(ce_weight=0.0, vocab_topk=topk, token_tile_size=TILE)
    loss_fn = CrossTokenizerDistillationLoss(config, [projection])
    counts = loss_fn.count_valid(batch)
    loss, _ = loss_fn(
        student_logits=HiddenLogits(tensors[0], tensors[1]),
        teacher_logits=[HiddenLogits(tensors[2], tensors[3])],
        batch=batch,
        num_valid_tokens=counts.num_valid_tokens,
        num_valid_chunks=counts.num_valid_chunks,
    )
    return loss


def _dense(batch: dict[str, Any], projection: Projection, tensors: list[torch.Tensor], topk: int | None) -> torch.Tensor:
    """The direct way: whole logits, whole projected probabilities, one-hot chunk matrices; mixture reduction."""
    student, teacher = (tensors[i][0] @ tensors[i + 1].T for i in (0, 2))
    row, column, weight = projection.entries()
    matrix = torch.sparse_coo_tensor(torch.stack([column, row]), weight, (VOCAB, VOCAB)).coalesce()
    projected = torch.sparse.mm(matrix, torch.softmax(student, -1).T).T
    columns = projection.reachable_columns()
    sides = [batch[f"alignment_0_{side}_chunk_id"][0] for side in ("student", "teacher")]
    num_pairs = batch["alignment_0_pair_valid"].shape[1]
    hot = [torch.nn.functional.one_hot(side.clamp_min(0), num_pairs).float() * (side >= 0)[:, None] for side in sides]
    valid = (hot[0][0] + hot[1][0]) == 0  # a chunk that holds position 0 has no predictor
    if topk is not None:
        largest = teacher[:-1].detach().amax(0)[columns].topk(min(topk, len(columns))).indices
        columns = columns[largest]
    p = projected[:-1, columns] / projected[:-1, columns].sum(-1, keepdim=True)
    q = torch.softmax(teacher[:-1, columns], -1)
    means = [h[1:].T @ x / h.sum(0)[:, None] for h, x in zip(hot, (p, q), strict=True)]
    p, q = (mean[valid].clamp_min(1e-30) for mean in means)
    return (q * (q.log() - p.log())).sum() / valid.sum()


def _measure(which: str, topk: int | None) -> None:
    """In a process of its own: print the loss, the seconds of the best of two runs, and the peak memory above the problem's own."""
    torch.set_num_threads(2)
    batch, projection, tensors = _problem()
    function = _tiled if which == "tiled" else _dense
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(2):
        for tensor in tensors[:2]:
            tensor.requires_grad_()
            tensor.grad = None
        start = time.perf_counter()
        loss = function(batch, projection, tensors, topk)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(float(loss.detach()), min(seconds), (peak - before) / 1024)


def run() -> list[dict[str, Any]]:
    """Ratios of time and of peak memory (MB above the inputs), tiled over dense, for the default and for all columns."""
    figures: list[dict[str, Any]] = []
    for label, topk in (("8192 columns", "8192"), ("all columns", "none")):
        measured = {}
        for which in ("tiled", "dense"):
            command = [sys.executable, "-m", "tests.bench.distillation", which, topk]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            measured[which] = [float(value) for value in output]
        difference = abs(measured["tiled"][0] - measured["dense"][0]) / abs(measured["dense"][0])
        figures.append(_figure(f"peak memory, {label}", measured, 2, "<= 0.125", "MB"))
        figures.append(_figure(f"forward + backward, {label}", measured, 1, "<= 1", "s"))
        figures.append(
            {
                "metric": f"relative difference of the loss, {label}",
                "value": difference,
                "baseline": None,
                "limit": "<= 1e-4",
                "unit": "",
            }
        )
    return figures


def _figure(metric: str, measured: dict[str, list[float]], place: int, limit: str, unit: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": measured["tiled"][place],
        "baseline": measured["dense"][place],
        "limit": limit,
        "unit": unit,
    }


if __name__ == "__main__":
    _measure(sys.argv[1], None if sys.argv[2] == "none" else int(sys.argv[2]))
