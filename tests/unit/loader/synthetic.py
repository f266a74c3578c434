"""Small published datasets made of numbers, with rows of every kind: refused by a teacher, unaligned, one token long.

Also the slow twin of the loader: rows one by one in Python lists, padded with plain loops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas.manifest import FileEntry, Manifest, PartEntry, SideCounts
from schemas.plan import FORMAT_VERSION, PlannedSide
from schemas.tables import STUDENT_SCHEMA, TEACHER_SCHEMA

STUDENT_PAD, TEACHER_PADS = 7, (8, 9)
CONTEXT_LENGTHS = (64, 80, 48)


@dataclass
class Row:
    """One row as Python lists. teachers[i] is None where teacher i refused it."""

    idx: int
    loss_multiplier: float
    input_ids: list[int]
    token_mask: list[bool]
    teachers: list[dict[str, Any] | None] = field(default_factory=list)


def make_rows(num_rows: int, *, seed: int = 0, refuse: float = 0.0, plain: bool = False, num_teachers: int = 2) -> list[Row]:
    """Rows with random chunks. plain: every token in the mask, every pair correct. refuse: share that a teacher refuses."""
    rng = np.random.default_rng(seed)
    rows = []
    for idx in range(num_rows):
        num_chunks = int(rng.integers(0, 12))
        ids, student_chunks = _tokens(rng, num_chunks)
        row = Row(3 * idx, float(rng.choice([1.0, 0.5, 0.0])), ids, [plain or bool(rng.random() < 0.6) for _ in ids])
        for _ in range(num_teachers):
            teacher_ids, teacher_chunks = _tokens(rng, num_chunks)
            teacher = {
                "input_ids": teacher_ids,
                "token_mask": [plain or bool(rng.random() < 0.6) for _ in teacher_ids],
                "student_chunk_id": student_chunks,
                "teacher_chunk_id": teacher_chunks,
                "pair_is_correct": [plain or bool(rng.random() < 0.8) for _ in range(num_chunks)],
            }
            row.teachers.append(None if rng.random() < refuse else teacher)
        rows.append(row)
    return rows


def _tokens(rng: np.random.Generator, num_chunks: int) -> tuple[list[int], list[int]]:
    """Ids and chunk ids of one side: chunks in order, each one to three tokens, sometimes a token outside before or after."""
    chunks: list[int] = [-1] * int(rng.integers(0, 2))
    for chunk in range(num_chunks):
        chunks += [chunk] * int(rng.choice([1, 1, 1, 2, 3]))
    chunks += [-1] * int(rng.integers(0, 3)) or ([] if chunks else [-1])
    return rng.integers(10, 1000, len(chunks)).tolist(), chunks


def publish(
    folder: Path, parts: Sequence[Sequence[Row]], *, row_group_rows: int = 4, same_as_student: Sequence[bool] = (False, False)
) -> str:
    """Write `parts` as a dataset, in text mode when every token of every row is in the mask; returns its path."""
    entries = [_write_part(folder, index, list(rows), row_group_rows, same_as_student) for index, rows in enumerate(parts)]
    num_rows = sum(entry.num_rows for entry in entries)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        mode="text" if all(_is_all_masked(row) for rows in parts for row in rows) else "chat",
        config={},
        environment={},
        sources=(),
        student=_side("student", CONTEXT_LENGTHS[0], STUDENT_PAD, False),
        teachers=tuple(
            _side(f"teacher-{index}", CONTEXT_LENGTHS[index + 1], TEACHER_PADS[index], same)
            for index, same in enumerate(same_as_student)
        ),
        plan_sha256="0" * 64,
        num_rows=num_rows,
        num_source_rows=num_rows,
        num_blank_lines=0,
        source_rejects={},
        student_totals=SideCounts(num_rows=num_rows),
        teacher_totals=tuple(SideCounts(num_rows=num_rows) for _ in same_as_student),
        coverage=tuple(1.0 for _ in same_as_student),
        parts=tuple(entries),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return str(folder)


def _write_part(folder: Path, index: int, rows: list[Row], row_group_rows: int, same: Sequence[bool]) -> PartEntry:
    student = {
        "sample_id": [f"row-{row.idx}" for row in rows],
        "idx": [row.idx for row in rows],
        "source": ["texts.jsonl" for _ in rows],
        "line": [row.idx + 1 for row in rows],
        "document_id": [f"row-{row.idx}" for row in rows],
        "window": [0 for _ in rows],
        "input_ids": [row.input_ids for row in rows],
        "token_mask": [row.token_mask for row in rows],
        "regions": [None for _ in rows],
        "num_tokens": [len(row.input_ids) for row in rows],
        "loss_multiplier": [row.loss_multiplier for row in rows],
    }
    student_file = _write(folder, "student", index, pa.table(student, schema=STUDENT_SCHEMA), row_group_rows)
    teacher_files: list[FileEntry | None] = []
    for teacher, is_same in enumerate(same):
        found = [row.teachers[teacher] for row in rows]
        table = {
            "sample_id": student["sample_id"],
            "idx": student["idx"],
            **{name: [row and row[name] for row in found] for name in TEACHER_SCHEMA.names[2:7]},
            "regions": [None for _ in rows],
            "route": [row and "byte" for row in found],
            "coverage": [row and 1.0 for row in found],
        }
        side = f"teacher={teacher}"
        teacher_files.append(
            None if is_same else _write(folder, side, index, pa.table(table, schema=TEACHER_SCHEMA), row_group_rows)
        )
    nothing = FileEntry(path=f"rejects/part-{index:05d}.parquet", num_rows=0, num_bytes=0, sha256="", row_group_rows=())
    return PartEntry(
        index=index,
        num_source_rows=len(rows),
        num_rows=len(rows),
        student_digest="",
        teacher_digests=tuple("" for _ in same),
        student_file=student_file,
        teacher_files=tuple(teacher_files),
        rejects_file=nothing,
        source_rejects={},
        student=SideCounts(num_rows=len(rows)),
        teachers=tuple(
            SideCounts() if is_same else _counts([row.teachers[teacher] for row in rows]) for teacher, is_same in enumerate(same)
        ),
    )


def _counts(found: list[dict[str, Any] | None]) -> SideCounts:
    pairs = [flag for row in found if row for flag in row["pair_is_correct"]]
    return SideCounts(num_rows=len(found), num_null_rows=found.count(None), num_chunks=len(pairs), num_correct_chunks=sum(pairs))


def _is_all_masked(row: Row) -> bool:
    return all(row.token_mask) and all(all(teacher["token_mask"]) for teacher in row.teachers if teacher)


def _write(folder: Path, side: str, index: int, table: pa.Table, row_group_rows: int) -> FileEntry:
    path = folder / side / f"part-{index:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_rows, use_dictionary=False, compression="zstd", data_page_version="2.0")
    groups = pq.read_metadata(path)
    return FileEntry(
        path=f"{side}/part-{index:05d}.parquet",
        num_rows=table.num_rows,
        num_bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        row_group_rows=tuple(groups.row_group(group).num_rows for group in range(groups.num_row_groups)),
    )


def _side(name: str, context_length: int, pad_token_id: int, same: bool) -> PlannedSide:
    return PlannedSide(
        name=name,
        content_fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        environment={"tokenizers": "1"},
        context_length=context_length,
        add_special_tokens=True,
        prefix_ids=(),
        suffix_ids=(),
        pad_token_id=pad_token_id,
        vocab_size=1000,
        route="byte",
        route_reason="",
        backend="tokenizers",
        same_as_student=same,
    )


def reference_batch(rows: Sequence[Row], teachers: Sequence[int], *, divisor: int = 1, context: bool = False) -> dict[str, Any]:
    """The batch of `rows`, computed with plain loops over Python lists."""
    width = _width([len(row.input_ids) for row in rows], divisor, CONTEXT_LENGTHS[0] if context else 1)
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([_pad(row.input_ids, width, STUDENT_PAD) for row in rows]),
        "input_lengths": torch.tensor([len(row.input_ids) for row in rows]),
        "token_mask": torch.tensor([_pad([int(flag) for flag in row.token_mask], width, 0) for row in rows]),
        "sample_mask": torch.tensor([row.loss_multiplier for row in rows], dtype=torch.float32),
        "idx": [row.idx for row in rows],
    }
    for index in teachers:
        found = [row.teachers[index] for row in rows]
        lengths = [len(row["input_ids"]) for row in found]
        teacher_width = _width(lengths, divisor, CONTEXT_LENGTHS[index + 1] if context else 1)
        num_chunks = [len(row["pair_is_correct"]) for row in found]
        pairs = max(1, *num_chunks)
        exact = [_exact(row) for row in found]
        batch |= {
            f"teacher_{index}_input_ids": torch.tensor(
                [_pad(row["input_ids"], teacher_width, TEACHER_PADS[index]) for row in found]
            ),
            f"teacher_{index}_input_lengths": torch.tensor(lengths),
            f"teacher_{index}_token_mask": torch.tensor(
                [_pad([int(flag) for flag in row["token_mask"]], teacher_width, 0) for row in found]
            ),
            f"alignment_{index}_pair_valid": torch.tensor([_pad([True] * count, pairs, False) for count in num_chunks]),
            f"alignment_{index}_pair_is_correct": torch.tensor([_pad(row["pair_is_correct"], pairs, False) for row in found]),
            f"alignment_{index}_student_exact_partition_mask": torch.tensor([_pad(flags[0], width, False) for flags in exact]),
            f"alignment_{index}_teacher_exact_partition_mask": torch.tensor(
                [_pad(flags[1], teacher_width, False) for flags in exact]
            ),
            f"alignment_{index}_student_chunk_id": torch.tensor([_pad(row["student_chunk_id"], width, -1) for row in found]),
            f"alignment_{index}_teacher_chunk_id": torch.tensor(
                [_pad(row["teacher_chunk_id"], teacher_width, -1) for row in found]
            ),
            f"alignment_{index}_num_chunks": torch.tensor(num_chunks),
        }
    return batch


def _width(lengths: list[int], divisor: int, at_least: int) -> int:
    width = max(at_least, *lengths)
    while width % divisor:
        width += 1
    return width


def _pad(values: list[Any], width: int, pad: Any) -> list[Any]:
    return values + [pad] * (width - len(values))


def _exact(row: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    student, teacher = row["student_chunk_id"], row["teacher_chunk_id"]

    def exact(chunk: int) -> bool:
        return chunk >= 0 and student.count(chunk) == 1 and teacher.count(chunk) == 1 and row["pair_is_correct"][chunk]

    return [exact(chunk) for chunk in student], [exact(chunk) for chunk in teacher]


def assert_equal_batches(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Same keys, dtypes, shapes and bits."""
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key
