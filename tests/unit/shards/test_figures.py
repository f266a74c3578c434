"""Figures from the files: equal to a slow count row by row, and adding up to the manifest's own totals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from schemas.manifest import Manifest
from tests.unit.shards.support import PARTS, build, config_for, side, udhr_rows, write_lines
from xtok.shards.figures import MAX_SIZE, NUM_EXAMPLES, Figures, dataset_figures
from xtok.shards.inspect import side_frame
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.sides import load_side


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, Figures]:
    """Two sources and broken lines; one teacher refuses long texts, one has an offset-route tokenizer, one is the student's."""
    folder = tmp_path_factory.mktemp("figures")
    rows = udhr_rows(60)
    broken = [b"{broken", b"[]", b"7", b"{", b"nonsense"]
    write_lines(folder / "first.jsonl", [*rows[:25], *broken])
    write_lines(folder / "second.jsonl", rows[25:])
    teachers = [side("spm_bpe", 600), side("unigram_nfkc"), side("chatml_bpe")]
    sources = [str(folder / "first.jsonl"), str(folder / "second.jsonl")]
    changes = {"teachers": teachers, "overlength": "reject", **PARTS}
    manifest = build(folder / "out", sources, **changes)
    config = config_for(folder / "out", sources, **changes)
    return folder / "out", manifest, dataset_figures(manifest, str(folder / "out"), config.student, SerialRunner())


def test_there_is_something_to_count(built: tuple[Path, Manifest, Figures]) -> None:
    _, manifest, figures = built
    assert len(manifest.parts) > 3
    assert manifest.teacher_totals[0].num_null_rows > 0
    assert set(figures.teachers) == {0, 1}
    assert set(figures.source_rows) == {"first.jsonl", "second.jsonl"}


def test_sums_over_sources_are_the_manifests_totals(built: tuple[Path, Manifest, Figures]) -> None:
    _, manifest, figures = built
    assert sum(figures.source_rows.values()) == manifest.num_rows
    for index, teacher in figures.teachers.items():
        totals = manifest.teacher_totals[index]
        for name in ("num_supervised", "num_covered", "num_chunks", "num_one_to_one"):
            assert sum(getattr(pairs, name) for pairs in teacher.sources.values()) == getattr(totals, name), name
        assert sum(pairs.num_rows for pairs in teacher.sources.values()) == totals.num_rows - totals.num_null_rows
        assert teacher.chunk_sizes.sum() == totals.num_chunks
        assert int(np.arange(len(teacher.lengths)) @ teacher.lengths) == totals.num_tokens
    assert int(np.arange(len(figures.lengths)) @ figures.lengths) == manifest.student_totals.num_tokens


def test_equal_to_a_count_row_by_row(built: tuple[Path, Manifest, Figures]) -> None:
    output, _, figures = built
    dataset = open_dataset(str(output))
    student = side_frame(dataset).to_dicts()
    special = load_side(config_for(output, "unused").student).table.is_special
    assert Counter(row["num_tokens"] for row in student) == _counts(figures.lengths)
    for index, found in figures.teachers.items():
        sizes: Counter[tuple[int, int]] = Counter()
        lengths: Counter[int] = Counter()
        covered: Counter[str] = Counter()
        one_to_one: Counter[str] = Counter()
        for row, other in zip(student, side_frame(dataset, index).to_dicts(), strict=True):
            if other["input_ids"] is None:
                continue
            lengths[len(other["input_ids"])] += 1
            ids = zip(row["input_ids"], other["student_chunk_id"], strict=True)
            covered[row["source"]] += sum(chunk >= 0 and not special[token] for token, chunk in ids)
            mine, theirs = Counter(other["student_chunk_id"]), Counter(other["teacher_chunk_id"])
            for chunk, is_correct in enumerate(other["pair_is_correct"]):
                size = (mine[chunk], theirs[chunk])
                sizes[min(size[0], MAX_SIZE), min(size[1], MAX_SIZE)] += 1
                one_to_one[row["source"]] += is_correct and size == (1, 1)
        assert lengths == _counts(found.lengths)
        assert sizes == Counter({(int(s), int(t)): int(found.chunk_sizes[s, t]) for s, t in np.argwhere(found.chunk_sizes)})
        for name, pairs in found.sources.items():
            assert (pairs.num_covered, pairs.num_one_to_one) == (covered[name], one_to_one[name])


def test_refusals_have_the_manifests_counts_and_the_first_examples(built: tuple[Path, Manifest, Figures]) -> None:
    _, manifest, figures = built
    counted = {("source", reason): count for reason, count in manifest.source_rejects.items()}
    counted |= {("teacher=0", reason): count for reason, count in manifest.teacher_totals[0].rejects.items()}
    assert {key: refusals.num_rows for key, refusals in figures.refusals.items()} == counted
    broken = figures.refusals["source", "invalid_json"]
    assert broken.num_rows >= 3
    assert len(broken.examples) == NUM_EXAMPLES
    assert [line for _, line, _, _ in broken.examples] == sorted(line for _, line, _, _ in broken.examples)
    assert broken.examples[0][:3] == ("first.jsonl", 26, None)


def test_seconds_are_those_of_the_parts(built: tuple[Path, Manifest, Figures]) -> None:
    _, _, figures = built
    assert figures.seconds["tokenize"] > 0


def _counts(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Counter[int]:
    return Counter({int(length): int(lengths[length]) for length in np.flatnonzero(lengths)})


def test_chats_agree_with_their_manifest(tmp_path: Path, repository: Path) -> None:
    """What counts in a chat is decided by its regions; the figures read it from the files."""
    source = repository / "infra" / "bundled" / "chats.jsonl"
    changes = {"mode": "chat", "teachers": ["spm_bpe", "unigram_nfkc"], "part_bytes": 8_000, "row_group_rows": 8}
    manifest = build(tmp_path / "out", source, **changes)
    figures = dataset_figures(
        manifest, str(tmp_path / "out"), config_for(tmp_path / "out", source, **changes).student, SerialRunner()
    )
    assert len(manifest.parts) > 1
    for index, teacher in figures.teachers.items():
        totals, [pairs] = manifest.teacher_totals[index], teacher.sources.values()
        assert totals.num_supervised > 0
        for name in ("num_supervised", "num_covered", "num_chunks", "num_one_to_one"):
            assert getattr(pairs, name) == getattr(totals, name), name
