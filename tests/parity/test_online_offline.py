"""The online collator and the loader of the published shards give equal batches, bit for bit, for the same rows.

Bundled UDHR texts and tokenizers of four kinds, with texts that need every route; XTOK_SHARED=<folder> adds `data/texts.jsonl`
with four production tokenizers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from schemas.config import ModelSide, PreprocessConfig
from tests.unit.loader.synthetic import assert_equal_batches
from xtok.align import TokenAligner
from xtok.batch import DatumSpec
from xtok.collate import CrossTokenizerCollator, CrossTokenizerCollatorConfig
from xtok.errors import RowRefused
from xtok.loader import AlignedShardLoader
from xtok.shards.pipeline import preprocess

HARD_TEXTS = [
    "a",
    " ",
    "  two blanks before\tand a tab\r\n\r\n",
    "cafe\u0301 and café, ﬁne ligatures, Ångström, ①②③",
    "🏳️‍🌈 family 👨‍👩‍👧‍👦 and a lone \ufe0f",
    "<s> literal marks </s> <|im_end|> <unk> [CLS]",
    "日本語のテキスト、한국어 텍스트, नमस्ते, العربية",
    "NUL \x00 inside, U+2028 \u2028 and U+0085 \x85",
    "x" * 3000,
    "_foo foo  _ foo ▁ ▁▁",
]


@dataclass(frozen=True)
class Setup:
    """Folders of tokenizers (student first) with context lengths, and texts with loss multipliers."""

    tokenizers: list[Path]
    context_lengths: list[int]
    add_special_tokens: list[bool]
    rows: list[dict[str, object]]


def bundled(repository: Path) -> Setup:
    folder = repository / "infra" / "bundled" / "tokenizers"
    lines = (repository / "infra" / "bundled" / "udhr.jsonl").read_text(encoding="utf-8").split("\n")
    texts = [json.loads(line)["text"] for line in lines if line][::4] + HARD_TEXTS
    rows: list[dict[str, object]] = [
        {"id": f"row-{n}", "text": text, "weight": [1.0, 0.25, 0.0][n % 3]} for n, text in enumerate(texts)
    ]
    names = ["chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower"]
    return Setup([folder / name for name in names], [192, 300, 256, 160], [True, True, True, True], rows)


def shared(tokenizers: Path) -> Setup:
    lines = (Path(os.environ["XTOK_SHARED"]) / "data" / "texts.jsonl").read_bytes().split(b"\n")
    texts = [json.loads(line)["text"] for line in lines[:400] if line] + HARD_TEXTS
    rows: list[dict[str, object]] = [{"id": f"row-{n}", "text": text, "weight": 1.0} for n, text in enumerate(texts)]
    names = ["qwen3", "llama3_2", "gpt_oss", "mistral_nemo", "deepseek_v4", "mistral_v3_spm"]
    return Setup(
        [tokenizers / name for name in names], [512, 480, 512, 700, 512, 600], [True, True, False, True, True, False], rows
    )


@pytest.fixture(
    scope="module",
    params=["bundled", *([pytest.param("shared", marks=pytest.mark.slow)] if os.environ.get("XTOK_SHARED") else [])],
)
def setup(request: pytest.FixtureRequest, repository: Path) -> Setup:
    return bundled(repository) if request.param == "bundled" else shared(request.getfixturevalue("real_tokenizer_folder"))


@pytest.fixture(scope="module")
def dataset(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Published by the real pipeline; the last teacher is the student's own tokenizer."""
    folder = tmp_path_factory.mktemp("parity")
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in setup.rows), encoding="utf-8")
    sides = [
        ModelSide(tokenizer=str(path), context_length=length, add_special_tokens=specials)
        for path, length, specials in zip(setup.tokenizers, setup.context_lengths, setup.add_special_tokens, strict=True)
    ]
    output = str(folder / "aligned")
    preprocess(
        PreprocessConfig(
            sources=(str(source),),
            loss_multiplier_field="weight",
            student=sides[0],
            teachers=(*sides[1:], sides[0]),
            output=output,
            part_bytes=60_000,
            row_group_rows=16,
            workers=2,
            min_coverage=0.0,
            max_reject_fraction=0.5,
        )
    )
    return output


@pytest.fixture(scope="module")
def collator(setup: Setup) -> CrossTokenizerCollator:
    tokenizers: list[PreTrainedTokenizerBase] = [AutoTokenizer.from_pretrained(path) for path in setup.tokenizers]
    num_teachers = len(tokenizers)  # the last one has the student's tokenizer
    return CrossTokenizerCollator(
        config=CrossTokenizerCollatorConfig(),
        student_tokenizer=tokenizers[0],
        teacher_tokenizers=[*tokenizers[1:], None],
        aligners=[*(TokenAligner(tokenizers[0], teacher) for teacher in tokenizers[1:]), None],
        ctx_length_student=setup.context_lengths[0],
        ctx_length_teachers=[*setup.context_lengths[1:], setup.context_lengths[0]],
        drop_first_assistant_chunk_kl_by_teacher=[False] * num_teachers,
        make_seq_div_by_student=7,
        make_seq_div_by_teachers=[16] * num_teachers,
        add_special_tokens_student=setup.add_special_tokens[0],
        add_special_tokens_teachers=[*setup.add_special_tokens[1:], setup.add_special_tokens[0]],
    )


def datum(setup: Setup, idx: int) -> DatumSpec:
    row = setup.rows[idx]
    return {"message_log": [{"role": "user", "content": row["text"]}], "idx": idx, "loss_multiplier": float(str(row["weight"]))}


def test_batches_are_equal_bit_for_bit(setup: Setup, dataset: str, collator: CrossTokenizerCollator) -> None:
    num_teachers = len(setup.tokenizers)
    loader = AlignedShardLoader(
        dataset,
        batch_size=8,
        pad_to="context",
        pad_divisor=7,
        teacher_pad_divisors=[16] * num_teachers,
        student_tokenizer=collator.student_tokenizer,
        teacher_tokenizers=[*collator.teacher_tokenizers[:-1], collator.student_tokenizer],
    )
    num_rows = 0
    truncated = 0
    for batch in loader:
        online = collator([datum(setup, idx) for idx in batch["idx"]])
        assert_equal_batches(batch, online)
        num_rows += batch.size
        truncated += int((batch["input_lengths"] == setup.context_lengths[0]).sum())
    assert num_rows == len(loader) * 8
    assert num_rows > 0.9 * len(setup.rows)
    assert truncated > 0
    # The parity would mean little if every row took the same way.
    unverified = [totals.num_unverified_rows for totals in loader.dataset.manifest.teacher_totals[: len(setup.tokenizers) - 1]]
    assert sum(unverified) > 0
    assert min(unverified) < num_rows


def test_rows_that_are_left_out_are_those_the_collator_refuses(
    setup: Setup, dataset: str, collator: CrossTokenizerCollator
) -> None:
    loader = AlignedShardLoader(dataset, batch_size=1)
    kept = {idx for batch in loader for idx in batch["idx"]}
    left_out = set(range(len(setup.rows))) - kept
    hard = set(range(len(setup.rows) - len(HARD_TEXTS), len(setup.rows)))
    refused = set()
    for idx in sorted(left_out | hard):
        try:
            collator([datum(setup, idx)])
        except RowRefused:
            refused.add(idx)
    assert refused == left_out
    # Byte-level vocabularies take every text; WordPiece, among the bundled ones, finds nothing in a blank.
    assert bool(left_out) == any(path.name == "wordpiece_lower" for path in setup.tokenizers)
