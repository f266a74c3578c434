"""The collator in chat mode: keys and shapes, options, and what it refuses. Equality with the shards: tests/parity."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.unit.chat.support import CLOCK, PLAIN, assistant, talk, user
from xtok.align import TokenAligner
from xtok.batch import DatumSpec
from xtok.chat import ChatRenderer, ChatSide, RenderedChatDocument, render_document
from xtok.collate import CrossTokenizerCollator, CrossTokenizerCollatorConfig
from xtok.collate.collator import ALIGNMENT_FIELDS
from xtok.errors import ConfigError, RowRefused
from xtok.tokenizers import adapt_tokenizer

DAY = date(2025, 1, 2)
NATIVE = {"include_thinking_in_loss": True, "native_thinking_alignment": True}
FINAL = assistant("It is late.", reasoning_content="Past ten.")


def load(repository: Path, name: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(repository / "infra" / "bundled" / "tokenizers" / name)
    return tokenizer


@pytest.fixture
def tokenizers(repository: Path) -> list[PreTrainedTokenizerBase]:
    return [load(repository, "chatml_bpe"), load(repository, "unigram_nfkc")]


def make(
    tokenizers: list[PreTrainedTokenizerBase], options: dict[str, Any] | None = None, **changes: Any
) -> CrossTokenizerCollator:
    student, teacher = tokenizers
    arguments: dict[str, Any] = {
        "config": CrossTokenizerCollatorConfig(mode="chat", **(options or {})),
        "student_tokenizer": student,
        "teacher_tokenizers": [teacher, None],
        "aligners": [TokenAligner(student, teacher), None],
        "ctx_length_student": 256,
        "ctx_length_teachers": [256, 256],
        "drop_first_assistant_chunk_kl_by_teacher": [False, False],
        "render_date": DAY,
    }
    return CrossTokenizerCollator(**(arguments | changes))


def datum(*messages: dict[str, Any], idx: int = 0, **more: Any) -> DatumSpec:
    return {"message_log": list(messages), "idx": idx, **more}  # type: ignore[typeddict-item]


def supervised(collator: CrossTokenizerCollator, row: DatumSpec) -> str:
    batch = collator([row])
    return str(collator.student_tokenizer.decode(batch["input_ids"][0][batch["token_mask"][0].bool()]))


def test_keys_dtypes_and_shapes(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    rows = [
        datum(user("q"), assistant("Short."), idx=3),
        datum(user("q"), assistant("A longer answer."), idx=5, loss_multiplier=0.5),
    ]
    batch = make(tokenizers, make_seq_div_by_student=8, make_seq_div_by_teachers=[32, 1])(rows)
    assert batch["idx"] == [3, 5]
    assert batch["sample_mask"].tolist() == [1.0, 0.5]
    longest = int(batch["input_lengths"].max())
    assert batch["input_ids"].shape == (2, -(-longest // 8) * 8)
    assert batch["teacher_0_input_ids"].shape[1] % 32 == 0
    assert {batch[name].dtype for name in ("input_ids", "input_lengths", "token_mask", "teacher_0_token_mask")} == {torch.int64}
    assert {key for key in batch if key.startswith("alignment_")} == {f"alignment_0_{name}" for name in ALIGNMENT_FIELDS}
    assert not any("1" in key for key in batch)
    assert bool((batch["token_mask"].sum(dim=1) < batch["input_lengths"]).all())
    assert bool((batch["input_ids"][0, int(batch["input_lengths"][0]) :] == adapt_tokenizer(tokenizers[0]).pad_token_id).all())
    assert bool((batch["alignment_0_student_chunk_id"][batch["token_mask"] == 0] == -1).all())


def test_a_document_is_what_the_library_renders(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    collator = make(tokenizers)
    messages = [user("¿Qué hora es?"), assistant("Es tarde, señor.")]
    document = collator._render_document(tokenizers[0], datum(*messages), 256, "student")
    assert isinstance(document, RenderedChatDocument)
    side = ChatSide(adapt_tokenizer(tokenizers[0]), name="student", render_date=DAY, context_length=256)
    expected = render_document(ChatRenderer(side), talk(*messages))
    assert document.text == expected.text
    assert np.array_equal(document.input_ids, expected.input_ids)
    assert np.array_equal(document.assistant_mask, expected.assistant_mask)
    assert np.array_equal(document.offsets, expected.offsets)
    start, end = document.content_span
    assert document.text[start:end] == "Es tarde, señor."


def test_thinking_is_in_the_loss_on_request(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    row = datum(user("q"), assistant("<think>\nhm\n</think>\n\nSo."))
    assert supervised(make(tokenizers), row) == "So.<|im_end|>"
    assert supervised(make(tokenizers, {"include_thinking_in_loss": True}), row) == "hm\n</think>\n\nSo.<|im_end|>"
    apart = datum(user("q"), FINAL)
    assert supervised(make(tokenizers), apart) == "It is late.<|im_end|>"
    with pytest.raises(RowRefused) as refused:
        make(tokenizers, {"include_thinking_in_loss": True})([apart])
    assert (refused.value.reason, refused.value.side) == ("needs_native_alignment", "student")
    assert supervised(make(tokenizers, NATIVE), apart).split() == ["Past", "ten.", "</think>It", "is", "late.<|im_end|>"]


@pytest.mark.parametrize("regions", [["reasoning"], ["close", "eot"], ["answer"], ["reasoning", "close", "answer", "eot"]])
def test_regions_take_part_in_kd_as_asked_and_the_mask_stays(
    tokenizers: list[PreTrainedTokenizerBase], regions: list[str]
) -> None:
    row = datum(user("q"), FINAL)
    whole, kept = make(tokenizers, NATIVE)([row]), make(tokenizers, NATIVE | {"kd_alignment_regions": regions})([row])
    assert torch.equal(whole["token_mask"], kept["token_mask"])
    collator = make(tokenizers, NATIVE)
    document = collator._render_document(tokenizers[0], row, 256, "student")
    wanted = {place for region in document.regions if region.name in regions for place in range(region.start, region.end)}
    in_chunk = set(torch.nonzero(kept["alignment_0_student_chunk_id"][0] >= 0).flatten().tolist())
    assert in_chunk == wanted & set(torch.nonzero(whole["alignment_0_student_chunk_id"][0] >= 0).flatten().tolist())
    ids = kept["alignment_0_student_chunk_id"][0]
    assert ids[ids >= 0].unique().tolist() == list(range(int(kept["alignment_0_num_chunks"][0])))


def test_the_first_pair_is_dropped_for_the_teachers_that_ask(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    row = datum(user("q"), assistant("It is late."))
    whole = make(tokenizers)([row])
    dropped = make(tokenizers, drop_first_assistant_chunk_kl_by_teacher=[True, False])([row])
    assert torch.equal(whole["token_mask"], dropped["token_mask"])
    assert int(dropped["alignment_0_num_chunks"]) == int(whole["alignment_0_num_chunks"]) - 1
    left = whole["alignment_0_student_chunk_id"]
    assert torch.equal(dropped["alignment_0_student_chunk_id"], torch.where(left > 0, left - 1, -1))


def test_arguments_of_sides_and_rows_reach_the_templates(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    for tokenizer in tokenizers:
        tokenizer.chat_template = "{{ mood }}|" + PLAIN
    collator = make(
        tokenizers, chat_template_kwargs_student={"mood": "calm"}, chat_template_kwargs_teachers=[{"mood": "gay"}, None]
    )
    rows = [datum(user("q"), assistant("a")), datum(user("q"), assistant("a"), chat_template_kwargs={"mood": "odd"})]
    batch = collator(rows)
    for row, moods in enumerate((("calm", "gay"), ("odd", "odd"))):
        for ids, tokenizer, mood in zip(
            (batch["input_ids"][row], batch["teacher_0_input_ids"][row]), tokenizers, moods, strict=True
        ):
            assert tokenizer.decode(ids).lstrip().startswith(f"{mood}|")


def test_the_date_is_fixed(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    tokenizers[0].chat_template = CLOCK
    row = datum(user("q"), assistant("a"))
    document = make(tokenizers)._render_document(tokenizers[0], row, 256, "student")
    assert document.text.startswith("02 Jan 2025")


def test_rows_are_refused_by_the_side_that_refuses_them(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    good = datum(user("q"), assistant("a"), idx=0)
    long = datum(user("q " * 40), assistant("a"), idx=7)
    for collator, side in (
        (make(tokenizers, ctx_length_student=40), "student"),
        (make(tokenizers, ctx_length_teachers=[40, 256]), "teacher=0"),
    ):
        with pytest.raises(RowRefused, match=r"row with idx 7: .*the context 40") as refused:
            collator([good, long])
        assert (refused.value.reason, refused.value.side, refused.value.stage) == ("overlength", side, "tokenize")
    marked = datum(user("q"), assistant("an <|im_end|> inside"))
    with pytest.raises(RowRefused) as refused:
        make(tokenizers)([marked])
    assert refused.value.reason == "embedded_special_token"
    allowed = make(
        tokenizers, allow_special_tokens_in_content_student=True, allow_special_tokens_in_content_teachers=[True, False]
    )
    assert supervised(allowed, marked) == "an <|im_end|> inside<|im_end|>"
    with pytest.raises(RowRefused) as refused:
        make(tokenizers)([datum(user("q"), {"role": "wizard", "content": "x"}, idx=2)])
    assert (refused.value.reason, refused.value.side) == ("invalid_messages", "source")


def test_dropped_reasoning_is_accepted_by_the_side_that_says_so(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    tokenizers[1].chat_template = PLAIN
    row = datum(user("q"), FINAL)
    with pytest.raises(RowRefused) as refused:
        make(tokenizers)([row])
    assert (refused.value.reason, refused.value.side) == ("dropped_reasoning", "teacher=0")
    accepting = make(tokenizers, accept_dropped_reasoning_teachers=[True, False])
    assert supervised(accepting, row) == "It is late.<|im_end|>"


def test_construction_refuses(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs_teachers has 1 entries for 2"):
        make(tokenizers, chat_template_kwargs_teachers=[{}])
    with pytest.raises(ConfigError, match=r"chat_template_kwargs_teachers\[1\].*needs an aligner"):
        make(tokenizers, chat_template_kwargs_teachers=[None, {"enable_thinking": False}])
    with pytest.raises(ConfigError, match="may not set"):
        make(tokenizers, chat_template_kwargs_student={"messages": []})
    tokenizers[1].chat_template = None
    with pytest.raises(ConfigError, match=r"teacher=0: .*no chat template"):
        make(tokenizers)


def test_a_spawned_worker_collates_the_same(tokenizers: list[PreTrainedTokenizerBase]) -> None:
    collator = make(tokenizers)
    row = datum(user("q"), assistant("It is late."))
    batch = collator([row])
    [again] = DataLoader([row], batch_size=1, collate_fn=collator, num_workers=1, multiprocessing_context="spawn")
    assert all(torch.equal(value, again[key]) for key, value in batch.items() if isinstance(value, torch.Tensor))
