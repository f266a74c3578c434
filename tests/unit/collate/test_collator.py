"""The collator in text mode against transformers' own tokenization, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from xtok.align import TokenAligner
from xtok.batch import BatchedDataDict, DatumSpec
from xtok.collate import CrossTokenizerCollator, CrossTokenizerCollatorConfig
from xtok.collate.collator import ALIGNMENT_FIELDS
from xtok.errors import ConfigError, RowRefused

TEXTS = [
    "All human beings are born free and equal.",
    "short",
    "Всі люди народжуються вільними і рівними у своїй гідності та правах.",
    "naïve café 日本",
]
NAMES = ["chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower"]


@pytest.fixture(scope="module")
def tokenizers(repository: Path) -> dict[str, PreTrainedTokenizerBase]:
    folder = repository / "infra" / "bundled" / "tokenizers"
    return {name: AutoTokenizer.from_pretrained(folder / name) for name in NAMES}


def datum(text: Any, idx: int = 0, **more: Any) -> DatumSpec:
    return {"message_log": [{"role": "user", "content": text}], "idx": idx, **more}  # type: ignore[typeddict-item]


def arguments(tokenizers: dict[str, PreTrainedTokenizerBase], **changes: Any) -> dict[str, Any]:
    student, teacher = tokenizers["chatml_bpe"], tokenizers["spm_bpe"]
    return {
        "config": CrossTokenizerCollatorConfig(),
        "student_tokenizer": student,
        "teacher_tokenizers": [teacher, None],
        "aligners": [TokenAligner(student, teacher), None],
        "ctx_length_student": 16,
        "ctx_length_teachers": [24, 16],
        "drop_first_assistant_chunk_kl_by_teacher": [False, False],
    } | changes


def make(tokenizers: dict[str, PreTrainedTokenizerBase], **changes: Any) -> CrossTokenizerCollator:
    return CrossTokenizerCollator(**arguments(tokenizers, **changes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ctx_length", [6, 17, 200])
@pytest.mark.parametrize("specials", [True, False])
def test_tokenizes_and_cuts_as_transformers_does(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, ctx_length: int, specials: bool
) -> None:
    tokenizer = tokenizers[name]
    ids, mask, offsets = CrossTokenizerCollator._tokenize_batch(TEXTS, tokenizer, ctx_length, 8, add_special_tokens=specials)
    width = -(-ctx_length // 8) * 8
    assert ids.shape == mask.shape == (len(TEXTS), width)
    assert offsets.shape == (len(TEXTS), width, 2)
    assert ids.dtype == mask.dtype == offsets.dtype == torch.int64
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    copy = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    for row, text in enumerate(TEXTS):
        wanted = copy(text, truncation=True, max_length=ctx_length, add_special_tokens=specials, return_offsets_mapping=True)
        real = len(wanted["input_ids"])
        assert ids[row].tolist() == wanted["input_ids"] + [pad] * (width - real)
        assert mask[row].tolist() == [1] * real + [0] * (width - real)
        spans = [tuple(span) for span in wanted["offset_mapping"]]
        assert [tuple(span) for span in offsets[row].tolist()] == spans + [(0, 0)] * (width - real)


def test_keys_dtypes_and_shapes(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    batch = make(tokenizers, make_seq_div_by_student=7, make_seq_div_by_teachers=[10, 1])(
        [datum(text, idx, **({"loss_multiplier": 0.5} if idx == 1 else {})) for idx, text in enumerate(TEXTS)]
    )
    assert type(batch) is BatchedDataDict
    assert list(batch) == [
        "input_ids",
        "input_lengths",
        "token_mask",
        "sample_mask",
        "idx",
        "teacher_0_input_ids",
        "teacher_0_input_lengths",
        "teacher_0_token_mask",
        *(f"alignment_0_{name}" for name in ALIGNMENT_FIELDS),
    ]
    assert batch["idx"] == [0, 1, 2, 3]
    assert batch["sample_mask"].dtype == torch.float32
    assert batch["sample_mask"].tolist() == [1.0, 0.5, 1.0, 1.0]
    assert batch["input_ids"].shape == batch["token_mask"].shape == batch["alignment_0_student_chunk_id"].shape == (4, 21)
    assert batch["teacher_0_input_ids"].shape == batch["alignment_0_teacher_exact_partition_mask"].shape == (4, 30)
    assert torch.equal(batch["input_lengths"], batch["token_mask"].sum(1))
    for key in ("input_ids", "input_lengths", "token_mask", "alignment_0_student_chunk_id", "alignment_0_num_chunks"):
        assert batch[key].dtype == torch.int64, key
    for key in ("pair_valid", "pair_is_correct", "student_exact_partition_mask"):
        assert batch[f"alignment_0_{key}"].dtype == torch.bool, key
    assert batch["alignment_0_num_chunks"].max() == batch["alignment_0_pair_valid"].shape[1]
    assert batch.slice(1, 3).size == 2


def test_teacher_without_an_aligner_adds_nothing(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    batch = make(tokenizers, aligners=[None, None])([datum(TEXTS[0])])
    assert list(batch) == ["input_ids", "input_lengths", "token_mask", "sample_mask", "idx"]


def test_special_tokens_are_switched_per_side(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    teacher = tokenizers["spm_bpe"]
    plain = make(tokenizers, add_special_tokens_teachers=[False, True])([datum("short")])
    whole = make(tokenizers)([datum("short")])
    assert torch.equal(plain["input_ids"], whole["input_ids"])
    num_added = teacher.num_special_tokens_to_add()
    assert num_added > 0
    assert int(whole["teacher_0_input_lengths"] - plain["teacher_0_input_lengths"]) == num_added


def test_tokenizers_are_left_as_they_are(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    used = [tokenizers["chatml_bpe"], tokenizers["spm_bpe"]]
    for tokenizer in used:  # a user's own limits must neither matter nor change
        tokenizer.backend_tokenizer.enable_truncation(5)
        tokenizer.backend_tokenizer.enable_padding(length=9)
    before = [(tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token) for tokenizer in used]
    batch = make(tokenizers)([datum(TEXTS[0])])
    assert int(batch["input_lengths"]) > 5
    assert [(tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token) for tokenizer in used] == before
    for tokenizer in used:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()


def test_without_a_pad_token_eos_pads(repository: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(repository / "infra" / "bundled" / "tokenizers" / "spm_bpe")
    tokenizer.pad_token = None
    ids, mask, _ = CrossTokenizerCollator._tokenize_batch(["short"], tokenizer, 40, 1)
    assert (ids[mask == 0] == tokenizer.eos_token_id).all()
    assert tokenizer.pad_token is None


@pytest.mark.parametrize(
    ("row", "reason", "side"),
    [
        (datum(None), "text_not_string", "source"),
        (datum(3), "text_not_string", "source"),
        (datum(""), "empty_text", "source"),
        (datum("half \ud83d of a pair"), "lone_surrogate", "source"),
        ({"message_log": [], "idx": 0}, "missing_text", "source"),
        ({"idx": 0}, "missing_text", "source"),
        ({"message_log": ["content"], "idx": 0}, "missing_text", "source"),
        ({"message_log": [{"role": "user"}], "idx": 0}, "missing_text", "source"),
        ({"message_log": [{"content": "a"}, {"content": "b"}], "idx": 0}, "missing_text", "source"),
    ],
)
def test_bad_rows_are_refused(tokenizers: dict[str, PreTrainedTokenizerBase], row: Any, reason: str, side: str) -> None:
    with pytest.raises(RowRefused) as refused:
        make(tokenizers)([datum("good", 1), row])
    assert (refused.value.reason, refused.value.side, refused.value.stage) == (reason, side, "read")
    assert "idx 0" in refused.value.message


def test_text_without_tokens_is_refused_by_its_side(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    student, teacher = tokenizers["chatml_bpe"], tokenizers["wordpiece_lower"]
    collator = make(tokenizers, teacher_tokenizers=[None, teacher], aligners=[None, TokenAligner(student, teacher)])
    with pytest.raises(RowRefused) as refused:
        collator([datum(" ")])  # WordPiece drops blanks
    assert (refused.value.reason, refused.value.side, refused.value.stage) == ("no_tokens", "teacher=1", "tokenize")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": CrossTokenizerCollatorConfig(num_packed_rows=2)}, "num_packed_rows is 2"),
        ({"config": CrossTokenizerCollatorConfig(native_thinking_alignment=True)}, "native_thinking_alignment"),
        ({"config": CrossTokenizerCollatorConfig(mode="chat", native_thinking_alignment=True)}, "native_thinking_alignment"),
        ({"config": CrossTokenizerCollatorConfig(mode="chat", kd_alignment_regions=["eot"])}, "kd_alignment_regions"),
        (
            {
                "config": CrossTokenizerCollatorConfig(
                    mode="chat", include_thinking_in_loss=True, native_thinking_alignment=True, kd_alignment_regions=[]
                )
            },
            "kd_alignment_regions is empty",
        ),
        ({"teacher_tokenizers": [None]}, "teacher_tokenizers has 1 entries for 2"),
        ({"teacher_tokenizers": [None, None]}, r"teacher_tokenizers\[0\] is None"),
        ({"ctx_length_teachers": [8]}, "ctx_length_teachers has 1 entries"),
        ({"drop_first_assistant_chunk_kl_by_teacher": []}, "drop_first_assistant_chunk_kl_by_teacher has 0"),
        ({"make_seq_div_by_teachers": [1, 1, 1]}, "make_seq_div_by_teachers has 3"),
        ({"add_special_tokens_teachers": [True]}, "add_special_tokens_teachers has 1"),
        ({"make_seq_div_by_student": 0}, "make_seq_div_by_student must be at least 1, got 0"),
        ({"ctx_length_student": 0}, "ctx_length_student is 0"),
        ({"ctx_length_teachers": [1, 16]}, r"ctx_length_teachers\[0\] is 1"),
    ],
)
def test_construction_refuses(tokenizers: dict[str, PreTrainedTokenizerBase], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        make(tokenizers, **changes)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctx_length_student": 16.0}, "ctx_length_student must be a whole number, got 16.0"),
        ({"ctx_length_student": None}, "ctx_length_student must be a whole number, got None"),
        ({"ctx_length_student": int(1e30)}, "ctx_length_student must be at most"),  # transformers' "no limit"
        ({"ctx_length_teachers": 24}, "ctx_length_teachers must be a list with one entry for each teacher, got 24"),
        ({"ctx_length_teachers": [24.5, 16]}, r"ctx_length_teachers\[0\] must be a whole number"),
        ({"make_seq_div_by_student": 1.5}, "make_seq_div_by_student must be a whole number"),
        ({"make_seq_div_by_teachers": [1, True]}, r"make_seq_div_by_teachers\[1\] must be a whole number, got True"),
        ({"make_seq_div_by_teachers": []}, "make_seq_div_by_teachers has 0 entries for 2"),
        ({"teacher_tokenizers": None}, "teacher_tokenizers must be a list"),
        ({"aligners": ["spm_bpe", None]}, r"aligners\[0\] must be a TokenAligner or None, got a str"),
        ({"config": {"mode": "text"}}, "config must be a CrossTokenizerCollatorConfig, got a dict"),
    ],
)
def test_what_is_no_number_or_no_list_is_told_at_construction(
    tokenizers: dict[str, PreTrainedTokenizerBase], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tokenizers, **changes)


def test_an_aligner_of_other_tokenizers_is_refused(tokenizers: dict[str, PreTrainedTokenizerBase], repository: Path) -> None:
    student, teacher, other = (tokenizers[name] for name in ("chatml_bpe", "spm_bpe", "unigram_nfkc"))
    for aligner, named in (
        (TokenAligner(teacher, student), "student .*spm_bpe"),
        (TokenAligner(student, other), "teacher .*unigram_nfkc"),
    ):
        with pytest.raises(ConfigError, match=rf"aligners\[0\] was made for the {named}, which spells other tokens"):
            make(tokenizers, aligners=[aligner, None])
    again = AutoTokenizer.from_pretrained(repository / "infra" / "bundled" / "tokenizers" / "spm_bpe")
    again.add_special_tokens({"pad_token": "<padding>"})
    again.chat_template = "{{ messages }}"
    assert make(tokenizers, aligners=[TokenAligner(student, again), None])([datum("x")]).size == 1


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, "1", [1.0], 1e39])
def test_weights_that_ruin_a_loss_are_refused_as_offline(tokenizers: dict[str, PreTrainedTokenizerBase], weight: Any) -> None:
    with pytest.raises(RowRefused, match="row with idx 7: loss_multiplier is") as caught:
        make(tokenizers)([datum("x", idx=7, loss_multiplier=weight)])
    assert caught.value.reason == "invalid_loss_multiplier"


def test_numbers_of_rows_may_come_from_any_library(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    rows = [datum("x", idx=torch.tensor(3), loss_multiplier=torch.tensor(0.5)), datum("y", loss_multiplier=None)]  # type: ignore[arg-type]
    batch = make(tokenizers)([*rows, datum("z", loss_multiplier=0)])
    assert batch["idx"] == [3, 0, 0]
    assert [type(idx) for idx in batch["idx"]] == [int] * 3
    assert batch["sample_mask"].tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"message_log": []}, "row 0 of the batch must be a DatumSpec"),
        ("a text", "row 0 of the batch must be a DatumSpec"),
        (datum("x", idx=1.5), "idx of row 0 of the batch must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (datum("x", idx=None), "idx of row 0 of the batch must be a whole number, got None"),  # type: ignore[arg-type]
    ],
)
def test_a_row_without_a_number_is_named_by_its_place(
    tokenizers: dict[str, PreTrainedTokenizerBase], row: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tokenizers)([row])


def test_config_refuses_what_it_does_not_know() -> None:
    for wrong in ({"mode": "images"}, {"num_packed_rows": 0}, {"kd_alignment_regions": ["preamble"]}, {"pack": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CrossTokenizerCollatorConfig(**wrong)


def test_empty_batch_is_refused(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    with pytest.raises(ValueError, match="empty"):
        make(tokenizers)([])


def test_chat_batches_are_padded_to_the_longest_row() -> None:
    ids, attention, offsets, mask = CrossTokenizerCollator._pad_chat_batch(
        [[5, 6, 7], [8]], [[(0, 1), (1, 2), (2, 4)], [(0, 3)]], [[0, 1, 1], [1]], 9, 4
    )
    assert ids.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert attention.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert mask.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert offsets.tolist() == [[[0, 1], [1, 2], [2, 4], [0, 0]], [[0, 3], [0, 0], [0, 0], [0, 0]]]
    assert {tensor.dtype for tensor in (ids, attention, offsets, mask)} == {torch.int64}
    with pytest.raises(ValueError, match="mask_list"):
        CrossTokenizerCollator._pad_chat_batch([[5, 6]], [[(0, 1), (1, 2)]], [[0]], 9, 4)
