"""The vocabulary projection: against its oracle, on bundled and production tokenizers, and its file."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from xtok.errors import ProjectionError
from xtok.projection import Projection, ProjectionTable, build_projection, read_projection, write_projection
from xtok.projection.reference import reference_row
from xtok.projection.roles import end_of_turn_id, role_ids
from xtok.tokenizers import TokenizerAdapter, load_tokenizer

BUNDLED = ("chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower")


@pytest.fixture(scope="module")
def bundled(repository: Path) -> dict[str, TokenizerAdapter]:
    return {name: load_tokenizer(str(repository / "infra/bundled/tokenizers" / name)) for name in BUNDLED}


def row_of(table: ProjectionTable, student_id: int) -> dict[int, float]:
    return {int(i): float(w) for i, w in zip(table.indices[student_id], table.weights[student_id], strict=True) if i >= 0}


@pytest.mark.parametrize(
    ("student", "teacher"),
    [("chatml_bpe", "spm_bpe"), ("spm_bpe", "chatml_bpe"), ("chatml_bpe", "unigram_nfkc"), ("unigram_nfkc", "spm_bpe")],
)
def test_every_sampled_row_equals_the_oracle(bundled: dict[str, TokenizerAdapter], student: str, teacher: str) -> None:
    table = build_projection(bundled[student], bundled[teacher], k=3)
    ordinary = np.flatnonzero((bundled[student].table.lengths > 0) & ~bundled[student].table.is_special).tolist()
    roles = set(role_ids(bundled[student]).values())
    inexact = [i for i in ordinary if not table.is_exact[i]]
    sample = random.Random(0).sample(inexact, min(60, len(inexact))) + random.Random(1).sample(ordinary, 40)
    for student_id in set(sample) - roles:
        want = reference_row(bundled[student], bundled[teacher], student_id, k=3)
        got = row_of(table, student_id)
        assert got.keys() == want.keys(), bundled[student].token_text(student_id)
        assert all(got[i] == pytest.approx(want[i], abs=1e-6) for i in want)


def test_rows_are_stochastic_and_equality_is_of_bytes(bundled: dict[str, TokenizerAdapter]) -> None:
    for student in bundled.values():
        for teacher in bundled.values():
            table = build_projection(student, teacher)
            Projection.from_table(table)  # checks ranges and row sums
            left, right = student.table.values.to_pylist(), teacher.table.values.to_pylist()
            for student_id in np.flatnonzero(table.is_exact).tolist():
                assert left[student_id] == right[table.indices[student_id, 0]]


def test_own_vocabulary_maps_to_itself(bundled: dict[str, TokenizerAdapter]) -> None:
    adapter = bundled["chatml_bpe"]
    table = build_projection(adapter, adapter)
    ordinary = np.flatnonzero((adapter.table.lengths > 0) & ~adapter.table.is_special)
    assert table.indices[ordinary, 0].tolist() == ordinary.tolist()
    assert table.weights[ordinary, 0].tolist() == [1.0] * len(ordinary)


def test_specials_map_by_role_alone(bundled: dict[str, TokenizerAdapter]) -> None:
    student, teacher = bundled["chatml_bpe"], bundled["spm_bpe"]
    table = build_projection(student, teacher)
    roles, partners = role_ids(student), role_ids(teacher)
    assert roles["end_of_turn"] == end_of_turn_id(student)
    assert student.token_text(roles["end_of_turn"]) == "<|im_end|>"
    assert row_of(table, roles["end_of_turn"]) == {partners["end_of_turn"]: 1.0}
    for special in student.table.special_content:
        if special not in roles.values():
            assert row_of(table, special) == {}


def test_reverse_pass_reaches_more_teacher_tokens_and_keeps_exact_rows(bundled: dict[str, TokenizerAdapter]) -> None:
    forward = build_projection(bundled["chatml_bpe"], bundled["spm_bpe"])
    both = build_projection(bundled["chatml_bpe"], bundled["spm_bpe"], reverse=True)
    reached = [set(table.indices[table.indices >= 0].tolist()) for table in (forward, both)]
    assert len(reached[1]) > len(reached[0])
    assert np.array_equal(forward.indices[forward.is_exact], both.indices[forward.is_exact])
    Projection.from_table(both)


def test_file_round_trip_and_refusals(bundled: dict[str, TokenizerAdapter], tmp_path: Path) -> None:
    table = build_projection(bundled["chatml_bpe"], bundled["spm_bpe"])
    url = str(tmp_path / "projection.parquet")
    write_projection(table, url)
    first = Path(url).read_bytes()
    write_projection(table, url)
    assert Path(url).read_bytes() == first
    back = read_projection(url, student_fingerprint=table.student_fingerprint, teacher_fingerprint=table.teacher_fingerprint)
    assert np.array_equal(back.indices, table.indices)
    assert np.array_equal(back.weights, table.weights)
    assert np.array_equal(back.is_exact, table.is_exact)
    with pytest.raises(ProjectionError, match=f"{table.teacher_fingerprint}.*other"):
        read_projection(url, teacher_fingerprint="other")
    (tmp_path / "broken.parquet").write_bytes(first[:100])
    with pytest.raises(ProjectionError, match="no projection file"):
        read_projection(str(tmp_path / "broken.parquet"))
    with pytest.raises(ProjectionError, match="k must be"):
        build_projection(bundled["chatml_bpe"], bundled["spm_bpe"], k=0)


@pytest.mark.slow
def test_production_vocabularies(real_tokenizer_folder: Path) -> None:
    qwen, llama, spm = (load_tokenizer(str(real_tokenizer_folder / name)) for name in ("qwen3", "llama3_2", "mistral_v3_spm"))
    start = time.perf_counter()
    table = build_projection(qwen, llama)
    assert time.perf_counter() - start < 60
    assert table.is_exact.mean() > 0.7
    assert (table.indices[:, 0] >= 0).mean() > 0.999
    assert row_of(table, role_ids(qwen)["end_of_turn"]) == {role_ids(llama)["end_of_turn"]: 1.0}
    space = build_projection(spm, qwen)
    foo, space_foo = (int(qwen.encode_flat([text]).ids[-1]) for text in ("x\nfoo", "x foo"))
    ids = {spm.token_text(i): i for i in range(spm.vocab_size)}
    assert row_of(space, ids["▁foo"]) == {space_foo: 1.0}
    assert row_of(space, ids["foo"]) == {foo: 1.0}
    assert torch.equal(Projection.from_table(space).indices, torch.from_numpy(space.indices))
