"""The online path: `CrossTokenizerCollator` tokenizes and aligns in the data loader, with the numbers of the published shards."""

from __future__ import annotations

from xtok.collate.collator import CrossTokenizerCollator
from xtok.collate.config import CrossTokenizerCollatorConfig

__all__ = ["CrossTokenizerCollator", "CrossTokenizerCollatorConfig"]
