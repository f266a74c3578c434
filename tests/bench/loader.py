"""The loader against the plain way to make the same batches, and against reading the columns alone, on one core.

Everything counts processor time of the whole process (threads included) over real tokens: those of the student and of all teachers,
padding left out. The plain way reads the same row groups in the same order, pads each row with torch and finds exact pairs with
numpy, row by row. Rounds are interleaved and the best of each counts, since other work on the machine only ever slows one down.

Data: the bundled UDHR texts and tokenizers, or with XTOK_SHARED its texts.jsonl and three production tokenizers; the documents as they
are, cut into short rows (about 100 tokens, mixed scripts, so that most of a batch is padding) and joined into long ones (about
4,000).
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence

from schemas.config import ModelSide, PreprocessConfig
from tests import real_tokenizers
from tests.conftest import REPOSITORY
from tests.unit.loader.synthetic import assert_equal_batches
from xtok.batch import BatchedDataDict
from xtok.loader import AlignedShardLoader
from xtok.loader.order import EpochOrder
from xtok.shards.pipeline import preprocess

NAME = "loader"
DESCRIPTION = "real tokens a second rebuilt into longest-row batches on one core, against the plain way"

ROUNDS = 4
NUM_CHARACTERS = 12_000_000
LONG_CHARACTERS = 14_000
LIMIT = ">= 20"


def run() -> list[dict[str, Any]]:
    """The figures, in million real tokens a second."""
    figures = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, characters, batch_size in (("documents", None, 8), ("short rows", 400, 64), ("long rows", LONG_CHARACTERS, 8)):
            url = _dataset(Path(folder) / name.replace(" ", "-"), characters)
            ours, plain, decode, resume, padding = _measure(url, batch_size)
            figures += [
                _figure(f"{name}, batches of {batch_size}", ours, None, LIMIT),
                _figure(f"{name}, against the plain way", ours, plain, None),
                _figure(f"{name}, columns decoded and nothing else", decode, ours, None),
                {"metric": f"{name}, padding", "value": padding, "baseline": None, "limit": None, "unit": "of a batch"},
                {
                    "metric": f"{name}, resuming in the middle of the epoch",
                    "value": resume,
                    "baseline": None,
                    "limit": None,
                    "unit": "s to the first batch",
                },
            ]
    return figures


def _figure(metric: str, value: float, baseline: float | None, limit: str | None) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": "M tokens/s"}


def _measure(url: str, batch_size: int) -> tuple[float, float, float, float, float]:
    """(ours, plain, decoding alone) in million tokens a second, seconds to the first batch after a resume, and the share of padding."""
    loader = AlignedShardLoader(
        url, batch_size=batch_size, read_ahead=False
    )  # one core: a second thread would only be in the way
    for found, wanted in zip(loader, _plain_batches(loader), strict=False):
        assert_equal_batches(found, wanted)
        if loader.state_dict()["num_rows_consumed"] >= 4 * batch_size:
            break
    ways: list[Callable[[], int]] = [
        lambda: sum(_num_tokens(batch) for batch in loader),
        lambda: sum(_num_tokens(batch) for batch in _plain_batches(loader)),
        lambda: _decode(loader),
    ]
    speeds = [max(speeds) for speeds in zip(*([_speed(way) for way in ways] for _ in range(ROUNDS)), strict=True)]
    counts = [(_num_tokens(batch), _num_places(batch)) for batch in loader]
    padding = 1 - sum(tokens for tokens, _ in counts) / sum(places for _, places in counts)
    loader.load_state_dict(loader.state_after(len(loader) // 2))
    began = time.perf_counter()
    next(iter(loader))
    return speeds[0], speeds[1], speeds[2], time.perf_counter() - began, padding


def _speed(way: Callable[[], int]) -> float:
    began = time.process_time()
    return way() / (time.process_time() - began) / 1e6


def _num_tokens(batch: BatchedDataDict) -> int:
    return sum(int(lengths.sum()) for key, lengths in batch.items() if key.endswith("input_lengths"))


def _num_places(batch: BatchedDataDict) -> int:
    return sum(int(ids.numel()) for key, ids in batch.items() if key.endswith("input_ids"))


def _decode(loader: AlignedShardLoader) -> int:
    """Read the columns the loader reads, row group by row group."""
    num_tokens = 0
    for ref in loader.dataset.row_groups():
        for side in ("student", *loader.teachers):
            columns = ["input_ids"] if side == "student" else ["input_ids", "student_chunk_id", "teacher_chunk_id"]
            table = loader.dataset.read_row_group(ref, side, columns)
            num_tokens += sum(len(chunk.flatten()) for chunk in table.column("input_ids").chunks)
    return num_tokens


def _plain_batches(loader: AlignedShardLoader) -> Iterator[BatchedDataDict]:
    """The same batches, row by row."""
    catalog = loader._catalog
    order = EpochOrder(catalog, seed=loader.seed, epoch=0, shuffle=True, shuffle_row_groups=loader.shuffle_row_groups)
    refs = loader.dataset.row_groups()
    waiting: list[list[dict[str, Any]]] = []
    for number in range(order.num_windows):
        window = order.window(number)
        tables = [_read(loader, refs[group]) for group in window.groups]
        for slot, row in zip(window.slot.tolist(), window.row.tolist(), strict=True):
            waiting.append([_row(table, row) for table in tables[slot]])
            if len(waiting) == loader.batch_size:
                yield _plain_batch(waiting, loader)
                waiting = []


def _read(loader: AlignedShardLoader, ref: Any) -> list[dict[str, Any]]:
    student = loader.dataset.read_row_group(ref, "student", ["idx", "loss_multiplier", "input_ids"])
    columns = ["input_ids", "student_chunk_id", "teacher_chunk_id", "pair_is_correct"]
    return [
        _columns(table) for table in (student, *(loader.dataset.read_row_group(ref, side, columns) for side in loader.teachers))
    ]


def _columns(table: pa.Table) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in table.column_names:
        array = table.column(name).chunk(0)
        is_list = pa.types.is_list(array.type)
        flat = (array.flatten() if is_list else array).to_numpy(zero_copy_only=False)
        found[name] = (torch.from_numpy(flat.copy()), array.offsets.to_pylist()) if is_list else flat.tolist()
    return found


def _row(columns: dict[str, Any], row: int) -> dict[str, Any]:
    return {
        name: column[0][column[1][row] : column[1][row + 1]] if isinstance(column, tuple) else column[row]
        for name, column in columns.items()
    }


def _plain_batch(rows: list[list[dict[str, Any]]], loader: AlignedShardLoader) -> BatchedDataDict:
    manifest = loader.dataset.manifest
    student = [row[0] for row in rows]
    batch = BatchedDataDict(
        **_padded_ids(student, manifest.student.pad_token_id),
        sample_mask=torch.tensor([row["loss_multiplier"] for row in student], dtype=torch.float32),
        idx=[row["idx"] for row in student],
    )
    for teacher in loader.teachers:
        found = [row[1 + teacher] for row in rows]
        ids = _padded_ids(found, manifest.teachers[teacher].pad_token_id)
        batch.update({f"teacher_{teacher}_{name}": value for name, value in ids.items()})
        correct = [row["pair_is_correct"] for row in found]
        exact = [_exact(row) for row in found]
        fields = {
            "pair_valid": _pad([torch.ones_like(flags) for flags in correct], False),
            "pair_is_correct": _pad(correct, False),
            "student_exact_partition_mask": _pad([masks[0] for masks in exact], False),
            "teacher_exact_partition_mask": _pad([masks[1] for masks in exact], False),
            "student_chunk_id": _pad([row["student_chunk_id"] for row in found], -1).long(),
            "teacher_chunk_id": _pad([row["teacher_chunk_id"] for row in found], -1).long(),
            "num_chunks": torch.tensor([len(flags) for flags in correct]),
        }
        batch.update({f"alignment_{teacher}_{name}": value for name, value in fields.items()})
    return batch


def _padded_ids(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": _pad(ids, pad_token_id).long(),
        "input_lengths": torch.tensor([len(row) for row in ids]),
        "token_mask": _pad([torch.ones_like(row) for row in ids], 0).long(),
    }


def _pad(rows: list[torch.Tensor], value: int | bool) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)


def _exact(row: dict[str, Any]) -> list[torch.Tensor]:
    sides = [row[name].numpy() for name in ("student_chunk_id", "teacher_chunk_id")]
    exact = np.append(row["pair_is_correct"].numpy(), False)
    for chunks in sides:
        exact[:-1] &= np.bincount(chunks[chunks >= 0], minlength=len(exact) - 1) == 1
    return [torch.from_numpy(exact[chunks]) for chunks in sides]


def _dataset(folder: Path, characters: int | None) -> str:
    """Rows of about `characters` characters (None: whole documents), published; returns the dataset's path."""
    shared = os.environ.get("XTOK_SHARED")
    if shared:
        names = real_tokenizers.build(real_tokenizers.default_folder())
        tokenizers = [names / name for name in ("qwen3", "llama3_2", "mistral_nemo")]
        source = Path(shared) / "data" / "texts.jsonl"
    else:
        tokenizers = [REPOSITORY / "infra" / "bundled" / "tokenizers" / name for name in ("chatml_bpe", "spm_bpe", "spm_bpe")]
        source = REPOSITORY / "infra" / "bundled" / "udhr.jsonl"
    sides = [ModelSide(tokenizer=str(path), context_length=4096) for path in tokenizers]
    folder.mkdir(parents=True)
    texts = folder / "texts.jsonl"
    with open(texts, "w", encoding="utf-8") as stream:
        for number, text in enumerate(_texts(source, characters)):
            stream.write(json.dumps({"id": str(number), "text": text}) + "\n")
    output = str(folder / "aligned")
    config = PreprocessConfig(
        sources=(str(texts),),
        student=sides[0],
        teachers=tuple(sides[1:]),
        output=output,
        min_coverage=0.0,
        max_reject_fraction=0.2,
    )
    preprocess(config)
    return output


def _texts(source: Path, characters: int | None) -> Iterator[str]:
    """Texts of varied length around `characters`, made of the source's lines in random order; or its documents, again and again."""
    documents = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").split("\n") if line]
    if characters is None:
        copies = -(-NUM_CHARACTERS // sum(map(len, documents)))
        yield from (f"{copy} {text}" for copy in range(copies) for text in documents)
        return
    lines = [line for text in documents for line in text.splitlines(keepends=True)]
    random_numbers = random.Random(11)
    written = 0
    while written < NUM_CHARACTERS:
        wanted = characters * random_numbers.uniform(0.5, 1.5)
        text = ""
        while len(text) < wanted:
            line = random_numbers.choice(lines)
            start = random_numbers.randrange(max(1, len(line) - 200))
            text += line[start : start + max(1, int(wanted) - len(text))]
        written += len(text)
        yield text
