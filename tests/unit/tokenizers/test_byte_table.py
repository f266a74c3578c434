"""The byte table: every spelling, bounds, special ids, and the fast builder against the slow one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tokenizers.support import BUNDLED_NAMES, bundled, bundled_texts, slow_byte_level_bytes
from xtok.errors import TokenizerError
from xtok.tokenizers import TokenizerAdapter, load_tokenizer
from xtok.tokenizers.byte_table import build_byte_table
from xtok.tokenizers.pieces import BYTE_CHARACTERS, PieceSpelling, encode_pieces, piece_bytes
from xtok.tokenizers.self_test import edited_bytes


def test_byte_characters_are_a_bijection_with_the_known_landmarks() -> None:
    assert len(set(BYTE_CHARACTERS)) == 256
    assert BYTE_CHARACTERS[ord("A")] == "A"
    assert BYTE_CHARACTERS[0x20] == "Ġ"
    assert BYTE_CHARACTERS[0x0A] == "Ċ"
    assert BYTE_CHARACTERS[0x09] == "ĉ"
    assert BYTE_CHARACTERS[0xAD] == "Ń"
    assert [slow_byte_level_bytes(character)[0] for character in BYTE_CHARACTERS] == list(range(256))


@cache
def loaded(name: str) -> TokenizerAdapter:
    return load_tokenizer(bundled(name))


SPELLINGS = [PieceSpelling("byte_level"), PieceSpelling("metaspace", True), PieceSpelling("metaspace"), PieceSpelling("plain")]
PIECES = st.one_of(
    st.text(max_size=6).filter(lambda text: text.isprintable()),
    st.text(alphabet="".join(BYTE_CHARACTERS), max_size=6),
    st.sampled_from(["▁", "▁the", "a▁b", "<0x0A>", "<0xff>", "<0x0A>x", "<0x1>", "", "<0xZZ>"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=12), st.sampled_from(SPELLINGS), st.binary(max_size=5))
def test_encode_pieces_is_piece_bytes_of_each(pieces: list[str], spelling: PieceSpelling, literal: bytes) -> None:
    replaced = {len(pieces) // 2: literal} if pieces else {}
    values, lengths = encode_pieces(pieces, spelling, replaced)
    expected = [replaced.get(place, piece_bytes(piece, spelling)) for place, piece in enumerate(pieces)]
    assert values.to_pylist() == expected
    assert lengths.tolist() == [len(value) for value in expected]
    assert lengths.dtype == np.int32


def test_pieces_are_spelled_as_documented() -> None:
    assert piece_bytes("ĠtheĊ", PieceSpelling("byte_level")) == b" the\n"
    assert piece_bytes("<0x0A>", PieceSpelling("metaspace", True)) == b"\n"
    assert piece_bytes("<0x0A>", PieceSpelling("metaspace")) == b"<0x0A>"
    assert piece_bytes("▁the", PieceSpelling("metaspace", True)) == b" the"
    assert piece_bytes("▁the", PieceSpelling("plain")) == "▁the".encode()


def test_table_of_a_small_vocabulary() -> None:
    table = build_byte_table(
        {"Ġa": 0, "b": 1, "<s>": 3, "<think>": 4, "▁odd": 5},
        spelling=PieceSpelling("byte_level"),
        added={4: "<think>"},
        special={3: "<s>"},
        role_code={3: 1},
    )
    assert table.vocab_size == 6
    assert table.values.type == pa.large_binary()
    assert table.values.to_pylist() == [b" a", b"b", b"", b"", b"<think>", "▁odd".encode()]
    assert table.lengths.tolist() == [2, 1, 0, 0, 7, 6]
    assert table.is_special.tolist() == [False, False, False, True, False, False]
    assert table.special_content == {3: b"<s>"}
    assert table.role_code.tolist() == [0, 0, 0, 1, 0, 0]
    data, cuts = table.take(np.array([1, 3, 0, 4], dtype=np.int32))
    assert data.tobytes() == b"b a<think>"
    assert cuts.tolist() == [0, 1, 1, 3, 10]
    with pytest.raises(ValueError):
        table.lengths[0] = 9


def test_no_ids_give_no_bytes() -> None:
    table = load_tokenizer(bundled("chatml_bpe")).table
    data, cuts = table.take(np.empty(0, dtype=np.int32))
    assert data.dtype == np.uint8
    assert len(data) == 0
    assert cuts.tolist() == [0]


@pytest.mark.parametrize("bad", [-1, 1 << 20])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    table = load_tokenizer(bundled("spm_bpe")).table
    with pytest.raises(TokenizerError, match=str(bad)):
        table.take(np.array([5, bad, 6], dtype=np.int32))


@pytest.mark.parametrize("name", ["chatml_bpe", "spm_bpe"])
def test_bytes_are_the_texts_bytes_on_every_document(name: str) -> None:
    adapter = load_tokenizer(bundled(name))
    texts = [text for text in bundled_texts() if "<think>" not in text or adapter.prefix_space == "never"]
    tokens = adapter.encode_flat(texts)
    for row, text in enumerate(texts):
        ids = tokens.row(row)
        data, cuts = adapter.token_bytes(ids)
        assert data.tobytes() == edited_bytes(text, adapter.prefix_space)
        assert cuts[-1] == len(data)
        assert adapter.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(max_size=40).filter(lambda text: "▁" not in text and "<" not in text), max_size=4))
def test_bytes_are_the_texts_bytes_on_any_text(texts: list[str]) -> None:
    for name in ("chatml_bpe", "spm_bpe"):
        adapter = loaded(name)
        for backend in (adapter.reference, adapter.fast_backend()):
            tokens = backend.encode_flat(texts)
            data, cuts = adapter.token_bytes(tokens.ids)
            expected = [edited_bytes(text, adapter.prefix_space) for text in texts]
            assert data.tobytes() == b"".join(expected)
            assert np.diff(cuts[tokens.offsets]).tolist() == [len(content) for content in expected]


def test_a_normalizing_tokenizers_bytes_are_those_of_the_normal_form() -> None:
    import unicodedata

    adapter = load_tokenizer(bundled("unigram_nfkc"))
    texts = [text for text in bundled_texts() if "<think>" not in text]
    tokens = adapter.encode_flat(texts)
    changed = 0
    for row, text in enumerate(texts):
        normal = unicodedata.normalize("NFKC", text)
        changed += normal != text
        assert adapter.token_bytes(tokens.row(row))[0].tobytes() == edited_bytes(normal, adapter.prefix_space)
    assert changed > 20


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_special_flags_follow_the_added_tokens(name: str) -> None:
    adapter = load_tokenizer(bundled(name))
    added = json.loads((Path(bundled(name)) / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = {token["id"]: token["content"].encode() for token in added if token["special"]}
    assert adapter.table.special_content == special
    assert np.flatnonzero(adapter.table.is_special).tolist() == sorted(special)
    assert all(adapter.table.lengths[token_id] == 0 for token_id in special)
    ordinary = {token["id"]: token["content"].encode() for token in added if not token["special"]}
    assert all(adapter.table.values[token_id].as_py() == content for token_id, content in ordinary.items())
