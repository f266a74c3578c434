"""Bring a bare `tokenizers.Tokenizer` to the state in which transformers would use it: role tokens, post-processor, no limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from xtok.tokenizers.roles import ROLE_NAMES

__all__ = ["apply_config", "without_limits"]

FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, with truncation and padding switched off."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def apply_config(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Apply tokenizer_config.json as transformers does. Returns role name -> text, of the roles that are set.

    Tokens of `added_tokens_decoder` and every role token become added tokens; `add_bos_token`, `add_eos_token` and
    `split_special_tokens` are obeyed.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    listed = [_added_token(value, special=False) for _, value in sorted(decoder.items(), key=lambda item: int(item[0]))]
    tokenizer.add_tokens([token for token in listed if token is not None and token.content not in known])
    roles = {role: token for role in ROLE_NAMES if (token := _added_token(config.get(role))) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    extras = [token for value in values if (token := _added_token(value)) is not None]
    tokenizer.add_special_tokens([*roles.values(), *extras])
    texts = {role: token.content for role, token in roles.items()}
    _set_post_processor(tokenizer, config, texts)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return texts


def _added_token(value: Any, *, special: bool = True) -> AddedToken | None:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: bool(value[flag]) for flag in FLAGS if flag in value}
        return AddedToken(value["content"], special=special or bool(value.get("special")), **flags)
    return None


def _set_post_processor(tokenizer: Tokenizer, config: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where the configuration names them, overrule the tokenizer's own template."""
    if tokenizer.post_processor is not None and not {"add_bos_token", "add_eos_token"} & config.keys():
        return
    bos = roles.get("bos_token") if config.get("add_bos_token") else None
    eos = roles.get("eos_token") if config.get("add_eos_token") else None
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    specials = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text]
    tokenizer.post_processor = TemplateProcessing(single=" ".join(single), pair=" ".join(pair), special_tokens=specials)
