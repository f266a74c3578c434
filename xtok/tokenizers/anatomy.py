"""What a `tokenizers.Tokenizer` says of itself: how its pieces spell bytes, which tokens are added and which are special.

Read from its components, never from the whole serialization, which for 150k pieces costs more than loading it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from xtok.tokenizers.pieces import METASPACE, PieceSpelling

__all__ = ["added_tokens", "describe_components", "piece_spelling"]


def describe_components(tokenizer: Tokenizer) -> dict[str, list[dict[str, Any]]]:
    """Flat list of the steps of each component ("normalizer", "pre_tokenizer", "decoder"): a Sequence is opened."""
    found = {}
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        component = getattr(tokenizer, name)
        found[name] = [] if component is None else list(_steps(json.loads(component.__getstate__())))
    return found


def _steps(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if node.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders"):
            for child in node.get(key, []):
                yield from _steps(child)
    else:
        yield node


def piece_spelling(tokenizer: Tokenizer) -> PieceSpelling:
    """How the pieces claim to spell bytes; the self-test decides whether to believe it."""
    components = describe_components(tokenizer)
    steps = [step for name in components for step in components[name]]
    if any(step["type"] == "ByteLevel" for step in steps):
        return PieceSpelling("byte_level")
    byte_pieces = bool(getattr(tokenizer.model, "byte_fallback", False)) or any(s["type"] == "ByteFallback" for s in steps)
    if any(_is_metaspace(step) for step in steps):
        return PieceSpelling("metaspace", byte_pieces)
    return PieceSpelling("plain", byte_pieces)


def _is_metaspace(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("replacement", METASPACE) == METASPACE
    if step["type"] != "Replace":
        return False
    pattern = step.get("pattern", {})
    return METASPACE in (step.get("content"), pattern.get("String"))


def added_tokens(tokenizer: Tokenizer) -> tuple[dict[int, str], dict[int, str]]:
    """(ordinary, special) added tokens: id -> text."""
    ordinary, special = {}, {}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        (special if token.special else ordinary)[token_id] = token.content
    return ordinary, special
