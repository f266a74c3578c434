"""Fast ids that are the reference's ids: equality shown on a sample first, and on a fixed share of rows ever after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xtok.errors import ConfigError, TokenizerError
from xtok.tokenizers.flat import FlatTokens

if TYPE_CHECKING:
    from xtok.tokenizers.adapter import TokenizerAdapter
    from xtok.tokenizers.backends import EncodeBackend

__all__ = ["BackendProof", "ProvenEncoder", "prove_backend"]


@dataclass(frozen=True, slots=True)
class BackendProof:
    """Whether a backend gave the reference's ids. num_checked counts texts; first_difference is a sentence."""

    equal: bool
    num_checked: int
    first_difference: str | None


def prove_backend(adapter: TokenizerAdapter, texts: Sequence[str], *, backend: EncodeBackend | None = None) -> BackendProof:
    """Encode `texts` with `backend` (default: the adapter's fast one) and with the reference, and compare every id."""
    fast = backend if backend is not None else adapter.fast_backend()
    reference = adapter.reference.encode_flat(texts)
    tokens = _encode_or_say(fast, texts)
    difference = tokens if isinstance(tokens, str) else _first_difference(fast.name, tokens, reference, range(len(texts)))
    return BackendProof(difference is None, len(texts), difference)


class ProvenEncoder:
    """Encodes whole parts with a fast backend under continuing proof.

    One text in `proof_every` is encoded by the reference too; on the first difference, or when the fast backend fails, the whole
    part is done again by the reference. `fell_back`, `difference` (a sentence or None) and `num_proven` speak of the latest part.
    Which texts are compared depends only on their place in the part, so every run and every worker compares the same ones.
    """

    def __init__(self, adapter: TokenizerAdapter, *, backend: EncodeBackend | None = None, proof_every: int = 200) -> None:
        if proof_every < 1:
            raise ConfigError(f"proof_every is {proof_every}; it must be at least 1 (1 compares every text)")
        self._reference = adapter.reference
        self._fast = backend if backend is not None else adapter.backend
        self._proof_every = proof_every
        self.fell_back = False
        self.difference: str | None = None
        self.num_proven = 0

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        """Content ids of every text of one part."""
        self.fell_back, self.difference, self.num_proven = False, None, 0
        if self._fast.name == self._reference.name:
            return self._reference.encode_flat(texts)
        tokens = _encode_or_say(self._fast, texts)
        difference = tokens if isinstance(tokens, str) else self._find_difference(tokens, texts)
        if isinstance(tokens, FlatTokens) and difference is None:
            return tokens
        tokens = self._reference.encode_flat(texts)  # raises for a text that nobody can encode
        self.fell_back, self.difference = True, difference
        return tokens

    def _find_difference(self, tokens: FlatTokens, texts: Sequence[str]) -> str | None:
        if tokens.num_texts != len(texts):
            return f"{self._fast.name} gave {tokens.num_texts} rows for {len(texts)} texts"
        rows = proof_rows(len(texts), self._proof_every)
        self.num_proven = len(rows)
        proof = self._reference.encode_flat([texts[row] for row in rows])
        return _first_difference(self._fast.name, _select(tokens, rows), proof, rows)


def proof_rows(num_texts: int, proof_every: int) -> list[int]:
    """One row in each run of `proof_every`, at a place that varies from run to run but never from call to call."""
    starts = range(0, num_texts, proof_every)
    # Multiplying by an odd constant scatters the places: a source with a period of its own is not always met at one phase.
    return [start + (run * 0x9E3779B1 >> 7) % min(proof_every, num_texts - start) for run, start in enumerate(starts)]


def _encode_or_say(backend: EncodeBackend, texts: Sequence[str]) -> FlatTokens | str:
    """The ids, or a sentence that says how the backend failed."""
    try:
        return backend.encode_flat(texts)
    except TokenizerError as error:
        return f"{backend.name} failed: {error}"


def _select(tokens: FlatTokens, rows: Sequence[int]) -> FlatTokens:
    picked = [tokens.row(row) for row in rows]
    offsets = np.zeros(len(picked) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in picked], out=offsets[1:])
    return FlatTokens(np.concatenate([np.empty(0, dtype=np.int32), *picked]), offsets)


def _first_difference(name: str, fast: FlatTokens, reference: FlatTokens, labels: Sequence[int]) -> str | None:
    if fast.num_texts != reference.num_texts:
        return f"{name} gave {fast.num_texts} rows for {reference.num_texts} texts"
    if np.array_equal(fast.offsets, reference.offsets) and np.array_equal(fast.ids, reference.ids):
        return None
    for row, label in enumerate(labels):
        ours, theirs = fast.row(row), reference.row(row)
        if not np.array_equal(ours, theirs):
            place = _first_unequal(ours, theirs)
            return (
                f"text {label}, token {place}: {name} gave {ours[place : place + 4].tolist()}, "
                f"the reference {theirs[place : place + 4].tolist()}"
            )
    return f"{name} gave row bounds that begin at {fast.offsets[0]}"


def _first_unequal(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    shared = min(len(left), len(right))
    unequal = np.flatnonzero(left[:shared] != right[:shared])
    return int(unequal[0]) if len(unequal) else shared
