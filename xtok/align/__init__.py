"""Alignment of two tokenizations of the same text: exact byte chunks, offsets where a tokenizer changes the text.

`TokenAligner`, `AlignmentPair` and `AlignmentBatch` are the torch view and are imported at first use; `xtok.align.lattice` and
what lies under it are numpy only, so that a preprocessing worker starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtok.align.aligner import TokenAligner
    from xtok.align.batch import AlignmentBatch, AlignmentPair

__all__ = ["AlignmentBatch", "AlignmentPair", "TokenAligner"]

_HOME = {"AlignmentBatch": "xtok.align.batch", "AlignmentPair": "xtok.align.batch", "TokenAligner": "xtok.align.aligner"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
