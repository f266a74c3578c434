"""Tokenizers: load, fingerprint, bytes of every token, self-test, and encoding that is fast and provably the reference's.

    adapter = load_tokenizer("out/qwen3", backend="auto")
    tokens = adapter.encode_flat(["one text", "another"])       # FlatTokens: ids int32 [N], offsets int64 [num_texts + 1]
    data, cuts = adapter.token_bytes(tokens.ids)                # the bytes those ids stand for

Torch-free: a preprocessing worker starts without it; transformers is imported only when a chat template asks for it.
"""

from __future__ import annotations

from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.backends import EncodeBackend, FastokensBackend, TokenizersBackend
from xtok.tokenizers.byte_table import TokenByteTable
from xtok.tokenizers.flat import FlatTokens, check_encodable, first_unencodable
from xtok.tokenizers.load import adapt_tokenizer, choose_backend, load_tokenizer, same_tokenizer
from xtok.tokenizers.proof import BackendProof, ProvenEncoder, prove_backend
from xtok.tokenizers.roles import ROLES

__all__ = [
    "ROLES",
    "BackendProof",
    "EncodeBackend",
    "FastokensBackend",
    "FlatTokens",
    "ProvenEncoder",
    "TokenByteTable",
    "TokenizerAdapter",
    "TokenizersBackend",
    "adapt_tokenizer",
    "check_encodable",
    "choose_backend",
    "first_unencodable",
    "load_tokenizer",
    "prove_backend",
    "same_tokenizer",
]
