"""NFC with its alignment: which characters of the original text each character of the normalized one stands for.

The rule is the one that fast tokenizers report spans by. Walking the normalized text, a character takes as many original ones as
have their first canonical component in it: it spans the first of them, the others are in no span. A character that takes none
(the second half of a split) spans the last one taken before it.

Shape legend: M = characters of the normalized text.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["nfc_places"]

# No ASCII character joins the one before it, so text falls apart at each; only runs with others can change.
_RUN = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]+")


def nfc_places(text: str) -> tuple[str, npt.NDArray[np.int32]]:
    """(the text in NFC, int32 [M]: the original character that each of its characters spans)."""
    pieces: list[str] = []
    places: list[npt.NDArray[np.int32]] = []
    done = 0
    for run in _RUN.finditer(text):
        if unicodedata.is_normalized("NFC", run.group()):
            continue
        start, end = run.span()
        normalized, own = _run_places(run.group())
        pieces += (text[done:start], normalized)
        places += (np.arange(done, start, dtype=np.int32), own + np.int32(start))
        done = end
    pieces.append(text[done:])
    places.append(np.arange(done, len(text), dtype=np.int32))
    return "".join(pieces), np.concatenate(places)


@lru_cache(maxsize=1 << 14)
def _run_places(run: str) -> tuple[str, npt.NDArray[np.int32]]:
    """A run is about a word, so the same ones come again and again."""
    normalized = unicodedata.normalize("NFC", run)
    # Components in canonical order, each with whether it is the first one of its original character.
    components = [(part, place == 0) for char in run for place, part in enumerate(unicodedata.normalize("NFD", char))]
    waiting = _canonical_order(components)
    places: list[int] = []
    following = 0
    for char in normalized:
        taken = 0
        for component in unicodedata.normalize("NFD", char):
            at = next(index for index, (part, _) in enumerate(waiting) if part == component)
            taken += waiting.pop(at)[1]
        places.append(following if taken else max(0, following - 1))
        following += taken
    return normalized, np.array(places, dtype=np.int32)


def _canonical_order(components: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Marks between two starters sorted by combining class, equal classes in their order."""
    ordered: list[tuple[str, bool]] = []
    marks: list[tuple[str, bool]] = []
    for component in components:
        if unicodedata.combining(component[0]):
            marks.append(component)
            continue
        ordered += sorted(marks, key=lambda mark: unicodedata.combining(mark[0]))
        marks = []
        ordered.append(component)
    return ordered + sorted(marks, key=lambda mark: unicodedata.combining(mark[0]))
