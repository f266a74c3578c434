"""One tokenizer as the rest of xtok sees it: ids, bytes, roles, route and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from xtok.errors import TokenizerError
from xtok.tokenizers.backends import EncodeBackend, FastokensBackend, TokenizersBackend
from xtok.tokenizers.byte_table import TokenByteTable, build_byte_table
from xtok.tokenizers.fingerprint import content_fingerprint, environment_fingerprint, vocabulary_digest
from xtok.tokenizers.flat import FlatTokens
from xtok.tokenizers.memory import release_freed_memory
from xtok.tokenizers.roles import SpecialRoles, added_tokens, special_roles
from xtok.tokenizers.self_test import PROBES, PrefixSpace, SelfTest, run_self_test
from xtok.tokenizers.spelling import piece_spelling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["TokenizerAdapter"]

IdArray = npt.NDArray[np.int32]


class TokenizerAdapter:
    """A fast tokenizer, checked at load.

    name: what the user called it. vocab_size: largest id + 1. num_tokens: ids in use. declared_vocab_size: `vocab_size` of the
    model's or tokenizer's configuration, `num_tokens` where nothing declares one. table: bytes of every id. self_test: route and
    dummy prefix, with the reasons. prefix_ids, suffix_ids: int32, what the tokenizer itself puts around one text.
    special_tokens: "bos_token" -> text, as chat templates want them. reference: the backend whose ids are the truth.
    backend: who encodes for `encode_flat`.
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
        """tokenizer: owned by the adapter from here on; without truncation and padding, its role tokens added."""
        self.name = name
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.environment = environment_fingerprint()
        self._tokenizer = tokenizer
        self.reference = TokenizersBackend(tokenizer)
        self.backend: EncodeBackend = self.reference
        self._fast: FastokensBackend | None = None
        _check_deterministic(tokenizer, name)
        self.prefix_ids, self.suffix_ids = _added_specials(tokenizer, name)
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        self.num_tokens = len(set(pieces.values()))
        self.declared_vocab_size = self.num_tokens if declared_vocab_size is None else declared_vocab_size
        _check_ids(pieces, self.num_tokens, declared_vocab_size, name)
        self._roles, self.table = self._read_vocabulary(pieces)
        self.vocab_size = self.table.vocab_size
        self.self_test: SelfTest = run_self_test(self.reference, self.table, spelling=piece_spelling(tokenizer).kind)

    def _read_vocabulary(self, pieces: Mapping[str, int]) -> tuple[SpecialRoles, TokenByteTable]:
        ordinary, special = added_tokens(self._tokenizer)
        roles = special_roles(
            pieces,
            self.special_tokens,
            model_unk=getattr(self._tokenizer.model, "unk_token", None),
            prefix_ids=self.prefix_ids.tolist(),
        )
        unknown = roles.ids["unk"]
        if unknown is not None:  # stands for text it does not spell, whether or not it is an added token
            special.setdefault(unknown, str(self._tokenizer.id_to_token(unknown)))
        spelling = piece_spelling(self._tokenizer)
        return roles, build_byte_table(pieces, spelling=spelling, added=ordinary, special=special, role_code=roles.code)

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

    @property
    def content_fingerprint(self) -> str:
        """sha256 (hex) of the vocabulary and rules, the template (as it is set now) and the special-token roles."""
        return content_fingerprint(self._vocabulary_digest, chat_template=self.chat_template, role_tokens=self.special_tokens)

    @cached_property
    def _vocabulary_digest(self) -> str:
        digest = vocabulary_digest(self._tokenizer.to_str(), split_special_tokens=bool(self._tokenizer.encode_special_tokens))
        release_freed_memory()
        return digest

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token (CLS when there is none), or None."""
        return self._roles.ids["bos"]

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token (SEP when there is none), or None."""
        return self._roles.ids["eos"]

    @property
    def unk_token_id(self) -> int | None:
        """Id of the UNK token, or None."""
        return self._roles.ids["unk"]

    @property
    def pad_token_id(self) -> int:
        """Id to pad with: PAD, else EOS. TokenizerError when the tokenizer has neither."""
        for role in ("pad", "eos"):
            token_id = self._roles.ids[role]
            if token_id is not None:
                return token_id
        raise TokenizerError(f"{self.name} has neither a PAD nor an EOS token to pad with; set pad_token in its configuration")

    def encode_flat(self, texts: Sequence[str]) -> FlatTokens:
        """Content ids of each text by the chosen backend: no added specials, no truncation."""
        return self.backend.encode_flat(texts)

    def encode_with_spans(self, texts: Sequence[str]) -> tuple[FlatTokens, IdArray]:
        """Content ids by the reference and each token's character span: int32 [N, 2], half-open."""
        return self.reference.encode_with_spans(texts)

    def token_bytes(self, ids: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Concatenated bytes of `ids` (uint8) and their cuts (int64 [len(ids) + 1])."""
        return self.table.take(ids)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """Text of `ids`, special tokens included, as the tokenizer's own decoder gives it."""
        return str(self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str | None:
        """The piece of one id as the vocabulary spells it, or None for an id that nothing uses."""
        return self._tokenizer.id_to_token(int(token_id))

    def fast_backend(self) -> FastokensBackend:
        """The fast backend, loaded at the first call. TokenizerError where it refuses this tokenizer."""
        if self._fast is None:
            self._fast = FastokensBackend(
                self._tokenizer.to_str(), split_special_tokens=bool(self._tokenizer.encode_special_tokens)
            )
            release_freed_memory()
        return self._fast

    @cached_property
    def transformers_tokenizer(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as transformers knows it, a copy (imports transformers at the first call)."""
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast  # its constructor is untyped
        return cast(
            "PreTrainedTokenizerFast",
            make(
                tokenizer_object=self._tokenizer,
                chat_template=self.chat_template,
                clean_up_tokenization_spaces=False,
                **self.special_tokens,
            ),
        )


def _check_deterministic(tokenizer: Tokenizer, name: str) -> None:
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise TokenizerError(f"{name} drops merges at random (model.dropout {dropout}): set it to null in tokenizer.json")


def _check_ids(pieces: Mapping[str, int], num_tokens: int, declared: int | None, name: str) -> None:
    """TokenizerError when an id lies beyond the declared vocabulary, or when none is declared and the ids leave wide holes."""
    if not pieces:
        raise TokenizerError(f"{name} has an empty vocabulary")
    piece, largest = max(pieces.items(), key=lambda item: item[1])
    if declared is not None and largest >= declared:
        beyond = sum(token_id >= declared for token_id in pieces.values())
        raise TokenizerError(
            f"{name}: {beyond} ids exceed its declared vocabulary (vocab_size {declared}): the largest is {largest}, {piece!r}; "
            "a model of that size cannot embed them: correct vocab_size in config.json or tokenizer_config.json, or the tokenizer"
        )
    if declared is None and largest >= 2 * num_tokens + 1024:
        raise TokenizerError(
            f"{name}: id {largest} ({piece!r}) in a vocabulary of {num_tokens} tokens; "
            "if the model really has that many rows, declare vocab_size in tokenizer_config.json"
        )


def _added_specials(tokenizer: Tokenizer, name: str) -> tuple[IdArray, IdArray]:
    """(prefix, suffix) that `add_special_tokens` puts around one text, checked to be the same around every probe."""
    texts = ["", *(texts[0] for texts in PROBES.values())]
    plain = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    whole = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=True)]
    content, wrapped = plain[1], whole[1]
    starts = [at for at in range(len(wrapped) - len(content) + 1) if wrapped[at : at + len(content)] == content]
    if not starts:
        raise TokenizerError(f"{name}: adding special tokens changes the ids of the text itself; its post-processor is unknown")
    prefix, suffix = wrapped[: starts[0]], wrapped[starts[0] + len(content) :]
    for text, ids, with_specials in zip(texts, plain, whole, strict=True):
        if with_specials != prefix + ids + suffix:
            raise TokenizerError(f"{name}: the special tokens around {text!r} are not those around other texts")
    return np.array(prefix, dtype=np.int32), np.array(suffix, dtype=np.int32)
