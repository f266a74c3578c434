"""A tiny world to train in: a published dataset of the bundled texts, and models of a few thousand parameters with its tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from schemas.config import PreprocessConfig
from xtok.shards.pipeline import preprocess
from xtok.tokenizers import load_tokenizer

BUNDLED = Path(__file__).resolve().parents[3] / "infra" / "bundled"
CONTEXT = 96


def make_model(
    folder: Path,
    tokenizer: str,
    *,
    seed: int,
    hidden: int = 16,
    layers: int = 3,
    tied: bool = True,
    positions: int = 128,
    heads: int = 2,
) -> str:
    """A Llama with random weights and a bundled tokenizer in one folder."""
    source = BUNDLED / "tokenizers" / tokenizer
    vocab_size = load_tokenizer(str(source)).vocab_size + 3  # padding of the head, as real models have it
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    model_config = json.loads((folder / "config.json").read_text())
    for file in source.iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(model_config))
    return str(folder)


def make_world(folder: Path, *, num_rows: int = 64) -> dict[str, Any]:
    """Dataset (student chatml_bpe, teacher 0 spm_bpe, teacher 1 of the student's tokenizer), held-out dataset, three models."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (BUNDLED / "udhr.jsonl").read_text().splitlines()[: num_rows + 16]
    tokenizers = BUNDLED / "tokenizers"
    side = {"context_length": CONTEXT}
    world: dict[str, Any] = {}
    for name, part in (("dataset", rows[:num_rows]), ("held_out", rows[num_rows:])):
        source = folder / f"{name}.jsonl"
        source.write_text("\n".join(part) + "\n")
        preprocess(
            PreprocessConfig.model_validate(
                {
                    "sources": [str(source)],
                    "student": {"tokenizer": str(tokenizers / "chatml_bpe"), **side},
                    "teachers": [
                        {"tokenizer": str(tokenizers / "spm_bpe"), **side},
                        {"tokenizer": str(tokenizers / "chatml_bpe"), **side},
                    ],
                    "output": str(folder / name),
                    "workers": 1,
                    "row_group_rows": 16,
                    "min_coverage": 0.0,
                }
            )
        )
        world[name] = str(folder / name)
    world["student"] = make_model(folder / "student", "chatml_bpe", seed=1)
    world["teachers"] = [
        make_model(folder / "teacher0", "spm_bpe", seed=2, hidden=24),
        make_model(folder / "teacher1", "chatml_bpe", seed=3, tied=False),
    ]
    return world


_shared: dict[str, Any] = {}


def shared_world(make_folder: Callable[[str], Path]) -> dict[str, Any]:
    """The one world of this test session, made on first use in `make_folder("world")`. Nobody writes into it."""
    if not _shared:
        _shared.update(make_world(make_folder("world")))
    return _shared


def read_metrics(output: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of one kind, by step."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def make_config(world: dict[str, Any], output: Path, **changes: Any) -> dict[str, Any]:
    """All objectives at once, as plain data; `changes` replace top-level fields."""
    document: dict[str, Any] = {
        "student": {"model": world["student"]},
        "teachers": [{"model": teacher, "dtype": "float32"} for teacher in world["teachers"]],
        "dataset": world["dataset"],
        "output": str(output),
        "objectives": {"distill": 1.0, "ce": 0.2, "draft": 0.5},
        "distillation": {"vocab_topk": None, "token_tile_size": 64},
        "draft": {"mask_token_id": 5, "num_draft_layers": 1, "block_size": 4, "num_anchors": 8, "learning_rate": 1e-3},
        "batch_tokens": 600,
        "steps": 10,
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "checkpoint": {"every_steps": 5},
        "parallel": {"device": "cpu"},
    }
    return {**document, **changes}
