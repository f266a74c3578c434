"""Spans worked out from ids against the spans that the reference reports."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.unit.shards.support import TOKENIZERS, udhr_rows
from xtok.shards.nfc import nfc_places
from xtok.shards.spans import SpanFinder, spans_from_bytes
from xtok.tokenizers import TokenizerAdapter, load_tokenizer

# Characters that compose, split, reorder and do neither.
TRICKY = (
    "ae oxq\u0301\u0302\u0323\u0307\u0327\u0345\u00e9\u1ea5\u0915\u093c\u0958\u1100\u1161\u11a8\u212b\u2126"
    "\u3099\u304b\u30cf\u309a\ufb2c\u0f73\u0f71\U0001d15e\u0344"
)
tricky_texts = st.text(st.sampled_from(TRICKY), max_size=14) | st.text(max_size=20)


@pytest.fixture(scope="module")
def nfc_adapter() -> TokenizerAdapter:
    """A byte-level tokenizer with an NFC normalizer and one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)} | {"<eos>": 256}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerAdapter(tokenizer, name="nfc", special_tokens={"eos_token": "<eos>"}, chat_template=None)


@given(text=tricky_texts)
@settings(max_examples=500, deadline=None)
def test_nfc_places_are_those_of_the_reference(nfc_adapter: TokenizerAdapter, text: str) -> None:
    text = text.replace("<eos>", "")
    normalized, places = nfc_places(text)
    assert normalized == unicodedata.normalize("NFC", text)
    assert len(places) == len(normalized)
    tokens, reported = nfc_adapter.encode_with_spans([text])
    derived = spans_from_bytes(nfc_adapter, text, tokens.ids)
    assert derived is not None
    assert np.array_equal(derived, reported)


@pytest.mark.parametrize("name", ["chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower"])
def test_found_spans_are_the_references(name: str) -> None:
    adapter = load_tokenizer(str(TOKENIZERS / name))
    finder = SpanFinder(adapter)
    for row, text in enumerate([record["text"] for record in udhr_rows(60)] + ["cafe\u0301 e\u0301", " x", "ﬁ ½"]):
        tokens, reported = adapter.encode_with_spans([text])
        for length in (len(tokens.ids), len(tokens.ids) // 2):
            found = finder.spans(row, text, tokens.ids[:length])
            assert found is not None
            assert np.array_equal(found, reported[:length])
        finder.new_block()
        other = tokens.ids.copy()
        other[-1] = (other[-1] + 1) % adapter.vocab_size
        assert finder.spans(row, text, other) is None
