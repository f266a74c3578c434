"""Alignment: flat id arrays and padded torch batches, against a plain per-document aligner of sorted cuts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from tests import real_tokenizers
from xtok.align.aligner import TokenAligner
from xtok.align.lattice import align_flat
from xtok.tokenizers import FlatTokens, TokenizerAdapter, load_tokenizer

NAME = "alignment"
DESCRIPTION = "Llama 3.2 and gpt-oss: M tokens/s (student plus teacher) on one core, byte route, verification included"

REPOSITORY = Path(__file__).resolve().parents[2]
COPIES = 4  # of the documents, for figures that do not hang on start-up


def run() -> list[dict[str, Any]]:
    """Figures in M tokens/s. The plain aligner is a Python loop over documents that joins bytes and sorts cuts."""
    torch.set_num_threads(1)
    folder = real_tokenizers.build(real_tokenizers.default_folder())
    adapters = [load_tokenizer(str(folder / name)) for name in ("llama3_2", "gpt_oss")]
    documents = _documents() * COPIES
    student, teacher = (
        adapter.encode_flat(documents).with_specials(adapter.prefix_ids, adapter.suffix_ids) for adapter in adapters
    )
    millions = (len(student.ids) + len(teacher.ids)) / 1e6
    plain = millions / _best(lambda: _plain_alignment(adapters, student, teacher), 2)
    flat = millions / _best(lambda: align_flat(adapters[0], adapters[1], student, teacher), 40)
    aligner = TokenAligner(adapters[0].transformers_tokenizer, adapters[1].transformers_tokenizer)
    batches = [_padded(student, teacher, first) for first in range(0, student.num_texts - 32, 32)]
    in_batches = sum(int(batch[1].sum() + batch[3].sum()) for batch in batches) / 1e6
    torch_speed = in_batches / _best(lambda: [_align(aligner, batch) for batch in batches], 5)
    return [
        {"metric": "flat id arrays", "value": flat, "baseline": None, "limit": ">= 50", "unit": "M tokens/s"},
        {
            "metric": "flat id arrays, against a plain aligner",
            "value": flat,
            "baseline": plain,
            "limit": ">= 5",
            "unit": "M tokens/s",
        },
        {"metric": "TokenAligner, batches of 32", "value": torch_speed, "baseline": None, "limit": ">= 5", "unit": "M tokens/s"},
        {
            "metric": "TokenAligner, against a plain aligner",
            "value": torch_speed,
            "baseline": plain,
            "limit": None,
            "unit": "M tokens/s",
        },
    ]


def _documents() -> list[str]:
    shared = os.environ.get("XTOK_SHARED")
    source = Path(shared) / "data" / "texts.jsonl" if shared else REPOSITORY / "infra" / "bundled" / "udhr.jsonl"
    return [orjson.loads(line)["text"] for line in source.read_bytes().split(b"\n") if line]


def _plain_alignment(adapters: list[TokenizerAdapter], student: FlatTokens, teacher: FlatTokens) -> list[np.ndarray]:
    lengths = [adapter.table.lengths for adapter in adapters]
    pieces = [adapter.table.values.to_pylist() for adapter in adapters]
    chunks = []
    for row in range(student.num_texts):
        ids = student.row(row), teacher.row(row)
        whole = [b"".join([piece[token_id] for token_id in own.tolist()]) for piece, own in zip(pieces, ids, strict=True)]
        assert whole[0] == whole[1]
        ends = [np.cumsum(length[own]) for length, own in zip(lengths, ids, strict=True)]
        shared = np.intersect1d(ends[0], ends[1])
        chunks += [np.searchsorted(shared, end) for end in ends]
    return chunks


def _padded(student: FlatTokens, teacher: FlatTokens, first: int) -> tuple[torch.Tensor, ...]:
    """(student ids, mask, teacher ids, mask) of 32 rows, each [32, T]."""
    tensors = []
    for tokens in (student, teacher):
        rows = [tokens.row(row) for row in range(first, first + 32)]
        ids = np.zeros((32, max(map(len, rows))), dtype=np.int64)
        mask = np.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, : len(row)], mask[at, : len(row)] = row, 1
        tensors += [torch.from_numpy(ids), torch.from_numpy(mask)]
    return tuple(tensors)


def _align(aligner: TokenAligner, batch: tuple[torch.Tensor, ...]) -> None:
    aligner.align(
        batch[0],
        batch[2],
        student_offsets=None,
        teacher_offsets=None,
        student_attention_mask=batch[1],
        teacher_attention_mask=batch[3],
    )


def _best(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest of several runs: one core, whatever else the machine does."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        seconds.append(time.thread_time() - begin)
    return min(seconds)
