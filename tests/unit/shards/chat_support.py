"""Small chat datasets on the bundled tokenizers, built in this process."""

from __future__ import annotations

import zlib
from datetime import date
from pathlib import Path
from typing import Any

from schemas.manifest import Manifest
from tests.unit.shards.support import TOKENIZERS, build, side

CHATS = TOKENIZERS.parent / "chats.jsonl"
DAY = date(2025, 1, 2)
CHAT = {"mode": "chat", "part_bytes": 4_000, "row_group_rows": 4, "render_date": DAY}


def chats(output: Path, source: Path | str = CHATS, **changes: Any) -> Manifest:
    """Builds a dataset of chats without a pool."""
    return build(output, source, **(CHAT | changes))


def with_template(folder: Path, template: str, name: str = "chatml_bpe", **fields: Any) -> dict[str, Any]:
    """A model's side with another template."""
    path = folder / f"{zlib.crc32(template.encode())}.jinja"
    path.write_text(template)
    return side(name, chat_template=str(path), **fields)
