"""The cross-tokenizer loss against its dense float64 oracle: values and gradients, every mode and reduction."""

from __future__ import annotations

import pytest
import torch

from tests.parity.distillation_problems import Problem, random_problem
from xtok.losses.cross_tokenizer import CrossTokenizerDistillationConfig, CrossTokenizerDistillationLoss, HiddenLogits

CASES = [
    {"mode": "p_kl", "chunk_reduction": "mixture"},
    {"mode": "p_kl", "chunk_reduction": "mixture", "reverse_kl": True, "temperature": 2.0},
    {"mode": "p_kl", "chunk_reduction": "geometric", "vocab_topk": None},
    {"mode": "p_kl", "chunk_reduction": "nemo", "temperature": 0.7},
    {"mode": "p_kl", "vocab_topk": 4},
    {"mode": "p_kl", "vocab_topk": 3, "chunk_reduction": "geometric", "exact_match_only": True},
    {"mode": "p_kl", "vocab_topk": 1, "chunk_reduction": "nemo"},
    {"mode": "gold", "temperature": 1.5},
    {"mode": "gold", "uncommon_topk": 2, "reverse_kl": True},
    {"mode": "h_kl"},
    {"mode": "h_kl", "uncommon_topk": 3, "exact_match_only": True},
    {"mode": "alm"},
    {"mode": "alm", "alm_temperature": 3.0},
]


def fast(problem: Problem, config: CrossTokenizerDistillationConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, chunks = problem.counts(config)
    student = problem.student.to(dtype).clone().requires_grad_()
    loss, _ = CrossTokenizerDistillationLoss(config, problem.projections)(
        student_logits=student,
        teacher_logits=[t.to(dtype) for t in problem.teachers],
        batch=problem.batch,
        num_valid_tokens=tokens,
        num_valid_chunks=chunks,
    )
    loss.backward()
    return loss.detach(), student.grad


@pytest.mark.parametrize("tile", [1, 5, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_value_and_gradient_equal_the_oracle(case: dict, tile: int) -> None:
    config = CrossTokenizerDistillationConfig(**case, token_tile_size=tile, ce_weight=0.3, teacher_weights=[1.0, 0.6])
    for seed in range(4):
        problem = random_problem(seed)
        want, want_gradient = problem.reference(config)
        got, gradient = fast(problem, config, torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_float32_stays_close_to_the_float64_oracle(case: dict) -> None:
    config = CrossTokenizerDistillationConfig(**case)
    problem = random_problem(11)
    problem.student = problem.student.float().double()
    problem.teachers = [t.float().double() for t in problem.teachers]
    want, want_gradient = problem.reference(config)
    got, gradient = fast(problem, config, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_hidden_logits_equal_logits(case: dict) -> None:
    config = CrossTokenizerDistillationConfig(**case, token_tile_size=4)
    problem = random_problem(3)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(*problem.student.shape[:2], 6, generator=generator, dtype=torch.float64)
    heads = [torch.randn(t.shape[-1], 6, generator=generator, dtype=torch.float64) for t in (problem.student, *problem.teachers)]
    hiddens = [torch.randn(*t.shape[:2], 6, generator=generator, dtype=torch.float64) for t in problem.teachers]
    tokens, chunks = problem.counts(config)
    loss_fn = CrossTokenizerDistillationLoss(config, problem.projections)
    results = []
    for as_hidden in (False, True):
        h, w = hidden.clone().requires_grad_(), heads[0].clone().requires_grad_()
        student = HiddenLogits(h, w) if as_hidden else h @ w.T
        teachers = [HiddenLogits(x, v) if as_hidden else x @ v.T for x, v in zip(hiddens, heads[1:], strict=True)]
        loss, _ = loss_fn(
            student_logits=student, teacher_logits=teachers, batch=problem.batch, num_valid_tokens=tokens, num_valid_chunks=chunks
        )
        loss.backward()
        results.append((loss.detach(), h.grad, w.grad))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
