"""Fingerprints: the same where ids and rendering are the same, another where anything of them changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tokenizers.support import BUNDLED_NAMES, bundled, variant
from xtok.tokenizers import load_tokenizer, same_tokenizer
from xtok.tokenizers.fingerprint import content_fingerprint, vocabulary_digest

Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def test_fingerprints_differ_between_tokenizers_and_not_between_processes() -> None:
    here = [load_tokenizer(bundled(name)).content_fingerprint for name in BUNDLED_NAMES]
    assert len(set(here)) == len(here)
    program = (
        "from xtok.tokenizers import load_tokenizer\n"
        f"print(*(load_tokenizer(path).content_fingerprint for path in {[bundled(name) for name in BUNDLED_NAMES]!r}))"
    )
    there = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert there == here


def limits(document: dict[str, Any], config: dict[str, Any]) -> None:
    document["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}


def unrelated(document: dict[str, Any], config: dict[str, Any]) -> None:
    config["model_max_length"] = 7
    config["tokenizer_class"] = "LlamaTokenizerFast"


def merges_as_strings(document: dict[str, Any], config: dict[str, Any]) -> None:
    document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]


@pytest.mark.parametrize("edit", [limits, unrelated, merges_as_strings])
def test_what_changes_no_id_changes_no_fingerprint(edit: Edit, tmp_path: Path) -> None:
    changed = load_tokenizer(variant(tmp_path / "tokenizer", "chatml_bpe", edit))
    assert same_tokenizer(changed, load_tokenizer(bundled("chatml_bpe")))


def swapped_merges(document: dict[str, Any], config: dict[str, Any]) -> None:
    merges = document["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def another_id(document: dict[str, Any], config: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]


def ordinary_instead_of_special(document: dict[str, Any], config: dict[str, Any]) -> None:
    next(token for token in document["added_tokens"] if token["content"] == "<|im_start|>")["special"] = False


def another_eos(document: dict[str, Any], config: dict[str, Any]) -> None:
    config["eos_token"] = "<|endoftext|>"


def another_normalizer(document: dict[str, Any], config: dict[str, Any]) -> None:
    document["normalizer"] = {"type": "NFC"}


@pytest.mark.parametrize(
    "edit", [swapped_merges, another_id, ordinary_instead_of_special, another_eos, another_normalizer], ids=lambda f: f.__name__
)
def test_what_changes_ids_or_roles_changes_the_fingerprint(edit: Edit, tmp_path: Path) -> None:
    changed = load_tokenizer(variant(tmp_path / "tokenizer", "chatml_bpe", edit))
    assert not same_tokenizer(changed, load_tokenizer(bundled("chatml_bpe")))


def test_the_template_is_part_of_it(tmp_path: Path) -> None:
    folder = variant(tmp_path / "tokenizer", "chatml_bpe", lambda document, config: None)
    template = Path(folder) / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + "{# #}", encoding="utf-8")
    assert not same_tokenizer(load_tokenizer(folder), load_tokenizer(bundled("chatml_bpe")))


def test_a_template_in_the_configuration_counts_like_one_in_its_file(tmp_path: Path) -> None:
    folder = Path(variant(tmp_path / "tokenizer", "chatml_bpe", lambda document, config: None))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    for spelled in (template, [{"name": "rag", "template": "x"}, {"name": "default", "template": template}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": spelled}), encoding="utf-8")
        assert same_tokenizer(load_tokenizer(str(folder)), load_tokenizer(bundled("chatml_bpe")))


def test_another_template_set_later_counts() -> None:
    adapter = load_tokenizer(bundled("chatml_bpe"))
    before = adapter.content_fingerprint
    adapter.chat_template = "{{ messages }}"
    assert adapter.content_fingerprint != before
    assert adapter.transformers_tokenizer.chat_template == "{{ messages }}"


def test_fingerprints_are_functions_of_their_arguments() -> None:
    document = json.dumps({"model": {"merges": ["a b"], "vocab": {"a": 0}}, "truncation": None, "version": "1.0"})
    reordered = json.dumps({"version": "1.0", "padding": {"x": 1}, "model": {"vocab": {"a": 0}, "merges": [["a", "b"]]}})
    vocabulary = vocabulary_digest(document)
    assert vocabulary_digest(reordered) == vocabulary
    assert vocabulary_digest(document, split_special_tokens=True) != vocabulary
    base = content_fingerprint(vocabulary, chat_template=None, role_tokens={"eos_token": "x", "bos_token": "y"})
    assert content_fingerprint(vocabulary, chat_template=None, role_tokens={"bos_token": "y", "eos_token": "x"}) == base
    assert content_fingerprint(vocabulary, chat_template="", role_tokens={"eos_token": "x", "bos_token": "y"}) != base
    assert content_fingerprint(vocabulary, chat_template=None, role_tokens={"eos_token": "y", "bos_token": "x"}) != base
    assert len(base) == 64


def test_the_environment_names_the_libraries() -> None:
    import tokenizers

    environment = load_tokenizer(bundled("spm_bpe")).environment
    assert environment["tokenizers"] == tokenizers.__version__
    assert set(environment) == {"tokenizers", "fastokens", "transformers", "jinja2", "minijinja"}
