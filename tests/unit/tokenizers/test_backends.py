"""The encode seam: shapes, dtypes, equality of the backends, what cannot be encoded, and the fallback under proof."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from tests.unit.tokenizers.support import BUNDLED_NAMES, bundled, bundled_texts
from xtok.errors import ConfigError, TokenizerError
from xtok.tokenizers import (
    FlatTokens,
    ProvenEncoder,
    TokenizerAdapter,
    choose_backend,
    first_unencodable,
    load_tokenizer,
    prove_backend,
)
from xtok.tokenizers import backends as backends_module
from xtok.tokenizers.proof import proof_rows


@pytest.fixture(scope="module")
def adapter() -> TokenizerAdapter:
    return load_tokenizer(bundled("chatml_bpe"), backend="fastokens")


def equal(left: FlatTokens, right: FlatTokens) -> bool:
    return np.array_equal(left.ids, right.ids) and np.array_equal(left.offsets, right.offsets)


@pytest.mark.parametrize("name", ["chatml_bpe", "spm_bpe"])
def test_the_backends_give_equal_ids(name: str) -> None:
    adapter = load_tokenizer(bundled(name), backend="fastokens")
    proof = prove_backend(adapter, bundled_texts())
    assert proof.equal
    assert proof.num_checked == len(bundled_texts())
    assert proof.first_difference is None


@pytest.mark.parametrize("backend", ["tokenizers", "fastokens"])
def test_flat_arrays(backend: str) -> None:
    adapter = load_tokenizer(bundled("chatml_bpe"), backend=backend)  # type: ignore[arg-type]
    tokens = adapter.encode_flat(["hello world", "", "a"])
    assert (tokens.ids.dtype, tokens.offsets.dtype) == (np.int32, np.int64)
    assert tokens.num_texts == 3
    assert tokens.lengths[1] == 0
    assert adapter.decode(tokens.row(0)) == "hello world"
    nothing = adapter.encode_flat([])
    assert (len(nothing.ids), nothing.offsets.tolist(), nothing.num_texts) == (0, [0], 0)


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_batches_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load_tokenizer(bundled(name))
    texts = list(bundled_texts()[:40])
    whole, spans = adapter.encode_with_spans(texts)
    assert equal(adapter.encode_flat(texts), whole)
    monkeypatch.setattr(backends_module, "BATCH_CHARACTERS", 300)
    assert equal(adapter.encode_flat(texts), whole)
    again, spans_again = adapter.encode_with_spans(texts)
    assert equal(again, whole)
    assert np.array_equal(spans, spans_again)


def test_spans_are_those_of_each_text_alone() -> None:
    adapter = load_tokenizer(bundled("unigram_nfkc"))
    texts = ["plain words", "", "cafe\u0301 ﬁne", "日本語"]
    tokens, spans = adapter.encode_with_spans(texts)
    assert (spans.dtype, spans.shape) == (np.int32, (len(tokens.ids), 2))
    for row, text in enumerate(texts):
        alone = adapter.transformers_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        rows = slice(int(tokens.offsets[row]), int(tokens.offsets[row + 1]))
        assert tokens.ids[rows].tolist() == alone["input_ids"]
        assert spans[rows].tolist() == [list(span) for span in alone["offset_mapping"]]


@pytest.mark.parametrize("backend", ["tokenizers", "fastokens"])
@pytest.mark.parametrize("texts", [["ok", "a\ud800b"], ["a\udfff" * 3]])
def test_lone_surrogates_are_a_typed_error(backend: str, texts: list[str]) -> None:
    adapter = load_tokenizer(bundled("chatml_bpe"), backend=backend)  # type: ignore[arg-type]
    row, position = first_unencodable(texts) or (-1, -1)
    for encode in (adapter.encode_flat, adapter.encode_with_spans, ProvenEncoder(adapter).encode_flat):
        with pytest.raises(TokenizerError, match=rf"texts\[{row}\] holds the lone surrogate U\+D[8F].* at character {position}"):
            encode(texts)
    assert adapter.encode_flat(["still works"]).num_texts == 1


def test_first_unencodable() -> None:
    assert first_unencodable(["a", "é", "𝄞", ""]) is None
    assert first_unencodable(["a", "é\udc00"]) == (1, 1)


@pytest.mark.parametrize("backend", ["tokenizers", "fastokens"])
@pytest.mark.parametrize("bad", [None, 5, b"bytes", ("a", "pair")])
def test_what_is_no_string_is_a_type_error(backend: str, bad: object) -> None:
    adapter = load_tokenizer(bundled("chatml_bpe"), backend=backend)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"texts\[1\] is a {type(bad).__name__}"):
        adapter.encode_flat(["ok", bad])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["unigram_nfkc", "wordpiece_lower"])
def test_where_fastokens_refuses_auto_takes_the_reference(name: str) -> None:
    assert load_tokenizer(bundled(name), backend="auto").backend.name == "tokenizers"
    with pytest.raises(TokenizerError, match="fastokens cannot load"):
        load_tokenizer(bundled(name), backend="fastokens")


def test_choose_backend(adapter: TokenizerAdapter) -> None:
    choose_backend(adapter, "tokenizers")
    assert adapter.backend is adapter.reference
    choose_backend(adapter, "auto")
    assert adapter.backend.name == "fastokens"
    with pytest.raises(ConfigError, match="'fast'"):
        choose_backend(adapter, "fast")  # type: ignore[arg-type]


def test_fastokens_keeps_to_one_thread() -> None:
    program = (
        "import os, threading\n"
        "from xtok.tokenizers import load_tokenizer\n"
        f"a = load_tokenizer({bundled('chatml_bpe')!r}, backend='fastokens')\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "a.backend.encode_flat(['some words of text ' * 50] * 3000)\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    environment = {key: value for key, value in os.environ.items() if "THREADS" not in key}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    assert int(done.stdout) <= 1


class Lying:
    """A backend that changes one id of the texts that hold a word, or fails there."""

    name = "lying"

    def __init__(self, adapter: TokenizerAdapter, word: str, how: str) -> None:
        self.adapter, self.word, self.how, self.calls = adapter, word, how, 0

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        self.calls += 1
        tokens = self.adapter.reference.encode_flat(texts)
        rows = [row for row, text in enumerate(texts) if self.word in text]
        if not rows:
            return tokens
        if self.how == "fails":
            raise TokenizerError("panicked")
        if self.how == "drops a row":
            return FlatTokens(tokens.row(0), tokens.offsets[:2])
        ids, lengths = tokens.ids.copy(), tokens.lengths
        if self.how == "changes":
            ids[tokens.offsets[rows[0]]] += 1
            return FlatTokens(ids, tokens.offsets)
        lengths[rows[0]] -= 1
        return FlatTokens(np.delete(ids, tokens.offsets[rows[0] + 1] - 1), np.concatenate([[0], np.cumsum(lengths)]))


LIES = {
    "changes": r"text 7, token 0: lying gave",
    "shortens": r"text 7, token \d+",
    "fails": "lying failed",
    "drops a row": "1 rows for",
}


@pytest.mark.parametrize("how", LIES)
def test_a_lying_backend_is_caught_and_the_part_done_again(adapter: TokenizerAdapter, how: str) -> None:
    texts = [f"text number {row} of the part" for row in range(40)]
    lying = Lying(adapter, "number 7 ", how)
    assert not prove_backend(adapter, texts, backend=lying).equal
    encoder = ProvenEncoder(adapter, backend=lying, proof_every=1)
    tokens = encoder.encode_flat(texts)
    assert equal(tokens, adapter.reference.encode_flat(texts))
    assert encoder.fell_back
    assert encoder.difference is not None
    import re

    assert re.search(LIES[how], encoder.difference)
    clean = ["another part", "without the word"]
    assert equal(encoder.encode_flat(clean), adapter.reference.encode_flat(clean))
    assert (encoder.fell_back, encoder.difference) == (False, None), "each part is proven for itself"


def test_a_lie_in_every_row_is_caught_by_the_usual_share(adapter: TokenizerAdapter) -> None:
    texts = [f"row {row}" for row in range(450)]

    class OffByOne(Lying):
        def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
            tokens = self.adapter.reference.encode_flat(texts)
            return FlatTokens(tokens.ids + 1, tokens.offsets)

    encoder = ProvenEncoder(adapter, backend=OffByOne(adapter, "", ""), proof_every=200)
    assert equal(encoder.encode_flat(texts), adapter.reference.encode_flat(texts))
    assert encoder.fell_back


def test_proof_is_not_paid_twice(adapter: TokenizerAdapter) -> None:
    choose_backend(adapter, "fastokens")
    encoder = ProvenEncoder(adapter, proof_every=10)
    encoder.encode_flat(["a text"] * 95)
    assert (encoder.num_proven, encoder.fell_back) == (10, False)
    choose_backend(adapter, "tokenizers")
    reference = ProvenEncoder(adapter, proof_every=10)
    reference.encode_flat(["a text"] * 95)
    assert reference.num_proven == 0
    choose_backend(adapter, "fastokens")
    assert ProvenEncoder(adapter).encode_flat([]).num_texts == 0


@pytest.mark.parametrize("proof_every", [0, -3])
def test_proof_every_must_be_positive(adapter: TokenizerAdapter, proof_every: int) -> None:
    with pytest.raises(ConfigError, match=f"proof_every is {proof_every}"):
        ProvenEncoder(adapter, proof_every=proof_every)


def test_proof_rows_are_one_in_each_run_and_do_not_keep_one_phase() -> None:
    rows = proof_rows(10_050, 200)
    assert len(rows) == 51
    assert [row // 200 for row in rows] == list(range(51))
    assert rows[-1] < 10_050
    assert len({row % 200 for row in rows}) > 20
    assert proof_rows(10_050, 200) == rows
    assert proof_rows(3, 1) == [0, 1, 2]
    assert proof_rows(0, 5) == []


def test_with_specials_and_concatenate() -> None:
    tokens = FlatTokens(np.array([5, 6, 7], dtype=np.int32), np.array([0, 2, 2, 3], dtype=np.int64))
    prefix, suffix = np.array([1, 2], dtype=np.int32), np.array([9], dtype=np.int32)
    wrapped = tokens.with_specials(prefix, suffix)
    assert [wrapped.row(row).tolist() for row in range(3)] == [[1, 2, 5, 6, 9], [1, 2, 9], [1, 2, 7, 9]]
    assert (wrapped.ids.dtype, wrapped.offsets.dtype) == (np.int32, np.int64)
    empty = np.empty(0, dtype=np.int32)
    assert tokens.with_specials(empty, empty) is tokens
    sliced = FlatTokens(tokens.ids, tokens.offsets[2:])
    assert sliced.with_specials(prefix, empty).row(0).tolist() == [1, 2, 7]
    both = FlatTokens.concatenate([tokens, wrapped])
    assert both.num_texts == 6
    assert [row.tolist() for row in map(FlatTokens.concatenate([sliced, tokens]).row, range(4))] == [[7], [5, 6], [], [7]]
    assert both.row(5).tolist() == [1, 2, 7, 9]
    assert FlatTokens.concatenate([]).num_texts == 0
