"""The encode seam: one call, `encode_flat`, and the tokenizers behind it.

`TokenizersBackend` (Hugging Face) is the reference: its ids are the truth. `FastokensBackend` gives the same ids faster, which
`xtok.tokenizers.proof` checks on the user's own data before and while it is used.

Shape legend: N = tokens of all texts together, num_texts = texts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from xtok.errors import TokenizerError
from xtok.tokenizers.flat import FlatTokens, check_encodable

__all__ = ["EncodeBackend", "FastokensBackend", "TokenizersBackend"]

BATCH_CHARACTERS = 500_000  # the reference holds more than 100 bytes a token while a batch is open
Answer = TypeVar("Answer")


class EncodeBackend(Protocol):
    """What a tokenizer has to offer to stand behind `encode_flat`."""

    name: str

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        """Content ids of each text: no added specials, no truncation, no padding.

        TypeError for what is no string, TokenizerError for a lone surrogate or where the backend fails.
        """
        ...


class TokenizersBackend:
    """Hugging Face's own tokenizer: the reference."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        """tokenizer: without truncation and padding."""
        self._tokenizer = tokenizer

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        """Content ids of each text. Memory beyond the result is bounded by BATCH_CHARACTERS or the longest text."""
        return FlatTokens.concatenate([self._encode_batch(batch) for batch in _batches(texts)])

    def encode_with_spans(self, texts: Sequence[str]) -> tuple[FlatTokens, npt.NDArray[np.int32]]:
        """Content ids and the character span of each token: int32 [N, 2], half-open, as the tokenizer reports them."""
        tokens, spans = [], [np.empty((0, 2), dtype=np.int32)]
        for batch in _batches(texts):
            encodings = _guarded(batch, lambda batch: self._tokenizer.encode_batch(batch, add_special_tokens=False))
            tokens.append(_flatten([encoding.ids for encoding in encodings]))
            spans.extend(np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) for encoding in encodings)
        return FlatTokens.concatenate(tokens), np.concatenate(spans)

    def _encode_batch(self, batch: list[str]) -> FlatTokens:
        encodings = _guarded(batch, lambda batch: self._tokenizer.encode_batch_fast(batch, add_special_tokens=False))
        return _flatten([encoding.ids for encoding in encodings])


class FastokensBackend:
    """fastokens: byte-pair vocabularies only; two buffers come back, no Python object a token."""

    name = "fastokens"

    def __init__(self, tokenizer_json: str, *, split_special_tokens: bool = False) -> None:
        """tokenizer_json: a whole tokenizer.json. split_special_tokens: encode special tokens in a text as ordinary text.

        TokenizerError where fastokens refuses the tokenizer.
        """
        # One thread a process: the workers are the parallelism, and its idle threads spin. Read when the library first runs.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        from fastokens._native import Tokenizer as NativeTokenizer

        try:
            self._tokenizer = NativeTokenizer.from_json_str(tokenizer_json)
        except Exception as error:
            raise TokenizerError(f"fastokens cannot load this tokenizer ({error}); use the backend 'tokenizers'") from error
        self._split_special_tokens = split_special_tokens
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        """Content ids of each text: read-only arrays over the library's own buffers."""
        ids, offsets = _guarded(list(texts), self._encode)
        return FlatTokens(np.frombuffer(ids, dtype="<i4"), np.frombuffer(offsets, dtype="<i8"))

    def _encode(self, texts: list[str]) -> tuple[bytes, bytes]:
        split = self._split_special_tokens
        ids, offsets = self._tokenizer.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=split)
        return ids, offsets


def _guarded(texts: list[str], encode: Callable[[list[str]], Answer]) -> Answer:
    """`encode(texts)`, with typed errors. Texts are looked at one by one only after a failure: the check would cost a tenth."""
    if not all(isinstance(text, str) for text in texts):  # a pair would pass for a text
        check_encodable(texts)
    try:
        return encode(texts)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        check_encodable(texts)
        raise TokenizerError(f"the tokenizer failed on {len(texts)} texts: {type(error).__name__}: {error}") from error


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 64 if isinstance(text, str) else 0
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _flatten(rows: list[list[int]]) -> FlatTokens:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return FlatTokens(ids, offsets)
