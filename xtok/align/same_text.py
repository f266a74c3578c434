"""Do two spellings of one span hold the same text? Strict where it matters: nothing is ever called equal by rewriting it."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

__all__ = ["has_same_text", "is_loosely_equal"]

_BLANKS = re.compile(r"(\s+)")
_SHORT = 64  # bytes of both sides together
_TAIL = 128  # bytes


def has_same_text(student: bytes, teacher: bytes, *, student_may_lack_blanks: bool, teacher_may_lack_blanks: bool) -> bool:
    """Equal NFKC text, blanks aside, case kept.

    student, teacher: UTF-8 bytes of a chunk's tokens (invalid bytes are equal only to themselves). A run of blanks may answer to
    itself, to plain spaces (normalizers collapse blanks and turn them into spaces), or to nothing where that side may lack
    blanks (its spans leave them out, or the other side put a dummy prefix there). So a tab is never a newline.
    """
    key = student, teacher, student_may_lack_blanks, teacher_may_lack_blanks
    # Most differences are a few accented letters again and again; long chunks are rare, and would fill the memory.
    return _seen_before(*key) if len(student) + len(teacher) <= _SHORT else _compare(*key)


def _compare(student: bytes, teacher: bytes, student_may_lack_blanks: bool, teacher_may_lack_blanks: bool) -> bool:
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


_seen_before = lru_cache(maxsize=1 << 15)(_compare)


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


def is_loosely_equal(student: bytes, teacher: bytes) -> bool:
    """Equal without case, marks and blanks, which is what no normalizer changes; for telling a hole at the end from a truncation only."""
    # Characters are judged one by one, so the ends of equal texts are equal: a truncated text mostly shows there.
    ends = _loose_text(_tail(student)), _loose_text(_tail(teacher))
    if not (ends[0].endswith(ends[1]) or ends[1].endswith(ends[0])):
        return False
    return _loose_text(student) == _loose_text(teacher)


def _tail(data: bytes) -> bytes:
    """The last characters, the first of them whole."""
    first = max(len(data) - _TAIL, 0)
    while first and data[first : first + 1] and data[first] & 0xC0 == 0x80:
        first -= 1
    return data[first:]


def _loose_text(data: bytes) -> str:
    return unicodedata.normalize("NFKD", data.decode("utf-8", "ignore")).casefold().translate(_LOOSE)


class _Loose(dict[int, int | None]):
    """The characters that `_loose_text` keeps, each judged when it is first met: whole documents pass through here."""

    def __missing__(self, code: int) -> int | None:
        char = chr(code)
        is_dropped = char.isspace() or unicodedata.category(char).startswith(("M", "C"))
        self[code] = None if is_dropped else code
        return self[code]


_LOOSE = _Loose()
