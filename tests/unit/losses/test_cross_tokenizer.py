"""What the cross-tokenizer loss promises beyond its formulas: zero for equal models, invariances, defined results, typed errors."""

from __future__ import annotations

import pytest
import torch

from tests.parity.distillation_problems import Problem, random_problem, random_projection
from xtok.errors import ProjectionError
from xtok.losses.cross_tokenizer import CrossTokenizerDistillationConfig, CrossTokenizerDistillationLoss, HiddenLogits
from xtok.losses.cross_tokenizer.common_map import common_map
from xtok.projection import Projection


def run(
    problem: Problem, config: CrossTokenizerDistillationConfig, *, counts=None, student=None, teachers=None, projections=None
):
    tokens, chunks = counts or problem.counts(config)
    student = (problem.student if student is None else student).clone().requires_grad_()
    loss, metrics = CrossTokenizerDistillationLoss(config, projections or problem.projections)(
        student_logits=student,
        teacher_logits=teachers or problem.teachers,
        batch=problem.batch,
        num_valid_tokens=tokens,
        num_valid_chunks=chunks,
    )
    loss.backward()
    return loss.detach(), student.grad, metrics


def identity_problem(seed: int = 0, *, one_token_chunks: bool = False) -> Problem:
    """The teacher is the student: same ids, same chunks, same logits, identity projection."""
    problem = random_problem(seed, masked=False)
    if one_token_chunks:
        length = problem.batch["input_ids"].shape[1]
        problem.batch["alignment_0_student_chunk_id"] = torch.where(problem.batch["token_mask"] > 0, torch.arange(length), -1)
        for name in ("pair_valid", "pair_is_correct"):
            problem.batch[f"alignment_0_{name}"] = problem.batch["token_mask"].bool()
    size = 13
    projection = Projection(torch.arange(size, dtype=torch.int32)[:, None], torch.ones(size, 1), "a", "b", size)
    batch = problem.batch
    batch["teacher_0_input_ids"] = batch["input_ids"].clone()
    batch["teacher_0_token_mask"] = batch["token_mask"].clone()
    batch["alignment_0_teacher_chunk_id"] = batch["alignment_0_student_chunk_id"].clone()
    present = batch["alignment_0_student_chunk_id"]
    num_pairs = batch["alignment_0_pair_valid"].shape[1]
    assert int(present.max()) < num_pairs
    return Problem(batch, [projection, None], problem.student, [problem.student.clone(), problem.student.clone()])


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize(
    "case",
    [
        {"mode": "p_kl", "chunk_reduction": "mixture"},
        {"mode": "p_kl", "chunk_reduction": "geometric"},
        {"mode": "alm"},
        {"mode": "gold"},
    ],
    ids=str,
)
def test_equal_models_have_no_loss_and_no_gradient(case: dict, topk: int | None) -> None:
    config = CrossTokenizerDistillationConfig(**case, vocab_topk=topk, ce_weight=0.0)
    problem = identity_problem(one_token_chunks=case["mode"] == "gold")
    loss, gradient, metrics = run(problem, config)
    assert float(metrics["num_valid_chunks_0"].numerator) > 5
    assert abs(float(loss)) < 1e-6
    assert float(gradient.abs().max()) < 1e-6
    different = problem.student + torch.randn(
        problem.student.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert float(run(problem, config, student=different)[0]) > 1e-3  # the zero above is no constant


@pytest.mark.parametrize("mode", ["p_kl", "gold", "h_kl", "alm"])
def test_renaming_the_teachers_tokens_changes_nothing(mode: str) -> None:
    config = CrossTokenizerDistillationConfig(mode=mode, vocab_topk=4)
    problem = random_problem(2)
    want = run(problem, config)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))  # new id of old id
    projection = problem.projections[0]
    indices = torch.where(projection.indices >= 0, order[projection.indices.clamp_min(0).long()], -1).int()
    renamed = Projection(indices, projection.weights, "student", "teacher", 11)
    teacher = problem.teachers[0].clone()
    teacher[..., order] = problem.teachers[0][..., :11]
    problem.batch["teacher_0_input_ids"] = order[problem.batch["teacher_0_input_ids"]]
    got = run(problem, config, teachers=[teacher, problem.teachers[1]], projections=[renamed, None])
    torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["p_kl", "gold", "h_kl", "alm"])
def test_micro_batches_add_up_to_the_batch(mode: str) -> None:
    config = CrossTokenizerDistillationConfig(mode=mode, vocab_topk=None)
    problem = random_problem(4, batch_size=4)
    counts = problem.counts(config)
    whole_loss, whole_gradient, _ = run(problem, config, counts=counts)
    loss, gradients = 0.0, []
    for part in (slice(0, 1), slice(1, 4)):
        micro = Problem(
            {k: v[part] for k, v in problem.batch.items()},
            problem.projections,
            problem.student[part],
            [t[part] for t in problem.teachers],
        )
        value, gradient, _ = run(micro, config, counts=counts)
        loss += float(value)
        gradients.append(gradient)
    assert loss == pytest.approx(float(whole_loss), abs=1e-9)
    torch.testing.assert_close(torch.cat(gradients), whole_gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["p_kl", "gold", "h_kl", "alm"])
def test_no_valid_chunk_is_exactly_zero_and_counted(mode: str) -> None:
    config = CrossTokenizerDistillationConfig(mode=mode, ce_weight=0.0, teacher_weights=[1.0, 0.0])
    problem = random_problem(5)
    problem.batch["alignment_0_pair_valid"][:] = False
    loss, gradient, metrics = run(problem, config)
    assert float(loss) == 0.0
    assert not gradient.any()
    assert float(metrics["num_valid_chunks_0"].numerator) == 0
    assert float(metrics["coverage_0"].numerator) == 0


def test_all_masked_is_exactly_zero_and_tied_to_the_student() -> None:
    problem = random_problem(6)
    problem.batch["token_mask"][:] = 0
    loss, gradient, _ = run(problem, CrossTokenizerDistillationConfig())
    assert float(loss) == 0.0
    assert gradient is not None
    assert not gradient.any()


@pytest.mark.parametrize("mode", ["p_kl", "alm", "gold"])
def test_extreme_logits_give_no_nan(mode: str) -> None:
    config = CrossTokenizerDistillationConfig(mode=mode, vocab_topk=None, ce_weight=0.0)
    problem = random_problem(7)
    problem.teachers[0][..., 2] = -torch.inf
    for student in (problem.student * 1e4, problem.student.float() * 1e4, problem.student + 1e4):
        loss, gradient, _ = run(problem, config, student=student, teachers=[t.to(student.dtype) for t in problem.teachers])
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("reduction", ["mixture", "geometric", "nemo"])
def test_a_chunk_without_student_mass_counts_but_adds_nothing(reduction: str) -> None:
    config = CrossTokenizerDistillationConfig(
        chunk_reduction=reduction, vocab_topk=None, ce_weight=0.0, teacher_weights=[1.0, 0.0]
    )
    problem = random_problem(8)
    reaching = torch.unique(problem.projections[0].entries()[0])
    problem.student[..., reaching] = -torch.inf
    loss, gradient, metrics = run(problem, config)
    assert float(loss) == 0.0
    assert torch.isfinite(gradient).all()
    assert float(metrics["empty_chunks_0"].numerator) == float(metrics["num_valid_chunks_0"].numerator) > 0


def test_head_columns_beyond_the_vocabularies_change_nothing() -> None:
    config = CrossTokenizerDistillationConfig(vocab_topk=None)
    problem = random_problem(9)
    want, want_gradient, _ = run(problem, config)
    problem.student[..., 13:] = 50.0
    problem.teachers[0][..., 11:] = 50.0
    problem.teachers[1][..., 13:] = 50.0
    got, gradient, _ = run(problem, config)
    assert torch.equal(got, want)
    assert torch.equal(gradient, want_gradient)
    assert not gradient[..., 13:].any()


def test_combinations_of_teachers() -> None:
    problem = random_problem(10)
    same = Problem(
        problem.batch, [None, None], problem.student[..., :13], [problem.teachers[1][..., :13], -problem.teachers[1][..., :13]]
    )
    averaged = CrossTokenizerDistillationConfig(teacher_combination="averaged_logits", teacher_weights=[1.0, 3.0], ce_weight=0.0)
    mean = 0.25 * same.teachers[0] + 0.75 * same.teachers[1]
    alone = Problem(problem.batch, [None], same.student, [mean])
    want = run(alone, CrossTokenizerDistillationConfig(ce_weight=0.0))
    got = run(same, averaged)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    # the student's own tokens are likely under +teacher, so selecting by cross-entropy takes it
    same.teachers[0] = torch.nn.functional.one_hot(torch.roll(problem.batch["input_ids"], -1, 1), 13).double() * 5
    selected = run(same, CrossTokenizerDistillationConfig(teacher_combination="select_teacher", ce_weight=0.0))
    first = run(Problem(problem.batch, [None], same.student, same.teachers[:1]), CrossTokenizerDistillationConfig(ce_weight=0.0))
    torch.testing.assert_close(selected[0], first[0])
    for weighting in ("cross_entropy", "entropy", "max_probability"):
        config = CrossTokenizerDistillationConfig(teacher_weighting=weighting, teacher_weighting_alpha=2.0)
        _, _, metrics = run(same, config)
        weights = torch.stack([metrics[f"teacher_weight_{i}"].numerator for i in range(2)])
        assert float(weights.sum()) == pytest.approx(1.0)
        assert float(weights[0]) > 0.5


def test_dynamic_scaling_brings_both_parts_to_one_size() -> None:
    problem = random_problem(12)
    loss, _, metrics = run(problem, CrossTokenizerDistillationConfig(dynamic_scaling=True))
    assert float(loss) == pytest.approx(2 * float(metrics["ce_loss"].value()), rel=1e-6)


def test_mistakes_are_named() -> None:
    config = CrossTokenizerDistillationConfig()
    problem = random_problem(13)
    tokens, chunks = problem.counts(config)
    loss_fn = CrossTokenizerDistillationLoss(config, problem.projections)
    call = {"teacher_logits": problem.teachers, "batch": problem.batch, "num_valid_tokens": tokens, "num_valid_chunks": chunks}
    with pytest.raises(ValueError, match=r"12 columns.*13 ids"):
        loss_fn(student_logits=problem.student[..., :12], **call)
    with pytest.raises(ValueError, match=r"teacher_logits\[0\] have 10 columns.*11 ids"):
        loss_fn(
            student_logits=problem.student, **{**call, "teacher_logits": [problem.teachers[0][..., :10], problem.teachers[1]]}
        )
    with pytest.raises(ValueError, match="2 teachers, but 1 teacher_logits"):
        loss_fn(student_logits=problem.student, **{**call, "teacher_logits": problem.teachers[:1]})
    with pytest.raises(KeyError, match="alignment_0_pair_valid"):
        loss_fn(
            student_logits=problem.student, **{**call, "batch": {k: v for k, v in problem.batch.items() if "pair_valid" not in k}}
        )
    with pytest.raises(ValueError, match=r"num_valid_chunks\[0\] is None"):
        loss_fn(student_logits=problem.student, **{**call, "num_valid_chunks": [None, None]})
    with pytest.raises(ValueError, match="finite, non-negative"):
        loss_fn(student_logits=problem.student, **{**call, "num_valid_tokens": float("nan")})
    with pytest.raises(ValueError, match="student_logits are for"):
        loss_fn(student_logits=problem.student[:, :-1], **call)
    problem.batch["input_ids"][0, 1] = 99
    problem.batch["token_mask"][0, 1] = 1
    with pytest.raises(ValueError, match="token id 99"):
        loss_fn(student_logits=problem.student, **call)


def test_construction_mistakes_are_named() -> None:
    empty = Projection(torch.full((4, 2), -1, dtype=torch.int32), torch.zeros(4, 2), "student-fp", "teacher-fp", 5)
    with pytest.raises(ProjectionError, match=r"student-fp.*teacher-fp"):
        CrossTokenizerDistillationLoss(CrossTokenizerDistillationConfig(mode="gold"), [empty])
    with pytest.raises(ValueError, match="sum to zero"):
        CrossTokenizerDistillationConfig(teacher_combination="averaged_logits", teacher_weights=[0.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    first = random_projection(generator, 6, 5)
    with pytest.raises(ValueError, match="one vocabulary"):
        CrossTokenizerDistillationLoss(CrossTokenizerDistillationConfig(teacher_combination="averaged_logits"), [first, None])
    with pytest.raises(ValueError, match="different students"):
        CrossTokenizerDistillationLoss(CrossTokenizerDistillationConfig(), [first, random_projection(generator, 7, 5)])
    with pytest.raises(ValueError, match=r"mode lists 1 entries for 2 teachers"):
        CrossTokenizerDistillationLoss(CrossTokenizerDistillationConfig(mode=["alm"]), [first, None])
    with pytest.raises(ValueError, match="hidden"):
        HiddenLogits(torch.zeros(2, 3, 4), torch.zeros(5, 6))
    for indices, weights, message in (
        ([[7, -1]], [[1.0, 0.0]], "7 is outside"),
        ([[1, 2]], [[0.5, 0.2]], "sums to"),
        ([[1, 2]], [[1.5, -0.5]], "non-negative"),
    ):
        with pytest.raises(ProjectionError, match=message):
            Projection(torch.tensor(indices, dtype=torch.int32), torch.tensor(weights), "a", "b", 5)


def test_common_map_resolves_rival_claims() -> None:
    indices = torch.tensor([[3, 1], [3, -1], [3, -1], [2, 0], [0, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.9, 0.1], [1.0, 0.0], [1.0, 0.0], [0.55, 0.45], [1.0, 0.0]])
    projection = Projection(indices, weights, "a", "b", 4)
    strict = common_map(projection, strict=True, threshold=0.6)
    assert list(zip(strict.student.tolist(), strict.teacher.tolist(), strict=True)) == [(1, 3), (4, 0)]
    relaxed = common_map(projection, strict=False, threshold=0.5)
    assert list(zip(relaxed.student.tolist(), relaxed.teacher.tolist(), strict=True)) == [(1, 3), (3, 2), (4, 0)]


def test_certain_chunks_and_a_tiny_epsilon_give_no_nan() -> None:
    problem = random_problem(14)
    problem.student = torch.nn.functional.one_hot(torch.roll(problem.batch["input_ids"], -1, 1), 15).float() * 60
    teacher = torch.nn.functional.one_hot(torch.roll(problem.batch["teacher_0_input_ids"], -1, 1), 13).float() * 60
    config = CrossTokenizerDistillationConfig(mode="alm", alm_epsilon=1e-9, ce_weight=0.0, teacher_weights=[1.0, 0.0])
    loss, gradient, metrics = run(problem, config, teachers=[teacher, problem.student.clone()])
    assert float(metrics["num_valid_chunks_0"].numerator) > 0
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_a_teacher_without_supervised_tokens_is_never_selected() -> None:
    problem = random_problem(15)
    problem.batch["teacher_0_token_mask"][:] = 0
    _, _, metrics = run(problem, CrossTokenizerDistillationConfig(teacher_combination="select_teacher"))
    assert "kd_loss_1" in metrics
    _, _, metrics = run(problem, CrossTokenizerDistillationConfig(teacher_weighting="cross_entropy"))
    assert float(metrics["teacher_weight_0"].numerator) == 0.0


def test_tensors_of_another_length_are_named() -> None:
    for key in ("alignment_0_teacher_chunk_id", "alignment_0_student_chunk_id", "token_mask"):
        problem = random_problem(16)
        counts = problem.counts(CrossTokenizerDistillationConfig())
        problem.batch[key] = problem.batch[key][:, :-1]
        with pytest.raises(ValueError, match=key):
            run(problem, CrossTokenizerDistillationConfig(), counts=counts)
    problem = random_problem(17)
    del problem.batch["input_ids"]
    with pytest.raises(KeyError, match="the batch lacks"):
        problem.counts(CrossTokenizerDistillationConfig())
    problem = random_problem(18)
    with pytest.raises(ValueError, match="student_logits are for"):
        run(problem, CrossTokenizerDistillationConfig(), student=problem.student[:, :5])


@pytest.mark.parametrize("name", ["temperature", "alm_temperature"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")])
def test_temperatures_that_leave_no_softmax_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        CrossTokenizerDistillationConfig(**{name: value})
