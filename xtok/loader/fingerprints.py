"""Refuses tokenizers that did not make the dataset, and says when library versions differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schemas.manifest import Manifest
from schemas.plan import PlannedSide
from xtok.errors import ConfigError, FingerprintMismatchError
from xtok.tokenizers import TokenizerAdapter, adapt_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    AnyTokenizer = TokenizerAdapter | PreTrainedTokenizerBase

__all__ = ["check_tokenizers"]


def check_tokenizers(manifest: Manifest, student: AnyTokenizer | None, teachers: Sequence[AnyTokenizer | None] | None) -> None:
    """Compare tokenizers with those the manifest names; None is not compared.

    FingerprintMismatchError with both values when vocabulary, rules, template or special tokens differ; a warning when only the
    library versions do. ConfigError when `teachers` is not one entry for every teacher.
    """
    if student is not None:
        _check(student, manifest.student, "student")
    if teachers is None:
        return
    if len(teachers) != len(manifest.teachers):
        raise ConfigError(f"teacher_tokenizers has {len(teachers)} entries for the dataset's {len(manifest.teachers)} teachers")
    for index, (tokenizer, side) in enumerate(zip(teachers, manifest.teachers, strict=True)):
        if tokenizer is not None:
            _check(tokenizer, side, f"teacher {index}")


def _check(tokenizer: AnyTokenizer, side: PlannedSide, who: str) -> None:
    adapter = tokenizer if isinstance(tokenizer, TokenizerAdapter) else adapt_tokenizer(tokenizer)
    if adapter.content_fingerprint != side.content_fingerprint:
        raise FingerprintMismatchError(
            f"the {who}'s tokenizer {adapter.name} (fingerprint {adapter.content_fingerprint}) is not the one that made the dataset: "
            f"{side.name} (fingerprint {side.content_fingerprint}). Load that tokenizer, or preprocess again with this one."
        )
    here, there = adapter.environment, side.environment
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if differing:
        changes = ", ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in differing)
        warnings.warn(f"the {who}'s side of the dataset was made with other library versions: {changes}", stacklevel=4)
