"""What the alignment tests share: texts, tokenizers, truncation, spans of documents as shown to a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies

from xtok.align.byte_readings import document_ranges
from xtok.align.lattice import SpanLookup
from xtok.tokenizers import FlatTokens, TokenizerAdapter, load_tokenizer

BUNDLED = Path(__file__).resolve().parents[3] / "infra" / "bundled"
BUNDLED_NAMES = ("chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower")
REAL_NAMES = ("qwen3", "llama3_2", "gpt_oss", "mistral_nemo", "deepseek_v4", "mistral_v3_spm")
HARD_TEXTS = (
    "", " ", "\n", "a", "  two blanks", "trailing  ", "\t\ttabs\r\nand\r\n\r\nlines\n\n",
    "cafe\u0301 q\u0323\u0307 \u1112\u1161\u11ab", "ｆｕｌｌ ﬁne ①", "👩‍👩‍👧‍👦🇩🇪❤️ 🏽", "漢字かな交じり文。 и кириллица العربية हिन्दी",
    "_foo foo ,bar, \\n \n", "x<|im_end|>y <s> z</s><|endoftext|>", "<s>", "</s> begins", "ends <|endoftext|>", "nul \x00 end",
    "\u2028 and \u0085\u00a0\u3000.", "İstanbul ǅ ß", "▁literal ▁ mark", "a\u0301", "x\u0301\u0301 y",
)  # fmt: skip
FRAGMENTS = strategies.sampled_from(
    (
        " ", "  ", "\n", "\r\n", "\t", ",", ".", "the", " the", "The", "foo", "_foo", "é", "e\u0301", "\u0301", "👩‍👩‍👧",
    "🏽", "\u200d", "漢",
        "字か", "한", "\u1112\u1161\u11ab",
        "ﬁ", "①", "\u00a0", "\u3000", "</s>", "<s>", "<|im_end|>", "<|endoftext|>",
        "[UNK]", "<think>", "\\n", "\x00", "1234", "▁",
    )
)  # fmt: skip
TEXTS = strategies.lists(strategies.one_of(FRAGMENTS, strategies.text(max_size=6)), max_size=14).map("".join)


@cache
def texts() -> tuple[str, ...]:
    """The hard texts and every bundled UDHR document."""
    lines = (BUNDLED / "udhr.jsonl").read_text(encoding="utf-8").split("\n")
    return (*HARD_TEXTS, *(json.loads(line)["text"] for line in lines if line))


@cache
def bundled(name: str) -> TokenizerAdapter:
    """A bundled tokenizer by name."""
    return load_tokenizer(str(BUNDLED / "tokenizers" / name))


@cache
def real(folder: Path, name: str) -> TokenizerAdapter:
    """A production tokenizer by name."""
    return load_tokenizer(str(folder / name))


class Shown:
    """Texts as one model sees them: with added specials, content cut to `limit` tokens, and the span of every token."""

    def __init__(
        self, adapter: TokenizerAdapter, documents: Sequence[str], *, limit: int | None = None, add_special_tokens: bool = True
    ) -> None:
        content, content_spans = adapter.encode_with_spans(list(documents))
        if limit is not None:
            counts = np.minimum(content.lengths, limit)
            position = np.arange(len(content.ids)) - np.repeat(content.offsets[:-1], content.lengths)
            kept = position < np.repeat(counts, content.lengths)
            content = FlatTokens(content.ids[kept], np.append(0, np.cumsum(counts)))
            content_spans = content_spans[kept]
        prefix, suffix = (adapter.prefix_ids, adapter.suffix_ids) if add_special_tokens else (np.empty(0, np.int32),) * 2
        self.adapter = adapter
        self.tokens = content.with_specials(prefix, suffix)
        self.spans = np.zeros((len(self.tokens.ids), 2), dtype=np.int32)
        position = np.arange(len(content.ids)) - np.repeat(content.offsets[:-1], content.lengths)
        self.spans[position + np.repeat(self.tokens.offsets[:-1], content.lengths) + len(prefix)] = content_spans
        self.is_special = adapter.table.is_special[self.tokens.ids]


def lookup(student: Shown, teacher: Shown) -> Callable[[np.ndarray], SpanLookup]:
    """The `spans` argument of `align_flat`."""

    def spans(documents: np.ndarray) -> SpanLookup:
        return SpanLookup(
            student.spans[document_ranges(student.tokens.offsets, documents)[0]],
            teacher.spans[document_ranges(teacher.tokens.offsets, documents)[0]],
        )

    return spans
