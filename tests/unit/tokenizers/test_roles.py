"""Special tokens by role, what a tokenizer adds by itself, and the id to pad with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.tokenizers.support import bundled, variant
from xtok.errors import TokenizerError
from xtok.tokenizers import ROLES, load_tokenizer
from xtok.tokenizers.roles import special_roles


def roles_of(adapter: Any) -> dict[str, str]:
    """Role -> text, read back from the codes."""
    code = adapter.table.role_code
    return {ROLES[code[i] - 1]: adapter.token_text(i) for i in np.flatnonzero(code)}


def test_roles_of_the_bundled_tokenizers() -> None:
    assert roles_of(load_tokenizer(bundled("chatml_bpe"))) == {"eos": "<|im_end|>", "pad": "<|endoftext|>"}
    assert roles_of(load_tokenizer(bundled("spm_bpe"))) == {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    wordpiece = load_tokenizer(bundled("wordpiece_lower"))
    assert roles_of(wordpiece) == {"bos": "[CLS]", "eos": "[SEP]", "pad": "[PAD]", "unk": "[UNK]"}
    assert (wordpiece.prefix_ids.tolist(), wordpiece.suffix_ids.tolist()) == ([wordpiece.bos_token_id], [wordpiece.eos_token_id])
    assert wordpiece.prefix_ids.dtype == np.int32


def test_padding_falls_back_to_eos() -> None:
    spm = load_tokenizer(bundled("spm_bpe"))
    assert spm.pad_token_id == spm.eos_token_id
    chatml = load_tokenizer(bundled("chatml_bpe"))
    assert chatml.token_text(chatml.pad_token_id) == "<|endoftext|>"
    assert chatml.bos_token_id is None


def test_without_pad_and_eos_padding_is_refused(tmp_path: Path) -> None:
    def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
        del config["eos_token"], config["pad_token"]

    adapter = load_tokenizer(variant(tmp_path / "tokenizer", "chatml_bpe", edit))
    assert adapter.eos_token_id is None
    with pytest.raises(TokenizerError, match="neither a PAD nor an EOS"):
        _ = adapter.pad_token_id


def test_one_token_in_two_roles_has_the_code_of_its_place() -> None:
    pieces = {"<|endoftext|>": 7}
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    put_before = special_roles(pieces, tokens, model_unk=None, prefix_ids=[7])
    assert put_before.code == {7: 1 + ROLES.index("bos")}
    nowhere = special_roles(pieces, tokens, model_unk=None, prefix_ids=[])
    assert nowhere.code == {7: 1 + ROLES.index("eos")}
    assert nowhere.ids == {"bos": 7, "eos": 7, "pad": 7, "unk": None}


def test_named_roles_come_before_their_stand_ins() -> None:
    pieces = {"<s>": 0, "[CLS]": 1, "[SEP]": 2, "<unk>": 3}
    roles = special_roles(
        pieces, {"bos_token": "<s>", "cls_token": "[CLS]", "sep_token": "[SEP]"}, model_unk="<unk>", prefix_ids=[]
    )
    assert roles.ids == {"bos": 0, "eos": 2, "pad": None, "unk": 3}


def test_the_models_own_unknown_piece_holds_no_bytes(tmp_path: Path) -> None:
    """`<unk>` stands for text it does not spell, also where the configuration does not name it."""

    def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
        document["model"]["byte_fallback"] = False
        document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "<unk>"]
        del config["unk_token"]

    adapter = load_tokenizer(variant(tmp_path / "tokenizer", "spm_bpe", edit))
    ids = adapter.encode_flat(["a 𒀀 b"]).ids
    assert adapter.unk_token_id in ids.tolist()
    assert adapter.token_bytes(ids)[0].tobytes() == b" a  b"
    assert adapter.table.is_special[adapter.unk_token_id]
