"""Chats, online and offline: the collator and the loader of the published shards give equal batches, bit for bit.

Bundled chats and hard cases on bundled tokenizers; XTOK_SHARED=<folder> adds 677 real conversations on four production tokenizers
with their own templates. In passing: no row is lost, and what is supervised decodes to the final content.
"""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from schemas.config import ModelSide, PreprocessConfig
from tests.conftest import REPOSITORY
from tests.unit.loader.synthetic import assert_equal_batches
from xtok.align import TokenAligner
from xtok.batch import DatumSpec
from xtok.chat import conversation_from_row
from xtok.collate import CrossTokenizerCollator, CrossTokenizerCollatorConfig
from xtok.errors import RowRefused
from xtok.loader import AlignedShardLoader
from xtok.shards.inspect import rejects_frame, side_frame
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import SerialRunner
from xtok.shards.read import Dataset, open_dataset
from xtok.shards.sides import load_side
from xtok.shards.verify import verify_dataset

DAY = date(2025, 1, 2)
BUNDLED = REPOSITORY / "infra" / "bundled"


def turns(*contents: str | None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


HARD: list[dict[str, Any]] = [
    {"messages": turns("Say: It is late.", "It is late.")},
    {"messages": turns("again", "Same.", "and again", "Same.")},
    {"messages": turns("blanks", "  two before, one line end after\n")},
    {"messages": turns("one", "x")},
    {"messages": turns("emoji", "👩‍👩‍👧‍👦🇨🇿🏳️‍🌈")},
    {"messages": turns("rtl", "السلام عليكم يا صديقي، שלום לכולם")},
    {"messages": turns("composed", "cafe\u0301, ﬁne, ①②③ Å")},
    {"messages": turns("mark", "the mark <|im_end|> ends a turn, </s> too")},
    {"messages": turns("think", "<think>\nfirst this\n</think>\n\nThen that.")},
    {"messages": turns("literal", "write <think> to begin")},
    {"messages": turns("unfinished", "answer", "and?")},
    {"messages": turns("empty", "  \n")},
    {"messages": turns("none", None)},
    {"messages": [{"role": "system", "content": "Be brief."}, *turns("hi", "Hello.")]},
    {"messages": [{"role": "developer", "content": "Be brief."}, *turns("hi", "Hello.")]},
    {"messages": [*turns("parts"), {"role": "assistant", "content": [{"type": "text", "text": text} for text in ("Two ", "parts.")]}]},
    {"messages": [{"role": "nobody", "content": "?"}]},
    {"messages": turns("long", "word " * 400)},
    {"messages": [*turns("why"), {"role": "assistant", "content": "So.", "reasoning_content": "Because."}]},
    {"messages": turns("off", "ok"), "chat_template_kwargs": {"enable_thinking": False}},
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration, for both paths. sides: (tokenizer, fields of ModelSide), the student first."""

    options: dict[str, Any]
    sides: list[tuple[str, dict[str, Any]]]
    drop_first: list[bool]


KD = {"include_thinking_in_loss": True, "native_thinking_alignment": True}
TEACHERS = [("spm_bpe", {"context_length": 300}), ("unigram_nfkc", {"context_length": 280})]
CASES = {
    "ordinary": Case({}, [("chatml_bpe", {"context_length": 256}), *TEACHERS], [False, False]),
    "drop first, sides of their own kind": Case(
        {},
        [
            ("unigram_nfkc", {"allow_special_tokens_in_content": True}),
            ("spm_bpe", {"accept_dropped_reasoning": True}),
            ("chatml_bpe", {"chat_template_kwargs": {"enable_thinking": False}}),
        ],
        [True, False],
    ),
    "thinking": Case({"include_thinking_in_loss": True}, [("chatml_bpe", {}), *TEACHERS], [False, True]),
    "native": Case(KD, [("chatml_bpe", {}), ("unigram_nfkc", {})], [False]),
    "native regions": Case(
        KD | {"kd_alignment_regions": ["close", "answer"]}, [("unigram_nfkc", {}), ("chatml_bpe", {})], [True]
    ),
}
REAL = ["qwen3", "llama3_2", "gpt_oss", "deepseek_v4"]
REAL_CASES = {
    "real ordinary": Case({}, [(name, {"context_length": 2048}) for name in REAL], [False, True, False]),
    "real roles turned": Case(
        {},
        [(name, {"context_length": 1500, "accept_dropped_reasoning": True}) for name in REAL[::-1]],
        [False, False, False],
    ),
}


@dataclass(frozen=True)
class Built:
    """A case with its rows, dataset and collator."""

    case: Case
    rows: list[dict[str, Any]]
    dataset: Dataset
    collator: CrossTokenizerCollator
    tokenizers: list[PreTrainedTokenizerBase] = field(repr=False)


def rows_of(*files: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
    return [row | {"id": f"row-{n}", "weight": [1.0, 0.25][n % 2]} for n, row in enumerate([*rows, *HARD])]


def with_real() -> list[Any]:
    extra = [pytest.param(name, marks=pytest.mark.slow) for name in REAL_CASES] if os.environ.get("XTOK_SHARED") else []
    return [*CASES, *extra]


@pytest.fixture(scope="module", params=with_real())
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    is_real = request.param in REAL_CASES
    case = (REAL_CASES if is_real else CASES)[request.param]
    folder = request.getfixturevalue("real_tokenizer_folder") if is_real else BUNDLED / "tokenizers"
    extra = [Path(os.environ["XTOK_SHARED"]) / "data" / "chats.jsonl"] if is_real else []
    rows = rows_of(BUNDLED / "chats.jsonl", *extra)
    output = tmp_path_factory.mktemp("chats")
    (output / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sides = [ModelSide(tokenizer=str(folder / name), **fields) for name, fields in case.sides]
    config = PreprocessConfig.model_validate(
        {
            "mode": "chat",
            "sources": [str(output / "in.jsonl")],
            "loss_multiplier_field": "weight",
            "student": sides[0],
            "teachers": [*sides[1:], sides[0]],
            "output": str(output / "aligned"),
            "part_bytes": 300_000 if is_real else 10_000,
            "row_group_rows": 8,
            "render_date": DAY,
            "max_reject_fraction": 1.0,
            "min_coverage": 0.0,
            "drop_first_assistant_chunk_kl_by_teacher": [*case.drop_first, False],
            **case.options,
        }
    )
    preprocess(config, runner=SerialRunner())
    tokenizers: list[PreTrainedTokenizerBase] = [AutoTokenizer.from_pretrained(folder / name) for name, _ in case.sides]
    collator = CrossTokenizerCollator(
        config=CrossTokenizerCollatorConfig(mode="chat", **case.options),
        student_tokenizer=tokenizers[0],
        teacher_tokenizers=[*tokenizers[1:], None],
        aligners=[*(TokenAligner(tokenizers[0], teacher) for teacher in tokenizers[1:]), None],
        ctx_length_student=sides[0].context_length,
        ctx_length_teachers=[side.context_length for side in (*sides[1:], sides[0])],
        drop_first_assistant_chunk_kl_by_teacher=[*case.drop_first, False],
        make_seq_div_by_student=7,
        make_seq_div_by_teachers=[16] * len(sides),
        render_date=DAY,
        chat_template_kwargs_student=sides[0].chat_template_kwargs,
        chat_template_kwargs_teachers=[*(side.chat_template_kwargs for side in sides[1:]), None],
        allow_special_tokens_in_content_student=sides[0].allow_special_tokens_in_content,
        allow_special_tokens_in_content_teachers=[*(side.allow_special_tokens_in_content for side in sides[1:]), False],
        accept_dropped_reasoning_student=sides[0].accept_dropped_reasoning,
        accept_dropped_reasoning_teachers=[*(side.accept_dropped_reasoning for side in sides[1:]), False],
    )
    return Built(case, rows, open_dataset(config.output), collator, tokenizers)


def datum(row: dict[str, Any], idx: int) -> DatumSpec:
    """A source row as a data set of the training side would give it."""
    if "completion" in row:
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    else:
        messages = row.get("messages") or row["conversations"]
    return {
        "message_log": messages,
        "idx": idx,
        "loss_multiplier": row["weight"],
        "tools": row.get("tools"),
        "chat_template_kwargs": row.get("chat_template_kwargs"),
    }


def test_batches_are_equal_bit_for_bit(built: Built) -> None:
    loader = AlignedShardLoader(
        built.dataset.url,
        batch_size=4,
        pad_to="longest",
        pad_divisor=7,
        teacher_pad_divisors=[16] * len(built.tokenizers),
        student_tokenizer=built.tokenizers[0],
        teacher_tokenizers=[*built.tokenizers[1:], built.tokenizers[0]],
        drop_last=False,
    )
    num_rows = 0
    for batch in loader:
        rows = [idx for idx in batch["idx"] if idx >= 0]
        batch = batch.slice(0, len(rows)) if len(rows) < batch.size else batch
        assert_equal_batches(batch, built.collator([datum(built.rows[idx], idx) for idx in rows]))
        num_rows += len(rows)
    assert num_rows >= 0.5 * len(built.rows)


def test_no_row_is_lost_and_the_refusals_are_the_same(built: Built) -> None:
    manifest = built.dataset.manifest
    assert verify_dataset(built.dataset) == []
    assert manifest.num_rows + manifest.num_rejects == manifest.num_source_rows == len(built.rows)
    rejects = rejects_frame(built.dataset)
    assert rejects["side"].n_unique() > 1
    refused: dict[int, list[dict[str, Any]]] = {}
    for reject in rejects.to_dicts():
        refused.setdefault(reject["line"] - 1, []).append(reject)
    for idx, found in refused.items():
        with pytest.raises(RowRefused) as online:
            built.collator([datum(built.rows[idx], idx)])
        first = found[0]
        assert (online.value.reason, online.value.side, online.value.stage) == (first["reason"], first["side"], first["stage"])
        assert online.value.message == f"row with idx {idx}: {first['message']}"


def test_what_is_supervised_is_the_final_content(built: Built) -> None:
    manifest = built.dataset.manifest
    with_thinking = bool(built.case.options.get("include_thinking_in_loss"))
    frames = {0: side_frame(built.dataset)} | {
        index + 1: side_frame(built.dataset, index) for index, side in enumerate(manifest.teachers) if not side.same_as_student
    }
    for position, frame in frames.items():
        name, fields = built.case.sides[position]
        adapter = load_side(ModelSide(tokenizer=str(Path(built.tokenizers[position].name_or_path)), **fields))
        checked = 0
        for row in frame.iter_rows(named=True):
            if row["input_ids"] is None:
                continue
            final = conversation_from_row(built.rows[row["idx"]]).final
            regions = {region["name"]: range(region["start"], region["end"]) for region in row["regions"]}
            in_regions = {place for places in regions.values() for place in places}
            masked = {place for place, flag in enumerate(row["token_mask"]) if flag}
            assert in_regions <= masked
            answer = plain(adapter.decode([row["input_ids"][place] for place in regions["answer"]]))
            content = (
                final["content"].split("</think>")[-1] if final["content"].lstrip().startswith("<think>") else final["content"]
            )
            wanted = plain(content)
            assert answer == wanted if "tool_calls" not in final else answer.startswith(wanted), (name, row["sample_id"])
            if with_thinking and "reasoning" in regions:
                reasoning = final.get("reasoning_content") or final["content"].split("</think>")[0].split("<think>")[1]
                assert plain(adapter.decode([row["input_ids"][place] for place in regions["reasoning"]])) == plain(reasoning)
                assert plain(adapter.decode([row["input_ids"][place] for place in regions["close"]])) == "</think>"
            checked += 1
        assert checked >= 0.5 * len(built.rows)


def plain(text: str) -> str:
    """Blanks and composition aside, which a normalizing tokenizer changes."""
    return "".join(unicodedata.normalize("NFKC", text).split())
