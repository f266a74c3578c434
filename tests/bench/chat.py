"""Preprocessing chats end to end against plain Jinja rendering and Hugging Face's tokenization alone.

Both sides use the same two worker processes, chats, templates and tokenizers; start-up (processes, loading, the first build) is left
out on both, and so is the vocabulary projection, which costs the same for one chat as for a million. Ours: plan, scan for duplicates,
read, render, encode, prove, locate, align, write both tables of every side, verify, publish. The baseline: `Template.render` and
`encode_batch_fast` of conversations that are already in memory. Runs are interleaved; medians count. Below, the stages of our parts:
seconds over both workers, of the last run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from schemas.config import PreprocessConfig
from tests import real_tokenizers
from tests.bench.chat_stages import DAY, NAMES, chat_rows, render_plainly
from tests.bench.preprocess import stage_seconds
from xtok.chat import Conversation, conversation_from_row
from xtok.chat.templates import ReferenceRenderer
from xtok.shards.pipeline import absolute_config, preprocess
from xtok.shards.pool import WorkerPool
from xtok.tokenizers import load_tokenizer

NAME = "chat"
DESCRIPTION = "chats to published shards, student Qwen3 + Llama 3.2 and gpt-oss, against plain Jinja + encode_batch_fast alone"

WORKERS = 2
REPEATS = 3
ROWS = 6000
_BASELINE: dict[str, tuple[ReferenceRenderer, Tokenizer]] = {}


def run() -> list[dict[str, Any]]:
    """The figures."""
    tokenizers = real_tokenizers.build(real_tokenizers.default_folder())
    rows = chat_rows(ROWS)
    with tempfile.TemporaryDirectory() as name, WorkerPool(WORKERS) as pool:
        folder = Path(name)
        source = folder / "chats.jsonl"
        lines = (json.dumps({"id": number} | row, ensure_ascii=False) + "\n" for number, row in enumerate(rows))
        source.write_text("".join(lines), encoding="utf-8")
        conversations = [conversation_from_row(row) for row in rows]
        jobs = [(str(tokenizers / side), conversations[start :: 2 * WORKERS]) for start in range(2 * WORKERS) for side in NAMES]
        ours: list[float] = []
        baseline: list[float] = []
        output = ""
        for repeat in range(REPEATS + 1):
            output = str(folder / f"run-{repeat}")
            seconds = _timed(lambda output=output: preprocess(_config(output, source, tokenizers), runner=pool))
            plain = _timed(lambda: list(pool.map(_plainly, jobs, lambda job: "the baseline")))
            # The baseline's jobs carry their chats to the workers; that is neither rendering nor tokenization.
            plain -= _timed(lambda: list(pool.map(_receive_alone, jobs, lambda job: "the baseline")))
            if repeat:  # the first round loads tokenizers and warms caches
                ours.append(seconds)
                baseline.append(plain)
        figures = [_figure("chats end to end", statistics.median(ours), statistics.median(baseline), "<= 0.5", "s")]
        return figures + [_figure(name, seconds, None, None, "s") for name, seconds in stage_seconds(output).items()]


def _timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _config(output: str, source: Path, tokenizers: Path) -> PreprocessConfig:
    student, *teachers = ({"tokenizer": str(tokenizers / side), "context_length": 8192} for side in NAMES)
    fields = {"mode": "chat", "sources": [str(source)], "student": student, "teachers": teachers, "output": output}
    limits = {"part_bytes": 700_000, "workers": WORKERS, "render_date": DAY, "max_reject_fraction": 0.5, "projection": False}
    return absolute_config(PreprocessConfig.model_validate(fields | limits))


def _plainly(job: tuple[str, list[Conversation]]) -> int:
    folder, conversations = job
    if folder not in _BASELINE:
        adapter = load_tokenizer(folder)
        renderer = ReferenceRenderer(adapter.chat_template or "", render_date=DAY, special_tokens=adapter.special_tokens)
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _BASELINE[folder] = renderer, tokenizer
    renderer, tokenizer = _BASELINE[folder]
    texts = [render_plainly(renderer, conversation) for conversation in conversations]
    parts = (texts[start : start + 512] for start in range(0, len(texts), 512))
    return sum(len(tokenizer.encode_batch_fast(part, add_special_tokens=False)) for part in parts)


def _receive_alone(job: tuple[str, list[Conversation]]) -> int:
    return len(job[1])


def _figure(metric: str, value: float, baseline: float | None, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}
