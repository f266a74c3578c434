"""Tokenizers that did not make the dataset are refused; other library versions are only said."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from schemas.manifest import Manifest
from tests.unit.loader.synthetic import make_rows, publish
from xtok.errors import FingerprintMismatchError
from xtok.loader import AlignedShardLoader
from xtok.tokenizers import load_tokenizer


@pytest.fixture
def url(tmp_path: Path, repository: Path) -> str:
    """A dataset whose manifest names two bundled tokenizers."""
    url = publish(tmp_path, [make_rows(4)])
    path = tmp_path / "manifest.json"
    manifest = Manifest.model_validate_json(path.read_bytes())
    adapters = [load_tokenizer(str(repository / "infra" / "bundled" / "tokenizers" / name)) for name in ("chatml_bpe", "spm_bpe")]
    sides = [
        side.model_copy(update={"content_fingerprint": adapter.content_fingerprint, "environment": dict(adapter.environment)})
        for side, adapter in zip((manifest.student, manifest.teachers[0]), adapters, strict=True)
    ]
    path.write_text(
        manifest.model_copy(update={"student": sides[0], "teachers": (sides[1], manifest.teachers[1])}).model_dump_json()
    )
    return url


def test_the_right_tokenizers_pass_in_either_form(url: str, repository: Path) -> None:
    folder = repository / "infra" / "bundled" / "tokenizers"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AlignedShardLoader(
            url,
            batch_size=2,
            student_tokenizer=AutoTokenizer.from_pretrained(folder / "chatml_bpe"),
            teacher_tokenizers=[load_tokenizer(str(folder / "spm_bpe")), None],
        )


def test_another_tokenizer_is_refused_with_both_values(url: str, repository: Path) -> None:
    wrong = load_tokenizer(str(repository / "infra" / "bundled" / "tokenizers" / "spm_bpe"))
    with pytest.raises(FingerprintMismatchError, match="student") as refused:
        AlignedShardLoader(url, batch_size=2, student_tokenizer=wrong)
    manifest = Manifest.model_validate_json((Path(url) / "manifest.json").read_bytes())
    assert wrong.content_fingerprint in str(refused.value)
    assert manifest.student.content_fingerprint in str(refused.value)
    with pytest.raises(FingerprintMismatchError, match="teacher 1"):
        AlignedShardLoader(url, batch_size=2, teacher_tokenizers=[None, wrong])


def test_a_changed_template_is_another_tokenizer(url: str, repository: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(repository / "infra" / "bundled" / "tokenizers" / "chatml_bpe")
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(FingerprintMismatchError):
        AlignedShardLoader(url, batch_size=2, student_tokenizer=tokenizer)


def test_other_library_versions_warn(url: str, repository: Path) -> None:
    path = Path(url) / "manifest.json"
    manifest = Manifest.model_validate_json(path.read_bytes())
    older = manifest.student.model_copy(update={"environment": manifest.student.environment | {"tokenizers": "0.1"}})
    path.write_text(manifest.model_copy(update={"student": older}).model_dump_json())
    right = load_tokenizer(str(repository / "infra" / "bundled" / "tokenizers" / "chatml_bpe"))
    with pytest.warns(UserWarning, match=r"tokenizers 0\.1 there"):
        AlignedShardLoader(url, batch_size=2, student_tokenizer=right)
