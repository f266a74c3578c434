"""Do two spellings of one span hold the same text? Strict where it matters: nothing is ever called equal by rewriting it."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["has_same_text", "loose_text"]

_BLANKS = re.compile(r"(\s+)")


def has_same_text(student: bytes, teacher: bytes, *, student_may_lack_blanks: bool, teacher_may_lack_blanks: bool) -> bool:
    """Equal NFKC text, blanks aside, case kept.

    student, teacher: UTF-8 bytes of a chunk's tokens (invalid bytes are equal only to themselves). A run of blanks may answer to
    itself, to plain spaces (normalizers collapse blanks and turn them into spaces), or to nothing where that side may lack
    blanks (its spans leave them out, or the other side put a dummy prefix there). So a tab is never a newline.
    """
    left, right = _composed(student), _composed(teacher)
    if left == right:
        return True
    left_parts, right_parts = _BLANKS.split(left), _BLANKS.split(right)
    if "".join(left_parts[::2]) != "".join(right_parts[::2]):
        return False
    # Walk both by their words' characters, so that a blank one side lacks splits the other's word at the same place.
    left_runs, right_runs = _runs(left_parts), _runs(right_parts)
    for place in left_runs.keys() | right_runs.keys():
        one, other = left_runs.get(place, ""), right_runs.get(place, "")
        if (not one and not student_may_lack_blanks) or (not other and not teacher_may_lack_blanks):
            return False
        if one and other and one != other and one.strip(" ") and other.strip(" "):
            return False
    return True


def _runs(parts: list[str]) -> dict[int, str]:
    """Blank runs by the number of other characters before them; parts alternate words and blank runs."""
    runs: dict[int, str] = {}
    place = 0
    for at, part in enumerate(parts):
        if at % 2:
            runs[place] = part
        else:
            place += len(part)
    return runs


def _composed(data: bytes) -> str:
    return unicodedata.normalize("NFKC", data.decode("utf-8", "surrogateescape"))


def loose_text(data: bytes) -> str:
    """What no normalizer changes: without case, marks and blanks; for telling a hole at the end from a truncation only."""
    text = unicodedata.normalize("NFKD", data.decode("utf-8", "ignore")).casefold()
    return "".join(char for char in text if not char.isspace() and not unicodedata.category(char).startswith(("M", "C")))
