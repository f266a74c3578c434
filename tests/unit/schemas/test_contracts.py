"""Configuration, tables and counts as contracts: defaults, refusals, and what survives a round trip."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.config import PreprocessConfig
from schemas.manifest import SideCounts
from schemas.tables import REJECT_SCHEMA, STUDENT_SCHEMA, TEACHER_SCHEMA, RejectReason, reject_side

MINIMAL: dict[str, Any] = {
    "sources": ["a.jsonl"],
    "student": {"tokenizer": "s"},
    "teachers": [{"tokenizer": "t"}, {"tokenizer": "u"}],
    "output": "out",
}
CHAT = MINIMAL | {"mode": "chat", "include_thinking_in_loss": True, "native_thinking_alignment": True}


def test_only_sources_student_teachers_and_output_are_asked_for() -> None:
    config = PreprocessConfig.model_validate(MINIMAL)
    assert (config.mode, config.overlength, config.max_document_bytes, config.engine) == ("text", "truncate", 4_000_000, "local")
    assert (config.max_reject_fraction, config.min_coverage, config.backend, config.proof_every) == (0.05, 0.9, "auto", 200)
    assert config.student.context_length == 4096
    for name in MINIMAL:
        with pytest.raises(ValidationError, match=name):
            PreprocessConfig.model_validate({key: value for key, value in MINIMAL.items() if key != name})
    assert PreprocessConfig.model_validate(MINIMAL | {"sources": "a.jsonl"}).sources == ("a.jsonl",)
    assert PreprocessConfig.model_validate_json(config.model_dump_json()) == config


def test_configurations_are_frozen_and_know_no_other_field() -> None:
    config = PreprocessConfig.model_validate(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.output = "elsewhere"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="teacher_models"):
        PreprocessConfig.model_validate(MINIMAL | {"teacher_models": []})


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"sources": []}, "sources"),
        ({"teachers": []}, "teachers"),
        ({"workers": 0}, "workers"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"max_reject_fraction": 1.5}, "max_reject_fraction"),
        ({"overlength": "cut"}, "overlength"),
        ({"student": {"tokenizer": "s", "context_length": 1}}, "context_length"),
        ({"native_thinking_alignment": True}, "native_thinking_alignment needs mode: chat"),
        ({"kd_alignment_regions": ["answer"]}, "kd_alignment_regions needs native_thinking_alignment"),
        (CHAT | {"kd_alignment_regions": []}, "kd_alignment_regions is empty"),
        (CHAT | {"kd_alignment_regions": ["all"]}, "kd_alignment_regions"),
        ({"drop_first_assistant_chunk_kl_by_teacher": [True]}, "1 entries for 2 teachers"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        PreprocessConfig.model_validate(MINIMAL | changes)


def test_tables_are_those_of_the_design() -> None:
    student = "sample_id idx source line document_id window input_ids token_mask regions num_tokens loss_multiplier"
    teacher = "sample_id idx input_ids token_mask student_chunk_id teacher_chunk_id pair_is_correct regions route coverage"
    assert STUDENT_SCHEMA.names == student.split()
    assert TEACHER_SCHEMA.names == teacher.split()
    assert REJECT_SCHEMA.names == ["source", "line", "sample_id", "stage", "side", "reason", "message"]
    for schema, names in (
        (STUDENT_SCHEMA, ["input_ids"]),
        (TEACHER_SCHEMA, ["input_ids", "student_chunk_id", "teacher_chunk_id"]),
    ):
        for name in names:
            assert str(schema.field(name).type.value_type) == "int32"


def test_reasons_are_distinct_words() -> None:
    assert len({reason.value for reason in RejectReason}) == len(RejectReason)
    assert all(reason.value == reason.name.lower() for reason in RejectReason)
    assert [reject_side(None), reject_side(3)] == ["student", "teacher=3"]


def test_coverage_of_nothing_is_whole() -> None:
    assert SideCounts().coverage == 1.0
    assert SideCounts(num_supervised=4, num_covered=3, rejects={"overlength": 2, "no_tokens": 1}).coverage == 0.75
    assert SideCounts(rejects={"overlength": 2, "no_tokens": 1}).num_rejects == 3
