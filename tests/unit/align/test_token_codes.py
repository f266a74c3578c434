"""Codes tell bytes and lengths, for every reading of a pair's vocabularies."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from xtok.align import token_codes
from xtok.align.byte_readings import readings_of
from xtok.align.token_codes import TokenCodes, codes_of
from xtok.tokenizers import TokenizerAdapter, load_tokenizer

NAMES = ("chatml_bpe", "spm_bpe", "unigram_nfkc")


def check(
    codes: tuple[TokenCodes, TokenCodes], adapters: tuple[TokenizerAdapter, TokenizerAdapter], dtype: type, length_dtype: type
) -> None:
    told: dict[int, bytes] = {}
    for side, adapter in zip(codes, adapters, strict=True):
        readings = readings_of(adapter)
        values = readings.values.to_pylist()
        own = side.of(np.arange(len(values), dtype=np.int32))
        assert own.dtype == dtype
        assert side.lengths(own).dtype == length_dtype
        assert side.lengths(own).tolist() == [len(value) for value in values]
        for code, value in zip(own.tolist(), values, strict=True):
            assert told.setdefault(code, value) == value
    assert len(set(told.values())) == len(told)


@pytest.mark.parametrize("names", list(permutations(NAMES, 2)))
def test_equal_codes_are_equal_bytes(repository: Path, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = (load_tokenizer(str(repository / "infra/bundled/tokenizers" / name)) for name in names)
    check(codes_of(left, right), (left, right), np.int32, np.uint16)
    assert codes_of(left, right) is codes_of(left, right)
    monkeypatch.setattr(token_codes, "_NARROW", np.dtype(np.int16))  # as for vocabularies that 32 bits do not hold
    monkeypatch.setattr(token_codes, "MAX_LENGTH", 3)
    check(token_codes._build_codes(left, right), (left, right), np.int64, np.int64)
