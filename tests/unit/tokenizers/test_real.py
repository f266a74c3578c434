"""The six production tokenizers: tables, backends, specials and fingerprints on real documents."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.real_tokenizers import NAMES
from tests.unit.tokenizers.support import bundled_texts, slow_byte_level_bytes
from xtok.tokenizers import TokenizerAdapter, adapt_tokenizer, load_tokenizer, prove_backend, same_tokenizer
from xtok.tokenizers.pieces import piece_bytes
from xtok.tokenizers.self_test import edited_bytes
from xtok.tokenizers.spelling import piece_spelling

pytestmark = pytest.mark.slow
EXPECTED = {
    "qwen3": (151669, [], [], {"combining marks"}),
    "llama3_2": (128256, ["<|begin_of_text|>"], [], set()),
    "gpt_oss": (200019, [], [], set()),
    "mistral_nemo": (131072, ["<s>"], [], set()),
    "deepseek_v4": (129280, [], [], set()),
    "mistral_v3_spm": (32768, ["<s>"], [], {"the blank's own sign"}),
}


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest, real_tokenizer_folder: Path) -> TokenizerAdapter:
    return load_tokenizer(str(real_tokenizer_folder / request.param), backend="fastokens")


def test_what_the_self_test_says(real: TokenizerAdapter) -> None:
    vocab_size, prefix, suffix, changed = EXPECTED[Path(real.name).name]
    assert real.route == "byte"
    assert real.prefix_space == ("always" if real.name.endswith("spm") else "never")
    assert set(real.self_test.changed) == changed
    assert real.vocab_size == real.num_tokens == vocab_size
    assert [real.token_text(token_id) for token_id in real.prefix_ids] == prefix
    assert [real.token_text(token_id) for token_id in real.suffix_ids] == suffix


def test_bytes_are_the_texts_bytes(real: TokenizerAdapter) -> None:
    """Of every document as it is; of Qwen's, whose normalizer composes, in that normal form."""
    texts = [text for text in bundled_texts() if "▁" not in text]
    tokens = real.encode_flat(texts)
    exact = 0
    for row, text in enumerate(texts):
        data = real.token_bytes(tokens.row(row))[0].tobytes()
        normal = unicodedata.normalize("NFC", text) if real.name.endswith("qwen3") else text
        assert data == edited_bytes(normal, real.prefix_space)
        exact += data == edited_bytes(text, real.prefix_space)
    assert exact == len(texts) or real.name.endswith("qwen3")
    assert exact > 0.8 * len(texts)


def test_decoding_gives_the_same_text(real: TokenizerAdapter) -> None:
    texts = [text for text in bundled_texts()[::7] if "▁" not in text and unicodedata.is_normalized("NFC", text)]
    tokens = real.encode_flat(texts)
    for row, text in enumerate(texts):
        assert real.decode(tokens.row(row)) == text


def test_the_table_is_the_slow_rule_for_every_id(real: TokenizerAdapter) -> None:
    tokenizer = real._tokenizer
    added = tokenizer.get_added_tokens_decoder()
    spelling = piece_spelling(tokenizer)
    for token_id, value in enumerate(real.table.values.to_pylist()):
        piece = tokenizer.id_to_token(token_id)
        if token_id in added:
            assert value == (b"" if added[token_id].special else piece.encode())
        elif spelling.kind == "byte_level":
            assert value == slow_byte_level_bytes(piece)
        else:
            assert value == piece_bytes(piece, spelling)


def test_the_backends_give_equal_ids(real: TokenizerAdapter) -> None:
    proof = prove_backend(real, bundled_texts())
    assert proof.first_difference is None
    assert proof.num_checked == len(bundled_texts())


def test_transformers_gives_the_same(real: TokenizerAdapter) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(real.name)
    texts = bundled_texts()[:12]
    wrapped = real.encode_flat(texts).with_specials(real.prefix_ids, real.suffix_ids)
    assert [wrapped.row(row).tolist() for row in range(len(texts))] == theirs(list(texts))["input_ids"]
    adapted = adapt_tokenizer(theirs)
    assert same_tokenizer(real, adapted)
    assert np.array_equal(real.table.role_code, adapted.table.role_code)
    assert np.array_equal(real.table.is_special, adapted.table.is_special)
