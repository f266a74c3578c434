"""DSpark objective against its dense fp64 oracle: values, gradients, numerical contract, mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from xtok.losses.dspark import DSparkLossStats, dspark_projected_vocab_parallel_loss
from xtok.losses.dspark_reference import dense_dspark

GRAD_NAMES = ("student_hidden", "bias_features", "bias_weight", "confidence_logits")
NUM_BINS = 3


@dataclasses.dataclass
class Case:
    """Random inputs of one call; `arguments()` makes fresh leaves."""

    tensors: dict[str, Tensor]
    names: tuple[str, ...]

    def arguments(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        out = {}
        for name in self.names:
            tensor = self.tensors[name].clone()
            out[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() and name != "mask" else tensor
        return {name: t.requires_grad_(name in GRAD_NAMES) for name, t in out.items()}


def make_case(num_rows: int, hidden: int, vocab: int, *, bias: bool = True, confidence: bool = True, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "student_hidden": normal(num_rows, hidden),
        "output_weight": normal(vocab, hidden) / hidden**0.5 * 2,
        "teacher_logits": normal(num_rows + 3, vocab) * 2,
        "teacher_rows": torch.randint(0, num_rows + 3, (num_rows,), generator=generator),
        "target_ids": torch.randint(0, vocab, (num_rows,), generator=generator),
        "mask": torch.randint(0, 3, (num_rows,), generator=generator) / 2,
        "bin_ids": torch.randint(0, NUM_BINS, (num_rows,), generator=generator),
        "bias_features": normal(num_rows, 5),
        "bias_weight": normal(vocab, 5),
        "confidence_logits": normal(num_rows),
    }
    skipped = set() if bias else {"bias_features", "bias_weight"}
    skipped |= set() if confidence else {"confidence_logits"}
    return Case(tensors, tuple(name for name in tensors if name not in skipped))


def terms(stats: Any) -> list[Tensor]:
    parts = [stats.cross_entropy, stats.l1_distance, stats.confidence]
    return [getattr(part, "numerators", part) for part in parts if part is not None]


def call(arguments: dict[str, Any], **settings: Any) -> DSparkLossStats:
    return dspark_projected_vocab_parallel_loss(**arguments, weights=torch.ones(NUM_BINS), **settings)


def dense(arguments: dict[str, Any]) -> Any:
    teacher = arguments["teacher_logits"][arguments["teacher_rows"]]
    rest = {k: v for k, v in arguments.items() if k not in ("teacher_rows", "teacher_logits")}
    return dense_dspark(**rest, teacher_logits=teacher, num_bins=NUM_BINS)


def gradients(stats: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Different upstream scalars per term and bin, so that no term can stand in for another."""
    coefficients = torch.tensor([[1.0, -0.5, 2.0], [0.3, 1.7, -1.1], [0.9, 0.2, 0.4]], dtype=torch.float64)
    loss = sum((value.double() * c).sum() for value, c in zip(terms(stats), coefficients, strict=False))
    names = [name for name in GRAD_NAMES if name in arguments]
    return dict(zip(names, torch.autograd.grad(loss, [arguments[n] for n in names]), strict=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize(
    ("num_rows", "hidden", "vocab", "chunk"), [(23, 17, 101, 1), (23, 17, 101, 22), (23, 16, 64, 23), (1, 3, 7, 4)]
)
@pytest.mark.parametrize(("bias", "confidence"), [(True, True), (False, False)])
def test_matches_dense(
    dtype: torch.dtype, tolerance: float, num_rows: int, hidden: int, vocab: int, chunk: int, bias: bool, confidence: bool
) -> None:
    case = make_case(num_rows, hidden, vocab, bias=bias, confidence=confidence)
    if num_rows == 1:
        case.tensors["mask"] = torch.ones(1)
    arguments = case.arguments(dtype)
    # The oracle sees the same rounded inputs, widened.
    exact = {n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for n, t in arguments.items()}
    stats, oracle = call(arguments, token_chunk_size=chunk), dense(exact)
    expected_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert stats.cross_entropy.numerators.dtype == stats.cross_entropy.counts.dtype == expected_dtype
    value_tolerance = min(tolerance, 1e-4)
    for got, expected in zip(terms(stats), terms(oracle), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=value_tolerance, atol=value_tolerance)
    torch.testing.assert_close(stats.cross_entropy.counts.double(), oracle.counts)
    active = case.tensors["mask"] != 0
    torch.testing.assert_close(stats.overlap[active].double(), oracle.overlap[active], rtol=value_tolerance, atol=1e-5)
    assert torch.equal(stats.draft_tokens[active], oracle.student_tokens[active])
    assert torch.equal(stats.teacher_tokens[active], oracle.teacher_tokens[active])
    expected_gradients = gradients(oracle, exact)
    for name, got in gradients(stats, arguments).items():
        assert got.dtype == dtype
        scale = expected_gradients[name].norm().clamp(min=1e-6)
        assert (got.double() - expected_gradients[name]).norm() / scale < tolerance, name


def test_softcap_matches_autograd() -> None:
    case = make_case(9, 6, 30)
    arguments, exact = case.arguments(), case.arguments()
    stats = call(arguments, token_chunk_size=4, logit_softcap=1.5)
    kept = call(arguments, token_chunk_size=99, logit_softcap=1.5)
    capped = 1.5 * torch.tanh(exact["student_hidden"] @ exact["output_weight"].T / 1.5)
    capped_inputs = {**exact, "student_hidden": capped, "output_weight": torch.eye(30, dtype=torch.float64)}
    oracle = dense(capped_inputs)
    expected = gradients(oracle, {**exact, "bias_features": exact["bias_features"]})
    for route in (stats, kept):
        for got, value in zip(terms(route), terms(oracle), strict=True):
            torch.testing.assert_close(got, value)
        for name, got in gradients(route, arguments).items():
            torch.testing.assert_close(got, expected[name])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_teacher_hidden_equals_its_logits(softcap: float | None) -> None:
    case = make_case(9, 6, 30)
    arguments, other = case.arguments(), case.arguments()
    hidden = torch.randn(12, 6, dtype=torch.float64)
    logits = hidden @ arguments["output_weight"].T
    arguments["teacher_logits"] = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    other["teacher_logits"], other["teacher_hidden"] = None, hidden
    expected = call(arguments, token_chunk_size=4, logit_softcap=softcap)
    got = call(other, token_chunk_size=4, logit_softcap=softcap)
    for value, reference in zip(terms(got), terms(expected), strict=True):
        torch.testing.assert_close(value, reference)
    references = gradients(expected, arguments)
    for name, value in gradients(got, other).items():
        torch.testing.assert_close(value, references[name])


def test_gradcheck() -> None:
    case = make_case(4, 3, 6, seed=5)
    arguments = case.arguments()
    names = list(GRAD_NAMES)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        # The confidence target is detached on purpose: its term is differentiable in the logits alone.
        stats = call({**arguments, **dict(zip(names[:3], leaves, strict=True))}, token_chunk_size=2)
        return stats.cross_entropy.numerators, stats.l1_distance.numerators

    assert torch.autograd.gradcheck(run, [arguments[name] for name in names[:3]])

    def run_confidence(logits: Tensor) -> Tensor:
        stats = call({**arguments, "confidence_logits": logits}, token_chunk_size=2)
        assert stats.confidence is not None
        return stats.confidence.numerators

    assert torch.autograd.gradcheck(run_confidence, [arguments["confidence_logits"]])


def _logit_case(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """Logits themselves as hidden rows: the head is the identity."""
    num_rows, vocab = student.shape
    return {
        "student_hidden": student.clone().requires_grad_(),
        "output_weight": torch.eye(vocab, dtype=student.dtype),
        "teacher_logits": teacher,
        "target_ids": torch.zeros(num_rows, dtype=torch.int64),
        "mask": torch.ones(num_rows) if mask is None else mask,
        "bin_ids": torch.zeros(num_rows, dtype=torch.int64),
    }


@pytest.mark.parametrize("chunk", [1, 8])
def test_teacher_minus_infinity(chunk: int) -> None:
    student, teacher = torch.randn(4, 9), torch.randn(4, 9)
    teacher[:, 3] = -torch.inf
    arguments = _logit_case(student, teacher)
    stats = call(arguments, token_chunk_size=chunk)
    exact = student.double().requires_grad_()
    p, q = exact.softmax(-1), teacher.double().softmax(-1)
    expected = (p - q).abs().sum()
    torch.testing.assert_close(stats.l1_distance.numerators.sum().double(), expected)
    (got,) = torch.autograd.grad(stats.l1_distance.numerators.sum(), [arguments["student_hidden"]])
    torch.testing.assert_close(got.double(), torch.autograd.grad(expected, [exact])[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 8])
def test_student_minus_infinity_through_the_bias(chunk: int) -> None:
    # A head cannot produce -inf without NaN elsewhere (0 · inf), the bias of one feature can.
    student, teacher = torch.randn(4, 9), torch.randn(4, 9)
    teacher[:, 3] = -torch.inf
    arguments = _logit_case(student, teacher)
    arguments["bias_features"] = torch.ones(4, 1)
    arguments["bias_weight"] = torch.zeros(9, 1)
    arguments["bias_weight"][3] = -torch.inf
    stats = call(arguments, token_chunk_size=chunk)
    assert torch.isfinite(stats.l1_distance.numerators).all()
    assert torch.isfinite(stats.cross_entropy.numerators).all()
    arguments["target_ids"] = torch.full((4,), 3)
    stats = call(arguments, token_chunk_size=chunk)
    assert stats.cross_entropy.numerators[0] == torch.inf
    (got,) = torch.autograd.grad(stats.cross_entropy.numerators.sum(), [arguments["student_hidden"]])
    assert torch.isfinite(got).all()
    assert got.norm() > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("chunk", [2, 64])
def test_masked_rows_may_hold_anything(poison: float, chunk: int) -> None:
    case = make_case(12, 5, 20, seed=2)
    clean = case.arguments(torch.float32)
    expected_stats = call(clean, token_chunk_size=chunk)
    expected = gradients(expected_stats, clean)
    masked = case.tensors["mask"] == 0
    assert masked.any()
    for name in ("student_hidden", "bias_features", "confidence_logits"):
        case.tensors[name][masked] = poison
    unused = torch.ones(15, dtype=torch.bool)
    unused[case.tensors["teacher_rows"][~masked]] = False
    case.tensors["teacher_logits"][unused] = poison
    case.tensors["target_ids"][masked] = -999
    case.tensors["teacher_rows"][masked] = -999
    case.tensors["bin_ids"][masked] = 77
    dirty = case.arguments(torch.float32)
    stats = call(dirty, token_chunk_size=chunk)
    for got, value in zip(terms(stats), terms(expected_stats), strict=True):
        assert torch.equal(got, value)
    for name, got in gradients(stats, dirty).items():
        assert torch.equal(got, expected[name])
        if name != "bias_weight":
            assert got[masked].eq(0).all()


@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("chunk", [3, 64])
def test_constant_shift_changes_nothing(shift: float, chunk: int) -> None:
    # Multiples of 1/64 stay exact at 1e4, so that what is measured is the loss and not the rounding of the inputs.
    student, teacher = (torch.randint(-200, 200, (16, 33)) / 64 for _ in range(2))
    plain = call(_logit_case(student, teacher), token_chunk_size=chunk)
    moved = call(_logit_case(student + shift, teacher - shift), token_chunk_size=chunk)
    for got, expected in zip(terms(moved), terms(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


def test_huge_logits_stay_finite() -> None:
    arguments = _logit_case(torch.randn(6, 11) * 1e4, torch.randn(6, 11) * 1e4)
    stats = call(arguments, token_chunk_size=2)
    (got,) = torch.autograd.grad(sum(v.sum() for v in terms(stats)), [arguments["student_hidden"]])
    assert all(torch.isfinite(v).all() for v in (*terms(stats), got))


@pytest.mark.parametrize("num_rows", [0, 7])
def test_nothing_supervised(num_rows: int) -> None:
    case = make_case(num_rows, 5, 20)
    case.tensors["mask"] = torch.zeros(num_rows)
    arguments = case.arguments(torch.float32)
    stats = call(arguments)
    loss = stats.combined(normalization_counts=stats.cross_entropy.counts)
    assert loss == 0
    for name in GRAD_NAMES:
        (got,) = torch.autograd.grad(loss, [arguments[name]], retain_graph=True)
        assert got.eq(0).all()


def test_bf16_gradient_error() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(256, 512, generator=generator).to(torch.bfloat16).requires_grad_()
    head = (torch.randn(8192, 512, generator=generator) / 8).to(torch.bfloat16)
    teacher = torch.randn(256, 8192, generator=generator) * 2
    targets = torch.randint(0, 8192, (256,), generator=generator)
    settings: dict[str, Any] = {"target_ids": targets, "mask": torch.ones(256), "bin_ids": torch.zeros(256, dtype=torch.int64)}
    stats = call({"student_hidden": hidden, "output_weight": head, "teacher_logits": teacher, **settings}, token_chunk_size=100)
    exact = hidden.detach().double().requires_grad_()
    oracle = dense_dspark(student_hidden=exact, output_weight=head, teacher_logits=teacher, num_bins=1, **settings)
    pairs = [(stats.cross_entropy.numerators, oracle.cross_entropy), (stats.l1_distance.numerators, oracle.l1_distance)]
    for got_loss, expected_loss in pairs:
        (got,) = torch.autograd.grad(got_loss.sum(), [hidden], retain_graph=True)
        (expected,) = torch.autograd.grad(expected_loss.sum(), [exact], retain_graph=True)
        assert (got.double() - expected).norm() / expected.norm() < 3e-3
