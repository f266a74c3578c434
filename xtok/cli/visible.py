"""Text of users' data as people may safely see it: control characters, which steer a terminal, are spelt out."""

from __future__ import annotations

import re

__all__ = ["visible"]

# C0 but tab and line feed, delete, C1.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """`text` with every control character but tab and line feed as `\\x1b` and its like."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
