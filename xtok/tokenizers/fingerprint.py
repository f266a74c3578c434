"""Fingerprints: the content half is refused on a mismatch, the environment half only warned about."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import orjson

__all__ = ["content_fingerprint", "environment_fingerprint", "vocabulary_digest"]

FINGERPRINT_VERSION = 1
LIBRARIES = ("tokenizers", "fastokens", "transformers", "jinja2", "minijinja")


def vocabulary_digest(tokenizer_json: str | bytes, *, split_special_tokens: bool = False) -> str:
    """sha256 (hex) over what decides the ids of a text.

    tokenizer_json: the serialized tokenizer; its truncation and padding, which any call may change, are left out, and spellings
    that mean the same (merges as "a b" or as a pair, the order of keys) are made one. split_special_tokens: whether special
    tokens in a text are encoded as ordinary text.
    """
    document: dict[str, Any] = orjson.loads(tokenizer_json)
    for mutable in ("truncation", "padding", "version"):
        document.pop(mutable, None)
    model = document.get("model") or {}
    merges = model.get("merges")
    if merges and isinstance(merges[0], str):
        model["merges"] = [merge.split(" ", 1) for merge in merges]
    return _digest({"version": FINGERPRINT_VERSION, "split_special_tokens": split_special_tokens}, document)


def content_fingerprint(vocabulary: str, *, chat_template: str | None, role_tokens: Mapping[str, str]) -> str:
    """sha256 (hex) over what decides ids and rendering. vocabulary: `vocabulary_digest`. role_tokens: "bos_token" -> text."""
    return _digest(vocabulary, chat_template, dict(role_tokens))


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(orjson.dumps(part, option=orjson.OPT_SORT_KEYS))
        digest.update(b"\n")
    return digest.hexdigest()


def environment_fingerprint() -> dict[str, str]:
    """Versions of the libraries whose change could change ids or renderings: name -> version, "absent" if not installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions
