"""Texts longer than a context: cut like Hugging Face, refused, or sliced into windows without losing a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.unit.shards.support import PARTS, TOKENIZERS, build, side, udhr_rows
from xtok.errors import DatasetMismatchError
from xtok.shards.inspect import rejects_frame, side_frame
from xtok.shards.read import open_dataset
from xtok.shards.verify import verify_dataset
from xtok.tokenizers import load_tokenizer


@pytest.mark.parametrize("teachers", [["spm_bpe"], ["spm_bpe", "unigram_nfkc"], ["wordpiece_lower"]])
def test_windows_lose_no_byte_and_show_none_twice(tmp_path: Path, source: Path, teachers: list[str]) -> None:
    sides = [side(name, 90) for name in teachers]
    build(tmp_path / "out", source, overlength="split", student=side("chatml_bpe", 70), teachers=sides, **PARTS)
    texts = {row["id"]: row["text"] for row in udhr_rows(40)}
    dataset = open_dataset(str(tmp_path / "out"))
    assert verify_dataset(dataset) == []
    student = side_frame(dataset)
    assert student["window"].max() > 3
    assert student.select((pl.col("document_id") + "#" + pl.col("window").cast(pl.String) == pl.col("sample_id")).all()).item()
    refused = set(rejects_frame(dataset).filter(pl.col("side") == "student")["sample_id"])
    for name, frame in [("chatml_bpe", student), *((name, side_frame(dataset, i)) for i, name in enumerate(teachers))]:
        adapter = load_tokenizer(str(TOKENIZERS / name))
        inner = slice(len(adapter.prefix_ids), -len(adapter.suffix_ids) or None)
        joined = frame.with_columns(pl.col("sample_id").str.split_exact("#", 1).struct[0].alias("document"))
        for (document,), rows in joined.group_by(["document"], maintain_order=True):
            pieces = [ids[inner] for ids in rows["input_ids"].to_list()]
            assert rows["input_ids"].list.len().max() <= (70 if name == "chatml_bpe" else 90)
            assert [token for piece in pieces for token in piece] == adapter.encode_flat([texts[str(document)]]).ids.tolist()
            assert all(ids[: len(adapter.prefix_ids)] == adapter.prefix_ids.tolist() for ids in rows["input_ids"].to_list())
    assert len(refused) + student["document_id"].n_unique() == 40


def test_windows_carry_the_alignment_of_their_document(tmp_path: Path, source: Path) -> None:
    """A window's chunks are those of the uncut document that lie in it, numbered afresh."""
    shared = {"student": side("chatml_bpe", 4096), "teachers": [side("spm_bpe", 4096)]}
    build(tmp_path / "whole", source, **shared)
    build(tmp_path / "out", source, overlength="split", student=side("chatml_bpe", 50), teachers=[side("spm_bpe", 60)])
    frames = [side_frame(open_dataset(str(tmp_path / name)), 0) for name in ("whole", "out")]
    adapters = [load_tokenizer(str(TOKENIZERS / name)) for name in ("chatml_bpe", "spm_bpe")]
    specials = [(len(adapter.prefix_ids), len(adapter.suffix_ids)) for adapter in adapters]

    def content_chunks(row: dict[str, Any]) -> list[list[int]]:
        columns = (row["student_chunk_id"], row["teacher_chunk_id"])
        return [ids[first : len(ids) - last] for ids, (first, last) in zip(columns, specials, strict=True)]

    windows: dict[str, list[dict[str, Any]]] = {}
    for row in frames[1].to_dicts():
        windows.setdefault(row["sample_id"].split("#")[0], []).append(row)
    assert max(map(len, windows.values())) > 3
    for row in frames[0].to_dicts():
        if row["sample_id"] not in windows:
            continue
        first, found = 0, ([], [])
        for window in windows[row["sample_id"]]:
            chunks = content_chunks(window)
            lowest = min(chunk for chunk in chunks[0] if chunk >= 0)
            for side_index in (0, 1):
                found[side_index].extend(-1 if chunk < 0 else chunk - lowest + first for chunk in chunks[side_index])
            first = max(found[0]) + 1
        whole = content_chunks(row)
        shift = min(chunk for chunk in whole[0] if chunk >= 0)
        assert [[-1 if chunk < 0 else chunk - shift for chunk in column] for column in whole] == list(map(list, found))


def test_overlength_reject(tmp_path: Path, source: Path) -> None:
    build(tmp_path / "out", source, overlength="reject", student=side("chatml_bpe", 100), teachers=[side("spm_bpe", 90)], **PARTS)
    dataset = open_dataset(str(tmp_path / "out"))
    student, teacher, rejects = side_frame(dataset), side_frame(dataset, 0), rejects_frame(dataset)
    assert student["num_tokens"].max() <= 100
    null = teacher.filter(pl.col("input_ids").is_null())
    assert 0 < null.height < teacher.height
    assert teacher["sample_id"].to_list() == student["sample_id"].to_list()
    overlong = rejects.filter(pl.col("reason") == "overlength")
    assert set(overlong.filter(pl.col("side") == "teacher=0")["sample_id"]) == set(null["sample_id"])
    assert set(overlong.filter(pl.col("side") == "student")["sample_id"]).isdisjoint(student["sample_id"])
    assert overlong.filter(pl.col("side") == "student").height + student.height == 40
    assert verify_dataset(dataset) == []


def test_truncation_keeps_the_specials_like_hugging_face(tmp_path: Path, source: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    sides = [("chatml_bpe", 50), ("spm_bpe", 40), ("wordpiece_lower", 30)]
    build(tmp_path / "out", source, student=side(*sides[0]), teachers=[side(*other) for other in sides[1:]], **PARTS)
    texts = {row["id"]: row["text"] for row in udhr_rows(40)}
    dataset = open_dataset(str(tmp_path / "out"))
    for (name, context), key in zip(sides, ("student", 0, 1), strict=True):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZERS / name)
        for row in side_frame(dataset, key, ["sample_id", "input_ids"]).to_dicts():
            assert row["input_ids"] == tokenizer(texts[row["sample_id"]], truncation=True, max_length=context)["input_ids"]
    assert dataset.manifest.student_totals.num_truncated > 0


def test_a_later_teacher_must_fit_the_windows(tmp_path: Path, source: Path) -> None:
    changes = PARTS | {"overlength": "split", "student": side("chatml_bpe", 128)}
    build(tmp_path / "out", source, teachers=[side("spm_bpe", 160)], **changes)
    with pytest.raises(DatasetMismatchError, match="does not fit the windows"):
        build(tmp_path / "out", source, teachers=[side("spm_bpe", 160), side("unigram_nfkc", 64)], **changes)
    assert verify_dataset(open_dataset(str(tmp_path / "out"))) == []
