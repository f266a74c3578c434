"""Small datasets on the bundled tokenizers, built in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schemas.config import PreprocessConfig
from schemas.manifest import Manifest
from tests.conftest import REPOSITORY
from xtok.shards.pipeline import preprocess
from xtok.shards.pool import SerialRunner

PARTS = {"part_bytes": 8_000, "row_group_rows": 4}  # many parts and row groups of a few rows
TOKENIZERS = REPOSITORY / "infra" / "bundled" / "tokenizers"
UDHR = REPOSITORY / "infra" / "bundled" / "udhr.jsonl"


def config_for(output: Path, source: Path | str | list[str], **changes: Any) -> PreprocessConfig:
    """A configuration on bundled tokenizers; limits and projections off unless given. student, teachers: names, or whole sides."""
    student = changes.pop("student", "chatml_bpe")
    teachers = changes.pop("teachers", ["spm_bpe"])
    sources = source if isinstance(source, list) else [str(source)]
    fields = {"max_reject_fraction": 1.0, "min_coverage": 0.0, "projection": False} | changes
    return PreprocessConfig(
        sources=tuple(sources), student=_side(student), teachers=tuple(map(_side, teachers)), output=str(output), **fields
    )


def side(name: str, context_length: int = 4096, **fields: Any) -> dict[str, Any]:
    """A model's side on a bundled tokenizer."""
    return {"tokenizer": str(TOKENIZERS / name), "context_length": context_length, **fields}


def _side(side: Any) -> dict[str, Any]:
    return {"tokenizer": str(TOKENIZERS / side)} if isinstance(side, str) else side


def build(output: Path, source: Path | str | list[str], **changes: Any) -> Manifest:
    """Builds a dataset without a pool."""
    return preprocess(config_for(output, source, **changes), runner=SerialRunner())


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; a bytes row is written as it stands."""
    with open(path, "wb") as stream:
        for row in rows:
            stream.write((row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()) + b"\n")
    return path


def udhr_rows(count: int) -> list[dict[str, Any]]:
    """The first rows of the bundled texts, taken evenly over the languages."""
    rows = [json.loads(line) for line in UDHR.read_text(encoding="utf-8").splitlines()]
    return rows[:: max(1, len(rows) // count)][:count]


def frozen_files(output: Path) -> dict[str, bytes]:
    """Every file of a dataset but runs/: what must be the same bytes from run to run."""
    files = [path for path in sorted(output.rglob("*")) if path.is_file() and "runs" not in path.relative_to(output).parts]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}
