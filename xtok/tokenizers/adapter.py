"""One tokenizer as the rest of xtok sees it: ids, bytes, roles, route and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from xtok.errors import TokenizerError
from xtok.tokenizers.anatomy import added_tokens, piece_spelling
from xtok.tokenizers.backends import EncodeBackend, FastokensBackend, TokenizersBackend
from xtok.tokenizers.byte_table import TokenByteTable, build_byte_table
from xtok.tokenizers.fingerprint import content_fingerprint, environment_fingerprint
from xtok.tokenizers.flat import FlatTokens
from xtok.tokenizers.self_test import PROBES, PrefixSpace, SelfTest, run_self_test

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["TokenizerAdapter"]

ROLE_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class TokenizerAdapter:
    """A fast tokenizer, checked at load.

    name: what the user called it. vocab_size: largest id + 1. num_tokens: how many ids are in use. declared_vocab_size: the
    model's or configuration's `vocab_size`, `num_tokens` where nothing declares one. table: bytes of every id.
    prefix_space: the declared dummy prefix. route, route_reason: the self-test's verdict. prefix_ids, suffix_ids: int32, what
    the tokenizer itself puts around one text. special_tokens: "bos_token" -> text, as chat templates want them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        declared_vocab_size: int | None = None,
    ) -> None:
        """tokenizer: owned by the adapter from here on, without truncation and padding, role tokens added."""
        self.name = name
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.environment = environment_fingerprint()
        self._tokenizer = tokenizer
        self.reference = TokenizersBackend(tokenizer)
        self.backend: EncodeBackend = self.reference
        self._fast: FastokensBackend | None = None
        self.prefix_ids, self.suffix_ids = _added_specials(tokenizer, name)
        self.table, self.num_tokens = self._build_table()
        self.vocab_size = self.table.vocab_size
        self.declared_vocab_size = declared_vocab_size if declared_vocab_size is not None else self.num_tokens
        spelling = piece_spelling(tokenizer)
        self.self_test: SelfTest = run_self_test(self.reference, self.table, spelling=spelling.kind)

    @property
    def route(self) -> Literal["byte", "offset"]:
        """ "byte" when the table is right on ordinary text, "offset" when it never is."""
        return self.self_test.route

    @property
    def route_reason(self) -> str:
        """Why it has this route, for a person."""
        return self.self_test.reason

    @property
    def prefix_space(self) -> PrefixSpace:
        """The declared edit: a blank before the text "never", "always", or "unless_blank" (unless it begins with one)."""
        return self.self_test.prefix_space

    @cached_property
    def content_fingerprint(self) -> str:
        """sha256 (hex) of the vocabulary and rules, the template and the special-token roles."""
        return content_fingerprint(
            self._tokenizer.to_str(), chat_template=self.chat_template, role_tokens=self.special_tokens
        )

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token (CLS when there is none), or None."""
        return self._role_ids["bos"]

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token (SEP when there is none), or None."""
        return self._role_ids["eos"]

    @property
    def unk_token_id(self) -> int | None:
        """Id of the UNK token, or None."""
        return self._role_ids["unk"]

    @property
    def pad_token_id(self) -> int:
        """Id to pad with: PAD, else EOS. TokenizerError when the tokenizer has neither."""
        pad, eos = self._role_ids["pad"], self._role_ids["eos"]
        if pad is not None:
            return pad
        if eos is not None:
            return eos
        raise TokenizerError(f"{self.name} has neither a pad nor an EOS token to pad with; set pad_token in its configuration")

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        """Content ids of each text by the chosen backend: no added specials, no truncation."""
        return self.backend.encode_flat(texts)

    def encode_with_spans(self, texts: Sequence[str]) -> tuple[FlatTokens, npt.NDArray[np.int32]]:
        """Content ids by the reference and each token's character span: int32 [N, 2], half-open."""
        return self.reference.encode_with_spans(texts)

    def token_bytes(self, ids: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Concatenated bytes of `ids` (uint8) and their cuts (int64 [len(ids) + 1])."""
        return self.table.take(ids)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Text of `ids`, special tokens included, as the tokenizer's own decoder gives it."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def fast_backend(self) -> FastokensBackend:
        """The fast backend, loaded at the first call. TokenizerError where it refuses this tokenizer."""
        if self._fast is None:
            self._fast = FastokensBackend(self._tokenizer.to_str())
        return self._fast

    @cached_property
    def transformers_tokenizer(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as transformers knows it (imports transformers at the first call)."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer, chat_template=self.chat_template, clean_up_tokenization_spaces=False, **self.special_tokens
        )

    def _build_table(self) -> tuple[TokenByteTable, int]:
        ordinary, special = added_tokens(self._tokenizer)
        pieces = self._tokenizer.get_vocab(with_added_tokens=True)
        ids = {role: pieces.get(text) for role, text in self.special_tokens.items()}
        self._role_ids: dict[str, int | None] = {
            "bos": _first(ids.get("bos_token"), ids.get("cls_token")),
            "eos": _first(ids.get("eos_token"), ids.get("sep_token")),
            "pad": ids.get("pad_token"),
            "unk": ids.get("unk_token"),
        }
        table = build_byte_table(
            pieces, spelling=piece_spelling(self._tokenizer), added=ordinary, special=special, role_ids=self._role_ids
        )
        return table, len(set(pieces.values()))


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _added_specials(tokenizer: Tokenizer, name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(prefix, suffix) that `add_special_tokens` puts around one text, checked to be the same around every probe."""
    texts = [texts[0] for texts in PROBES.values()]
    plain = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    whole = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=True)]
    content, wrapped = plain[0], whole[0]
    starts = [at for at in range(len(wrapped) - len(content) + 1) if wrapped[at : at + len(content)] == content]
    if not starts:
        raise TokenizerError(f"{name}: adding special tokens changes the ids of the text itself; its post-processor is unknown")
    prefix, suffix = wrapped[: starts[0]], wrapped[starts[0] + len(content) :]
    for text, ids, with_specials in zip(texts, plain, whole, strict=True):
        if with_specials != prefix + ids + suffix:
            raise TokenizerError(f"{name}: the special tokens around {text!r} are not those around other texts")
    return np.array(prefix, dtype=np.int32), np.array(suffix, dtype=np.int32)
