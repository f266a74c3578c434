"""What the fault tests share: a small source, and an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import S3Server, running_server
from tests.unit.shards.support import udhr_rows, write_lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty good rows, one that is no JSON, one whose id came before, and a blank line."""
    rows: list[Any] = udhr_rows(40)
    return write_lines(tmp_path / "in.jsonl", [*rows[:20], b"junk", rows[3], b"", *rows[20:]])


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """Started once a module; every test leaves it sound."""
    with running_server() as server:
        yield server
