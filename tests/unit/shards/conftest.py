"""A small source with good rows, a bad one, a duplicate and a blank line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.shards.support import udhr_rows, write_lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty good rows, one that is no JSON, one whose id came before, and a blank line."""
    rows: list[Any] = udhr_rows(40)
    return write_lines(tmp_path / "in.jsonl", [*rows[:20], b"junk", rows[3], b"", *rows[20:]])
