"""The self-test at load: which route, which dummy prefix, and why, over all the ways a tokenizer can be set up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tokenizers.support import bundled, variant
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.self_test import PROBES, edited_bytes

Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def metaspace(scheme: str) -> Edit:
    def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
        document["normalizer"] = None
        document["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}

    return edit


def byte_level_prefix(document: dict[str, Any], config: dict[str, Any]) -> None:
    document["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def normalizer(kind: str) -> Edit:
    def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
        document["normalizer"] = {"type": kind}

    return edit


def no_edit(document: dict[str, Any], config: dict[str, Any]) -> None:
    return None


CASES = {
    "byte-level": ("chatml_bpe", no_edit, "byte", "never", set()),
    "byte-level with a prefix": ("chatml_bpe", byte_level_prefix, "byte", "unless_blank", set()),
    "Prepend": ("spm_bpe", no_edit, "byte", "always", {"the blank's own sign"}),
    "Metaspace always": ("spm_bpe", metaspace("always"), "byte", "unless_blank", {"the blank's own sign"}),
    "Metaspace first": ("spm_bpe", metaspace("first"), "byte", "unless_blank", {"the blank's own sign"}),
    "Metaspace never": ("spm_bpe", metaspace("never"), "byte", "never", {"the blank's own sign"}),
    "NFC": ("chatml_bpe", normalizer("NFC"), "byte", "never", {"combining marks"}),
    "NFD": (
        "chatml_bpe",
        normalizer("NFD"),
        "byte",
        "never",
        {"Latin letters with marks", "other scripts", "combining marks"},
    ),
    "NFKC Unigram": (
        "unigram_nfkc",
        no_edit,
        "byte",
        "unless_blank",
        {"other blanks", "combining marks", "compatibility characters", "the blank's own sign"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_route_and_dummy_prefix(case: str, tmp_path: Path) -> None:
    base, edit, route, prefix_space, changed = CASES[case]
    adapter = load_tokenizer(variant(tmp_path / "tokenizer", base, edit))
    assert (adapter.route, adapter.prefix_space) == (route, prefix_space)
    assert set(adapter.self_test.changed) == changed
    for group in changed:
        assert group in adapter.route_reason
    for group, texts in PROBES.items():
        if group not in changed:
            for text in texts:
                ids = adapter.encode_flat([text]).ids
                assert adapter.token_bytes(ids)[0].tobytes() == edited_bytes(text, adapter.prefix_space)


@pytest.mark.parametrize(("base", "edit"), [("wordpiece_lower", no_edit), ("chatml_bpe", normalizer("Lowercase"))])
def test_a_tokenizer_that_changes_prose_gets_the_offset_route(base: str, edit: Edit, tmp_path: Path) -> None:
    adapter = load_tokenizer(variant(tmp_path / "tokenizer", base, edit))
    assert adapter.route == "offset"
    assert "The quick brown fox" in adapter.route_reason
    assert "offsets" in adapter.route_reason


def test_edited_bytes() -> None:
    assert edited_bytes("a", "never") == b"a"
    assert edited_bytes("a", "always") == b" a"
    assert edited_bytes(" a", "always") == b"  a"
    assert edited_bytes("a", "unless_blank") == b" a"
    assert edited_bytes(" a", "unless_blank") == b" a"
    assert edited_bytes("\ta", "unless_blank") == b" \ta"
    assert [edited_bytes("", edit) for edit in ("never", "always", "unless_blank")] == [b"", b"", b""]


def test_a_wrong_table_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If pieces are believed to be spelled otherwise than they are, the tokenizer must not keep the byte route."""
    from xtok.tokenizers import adapter as adapter_module
    from xtok.tokenizers.pieces import PieceSpelling

    monkeypatch.setattr(adapter_module, "piece_spelling", lambda tokenizer: PieceSpelling("plain"))
    assert load_tokenizer(bundled("chatml_bpe")).route == "offset"
    assert load_tokenizer(bundled("spm_bpe")).route == "offset"
