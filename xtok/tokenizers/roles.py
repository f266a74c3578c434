"""The special-token roles of a tokenizer: which id is BOS, EOS, PAD, UNK, and which ids hold no content at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

__all__ = ["ROLES", "ROLE_NAMES", "SpecialRoles", "added_tokens", "special_roles"]

ROLES = ("bos", "eos", "pad", "unk")
ROLE_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


@dataclass(frozen=True, slots=True)
class SpecialRoles:
    """ids: role of ROLES -> id or None. code: id -> 1 + index into ROLES; an id has one code even with several roles."""

    ids: dict[str, int | None]
    code: dict[int, int]


def special_roles(
    pieces: Mapping[str, int], special_tokens: Mapping[str, str], *, model_unk: str | None, prefix_ids: Collection[int]
) -> SpecialRoles:
    """Roles of a vocabulary.

    pieces: piece -> id. special_tokens: "bos_token" -> text and so on; CLS stands in for a missing BOS, SEP for a missing EOS.
    model_unk: the model's own unknown piece, where no role names one. prefix_ids: what the tokenizer puts before a text: a token
    that is BOS and EOS at once has the code of the place it is put at.
    """
    named = {name: pieces.get(text) for name, text in special_tokens.items()}

    def first(*names: str) -> int | None:
        return next((token_id for name in names if (token_id := named.get(name)) is not None), None)

    ids = {"bos": first("bos_token", "cls_token"), "eos": first("eos_token", "sep_token"), "pad": first("pad_token")}
    ids["unk"] = first("unk_token")
    if ids["unk"] is None and model_unk is not None:
        ids["unk"] = pieces.get(model_unk)
    code: dict[int, int] = {}
    order = ["bos", "eos", "pad", "unk"] if ids["bos"] in prefix_ids else ["eos", "bos", "pad", "unk"]
    for role in order:
        token_id = ids[role]
        if token_id is not None:
            code.setdefault(token_id, ROLES.index(role) + 1)
    return SpecialRoles(ids, code)


def added_tokens(tokenizer: Tokenizer) -> tuple[dict[int, str], dict[int, str]]:
    """(ordinary, special) added tokens: id -> text."""
    ordinary: dict[int, str] = {}
    special: dict[int, str] = {}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        (special if token.special else ordinary)[token_id] = token.content
    return ordinary, special
