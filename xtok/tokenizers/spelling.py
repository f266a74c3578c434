"""How a tokenizer claims to spell bytes, read from its components.

A claim only: the self-test decides whether to believe it. The components are asked one by one, because the whole serialization of
150k pieces costs as much as loading them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from xtok.tokenizers.pieces import METASPACE, PieceSpelling

__all__ = ["piece_spelling"]

COMPONENTS = ("normalizer", "pre_tokenizer", "decoder")
CHILDREN = ("normalizers", "pretokenizers", "decoders")


def piece_spelling(tokenizer: Tokenizer) -> PieceSpelling:
    """Byte-level characters, `▁` for blanks, or plain text; and whether `<0xNN>` pieces stand for single bytes."""
    parts = (getattr(tokenizer, name) for name in COMPONENTS)
    steps = [step for part in parts if part is not None for step in _steps(json.loads(part.__getstate__()))]
    if any(step["type"] == "ByteLevel" for step in steps):
        return PieceSpelling("byte_level")
    byte_pieces = bool(getattr(tokenizer.model, "byte_fallback", False)) or any(s["type"] == "ByteFallback" for s in steps)
    return PieceSpelling("metaspace" if any(map(_is_metaspace, steps)) else "plain", byte_pieces)


def _steps(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if node.get("type") != "Sequence":
        yield node
    for key in CHILDREN:
        for child in node.get(key, []):
            yield from _steps(child)


def _is_metaspace(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("replacement", METASPACE) == METASPACE)
    return step["type"] == "Replace" and METASPACE in (step.get("content"), step.get("pattern", {}).get("String"))
