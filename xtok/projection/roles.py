"""Special tokens by role: the only ones a projection maps, and never by how their text looks.

Roles: bos, eos, pad, unk as the tokenizer declares them; end of turn as its own chat template writes it; the think markers, which some
tokenizers keep as special tokens and others as ordinary ones.
"""

from __future__ import annotations

from datetime import date

from xtok.chat.templates import ReferenceRenderer, TemplateFailure
from xtok.tokenizers import TokenizerAdapter

__all__ = ["PROJECTION_ROLES", "end_of_turn_id", "role_ids"]

# In order of precedence: an id with several roles (Qwen's <|im_end|> is eos and end of turn) takes the first.
PROJECTION_ROLES = ("end_of_turn", "eos", "bos", "pad", "unk", "think_open", "think_close")
THINK_MARKERS = {"think_open": ("<think>", "[THINK]"), "think_close": ("</think>", "[/THINK]")}
ANSWER = "xtok answer"


def role_ids(tokenizer: TokenizerAdapter) -> dict[str, int]:
    """Role of PROJECTION_ROLES -> id, for the roles this tokenizer has."""
    ids = {
        "end_of_turn": end_of_turn_id(tokenizer),
        "eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": _pad(tokenizer),
    }
    for role, spellings in THINK_MARKERS.items():
        ids[role] = next((i for i in (_single_token(tokenizer, text) for text in spellings) if i is not None), None)
    return {role: token_id for role in PROJECTION_ROLES if (token_id := ids[role]) is not None}


def end_of_turn_id(tokenizer: TokenizerAdapter) -> int | None:
    """The token a finished assistant turn ends with, as the chat template renders it; EOS where there is no template to ask."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    messages = [{"role": "user", "content": "xtok question"}, {"role": "assistant", "content": ANSWER}]
    try:
        renderer = ReferenceRenderer(
            tokenizer.chat_template, render_date=date(2000, 1, 1), special_tokens=tokenizer.special_tokens
        )
        text = renderer.render([dict(message) for message in messages], None, {})
    except TemplateFailure:
        return tokenizer.eos_token_id
    _, found, tail = text.rpartition(ANSWER)
    if not found or not tail.strip():
        return tokenizer.eos_token_id
    ids = tokenizer.encode_flat([tail.lstrip()]).ids
    specials = [int(i) for i in ids if tokenizer.table.is_special[i]]
    return specials[0] if specials else tokenizer.eos_token_id


def _pad(tokenizer: TokenizerAdapter) -> int | None:
    return None if "pad_token" not in tokenizer.special_tokens else tokenizer.pad_token_id


def _single_token(tokenizer: TokenizerAdapter, text: str) -> int | None:
    """Id of the token that is exactly `text`, special or not."""
    special = next((i for i, content in tokenizer.table.special_content.items() if content == text.encode()), None)
    if special is not None:
        return special
    ids = tokenizer.encode_flat([text]).ids
    named = [int(i) for i in ids if tokenizer.token_text(int(i)) == text]
    return named[0] if named else None
