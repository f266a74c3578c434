"""The offline path against a slow statement of what it does: one document at a time, Hugging Face and the byte oracle alone."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from schemas.config import PreprocessConfig
from tests.conftest import REPOSITORY
from xtok.align.lattice import SpanLookup, align_flat
from xtok.align.reference import reference_align
from xtok.shards.inspect import side_frame
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.shards.verify import verify_dataset
from xtok.tokenizers import FlatTokens, TokenizerAdapter, load_tokenizer

BUNDLED = REPOSITORY / "infra" / "bundled" / "tokenizers"
UDHR = REPOSITORY / "infra" / "bundled" / "udhr.jsonl"
HARD = [
    "cafe\u0301 na\u00efve \u212b \u0301start",
    " leading blank",
    "\ttab\r\n\r\nlines \u2028 \u0085 end ",
    "👩‍👩‍👧 🇨🇿 \U0001d518\u00ad",
    "x",
    " ",
    "<s> spelled </s> <|im_end|>",
    "ｆｕｌｌ　ｗｉｄｔｈ ½ ﬁ",
    "nul \x00 byte",
]


@dataclass(frozen=True)
class Expected:
    """One document on two sides, worked out slowly."""

    student_ids: list[int]
    teacher_ids: list[int]
    student_chunk_id: list[int]
    teacher_chunk_id: list[int]
    num_chunks: int
    route: str


def slow_side(tokenizer: PreTrainedTokenizerFast, text: str, context_length: int) -> list[int]:
    """What Hugging Face gives, truncated by it."""
    ids: list[int] = tokenizer(text, truncation=True, max_length=context_length)["input_ids"]
    return ids


def slow_document(sides: list[tuple[TokenizerAdapter, PreTrainedTokenizerFast]], text: str, context_length: int) -> Expected:
    ids = [slow_side(tokenizer, text, context_length) for _, tokenizer in sides]
    found = reference_align(sides[0][0], sides[1][0], ids[0], ids[1])
    if found.is_verified:
        return Expected(ids[0], ids[1], found.student_chunk_id, found.teacher_chunk_id, found.num_chunks, "byte")
    spans = [slow_spans(adapter, text, len(side)) for (adapter, _), side in zip(sides, ids, strict=True)]
    flat = [FlatTokens(np.array(side, dtype=np.int32), np.array([0, len(side)])) for side in ids]
    aligned = align_flat(sides[0][0], sides[1][0], flat[0], flat[1], spans=lambda _: SpanLookup(*spans))
    chunk_ids = aligned.student_chunk_id.tolist(), aligned.teacher_chunk_id.tolist()
    return Expected(ids[0], ids[1], *chunk_ids, int(aligned.num_chunks[0]), "offset")


def slow_spans(adapter: TokenizerAdapter, text: str, length: int) -> np.ndarray[Any, Any]:
    """Spans as the tokenizer reports them, around them (0, 0) for its specials."""
    _, spans = adapter.encode_with_spans([text])
    before, after = len(adapter.prefix_ids), len(adapter.suffix_ids)
    content = spans[: length - before - after]
    return np.concatenate([np.zeros((before, 2), dtype=np.int32), content, np.zeros((after, 2), dtype=np.int32)])


def check(output: Path, documents: list[dict[str, str]], folder: Path, names: list[str], context_length: int) -> None:
    source = output.parent / f"{output.name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
    student, *teachers = ({"tokenizer": str(folder / name), "context_length": context_length} for name in names)
    config = {"sources": [str(source)], "student": student, "teachers": teachers, "output": str(output)}
    limits = {"max_reject_fraction": 1.0, "min_coverage": 0.0, "part_bytes": 40_000, "row_group_rows": 16}
    preprocess(PreprocessConfig.model_validate(config | limits), runner=SerialRunner())
    dataset = open_dataset(str(output))
    assert verify_dataset(dataset) == []
    texts = {row["id"]: row["text"] for row in documents}
    adapters = [(load_tokenizer(str(folder / name)), PreTrainedTokenizerFast.from_pretrained(folder / name)) for name in names]
    student_rows = side_frame(dataset).to_dicts()
    for index in range(len(teachers)):
        for row, teacher in zip(student_rows, side_frame(dataset, index).to_dicts(), strict=True):
            if teacher["input_ids"] is None:
                continue
            expected = slow_document([adapters[0], adapters[index + 1]], texts[row["sample_id"]], context_length)
            place = f"{names[0]} and {names[index + 1]}, {row['sample_id']}"
            assert row["input_ids"] == expected.student_ids, place
            assert teacher["input_ids"] == expected.teacher_ids, place
            assert teacher["route"] == expected.route, place
            assert teacher["student_chunk_id"] == expected.student_chunk_id, place
            assert teacher["teacher_chunk_id"] == expected.teacher_chunk_id, place
            assert len(teacher["pair_is_correct"]) == expected.num_chunks, place
            if expected.route == "byte":
                assert all(teacher["pair_is_correct"]), place


def udhr(count: int) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in UDHR.read_text(encoding="utf-8").splitlines()]
    hard = [{"id": f"hard-{index}", "text": text} for index, text in enumerate(HARD)]
    return [*hard, *rows[:: len(rows) // count]]


@pytest.mark.parametrize(
    ("student", "context_length"),
    [("chatml_bpe", 4096), ("chatml_bpe", 60), ("spm_bpe", 4096), ("unigram_nfkc", 60), ("wordpiece_lower", 4096)],
)
def test_bundled_tokenizers_in_every_role(tmp_path: Path, student: str, context_length: int) -> None:
    others = [name for name in ("chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower") if name != student]
    check(tmp_path / "out", udhr(16), BUNDLED, [student, *others], context_length)


@pytest.mark.slow
def test_production_tokenizers(tmp_path: Path, real_tokenizer_folder: Path) -> None:
    documents = udhr(24)
    shared = os.environ.get("XTOK_SHARED")
    if shared:
        lines = (Path(shared) / "data" / "texts.jsonl").read_text(encoding="utf-8").split("\n")
        documents += [json.loads(line) for line in lines if line]
    names = ["qwen3", "llama3_2", "gpt_oss", "mistral_nemo", "deepseek_v4", "mistral_v3_spm"]
    check(tmp_path / "out", documents, real_tokenizer_folder, names, 2048)
