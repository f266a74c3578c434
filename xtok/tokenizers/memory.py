"""Give freed memory back to the system: a worker holds several large vocabularies and must stay small."""

from __future__ import annotations

import ctypes

__all__ = ["release_freed_memory"]


def release_freed_memory() -> None:
    """Return the scratch memory of loading and serializing, hundreds of megabytes that glibc would keep. Elsewhere: nothing."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    trim(0)
