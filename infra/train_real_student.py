"""Distil a real small model into a fresh student with another tokenizer, thirty steps on chats on a CPU, and show what was learned.

    python infra/train_real_student.py TEACHER_FOLDER [--chats FILE ...] [--steps 30] [--out out/real_student]

The whole road: chats are preprocessed for the bundled ChatML tokenizer and the teacher's own, one row in ten is held out, a small
Llama with random weights learns from the teacher through the vocabulary projection, and its report and plot are written. Prints KD
and perplexity on the held-out rows before and after. Data: the bundled chats, and those of $XTOK_SHARED when it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.config import PreprocessConfig
from schemas.manifest import Manifest
from schemas.train_config import TrainConfig
from xtok.shards.pipeline import preprocess
from xtok.train.child import TrainingProcess
from xtok.train.plot import draw_plot
from xtok.train.report import read_metrics, train_report_markdown

BUNDLED = Path(__file__).resolve().parent / "bundled"
STUDENT_TOKENIZER = BUNDLED / "tokenizers" / "chatml_bpe"
STUDENT_MODEL = BUNDLED / "models" / "tiny_llama" / "config.json"
HELD_OUT_EVERY = 10


def split_rows(files: Sequence[str], folder: Path) -> dict[str, Path]:
    """Chats of all files as two files: one row in ten is held out."""
    rows = [line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    parts = {
        "data": [row for number, row in enumerate(rows) if number % HELD_OUT_EVERY],
        "held_out": rows[::HELD_OUT_EVERY],
    }
    written = {}
    for name, part in parts.items():
        written[name] = folder / f"{name}.jsonl"
        written[name].write_text("\n".join(part) + "\n", encoding="utf-8")
    return written


def publish(source: Path, teacher: str, output: Path, options: argparse.Namespace) -> Manifest:
    """Chats that both models can be shown within the context, aligned."""
    side = {"context_length": options.context_length}
    config = {
        "mode": "chat",
        "sources": [str(source)],
        "student": {"tokenizer": str(STUDENT_TOKENIZER), **side},
        "teachers": [{"tokenizer": teacher, **side}],
        "output": str(output),
        "render_date": "2025-01-02",
        # Long chats, and those with tools or reasoning that a template cannot show, are refused and counted.
        "max_reject_fraction": 1.0,
        "min_coverage": 0.0,
    }
    manifest = preprocess(PreprocessConfig.model_validate(config))
    coverage = manifest.teacher_totals[0].coverage
    print(f"{output}: {manifest.num_rows} of {manifest.num_source_rows} chats, coverage {coverage:.3f}", flush=True)
    return manifest


def student_config(folder: Path, options: argparse.Namespace) -> str:
    """A Llama a little larger than the bundled example's, as a folder with a config.json."""
    config = json.loads(STUDENT_MODEL.read_text())
    config |= {
        "hidden_size": options.hidden_size,
        "intermediate_size": 3 * options.hidden_size,
        "head_dim": options.hidden_size // 4,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)


def train_config(options: argparse.Namespace, out: Path) -> TrainConfig:
    """P-KL from the teacher with a little cross-entropy."""
    document: dict[str, Any] = {
        "student": {
            "model": student_config(out / "student_config", options),
            "tokenizer": str(STUDENT_TOKENIZER),
            "random_weights": True,
        },
        "teachers": [{"model": options.teacher, "dtype": "float32"}],
        "dataset": str(out / "data"),
        "output": str(out / "run"),
        "objectives": {"distill": 1.0, "ce": 0.1},
        "batch_tokens": options.batch_tokens,
        "accumulation": 4,
        "steps": options.steps,
        "optimizer": {"learning_rate": options.learning_rate, "warmup_steps": 3},
        "checkpoint": {"every_steps": None},
        "evaluation": {"dataset": str(out / "held_out"), "every_steps": None, "max_rows": options.held_out_rows},
        "parallel": {"processes": options.processes, "device": "auto"},
    }
    return TrainConfig.model_validate(document)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher", help="folder of the teacher, with its tokenizer and chat template")
    parser.add_argument(
        "--chats", nargs="*", default=None, help="JSONL files with messages; default the bundled ones and $XTOK_SHARED"
    )
    parser.add_argument("--out", default="out/real_student")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="student tokens a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--hidden-size", type=int, default=192, help="of the student")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--held-out-rows", type=int, default=16, help="rows of each evaluation")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    shared = os.environ.get("XTOK_SHARED")
    files = options.chats or [str(BUNDLED / "chats.jsonl"), *([f"{shared}/data/chats.jsonl"] if shared else [])]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)

    for name, source in split_rows(files, out).items():
        publish(source, options.teacher, out / name, options)
    config = train_config(options, out)
    began = time.perf_counter()
    with TrainingProcess(config) as child:
        for line in child.lines():
            shown = {name: line.get(name) for name in ("loss", "kd_loss", "ce_loss", "perplexity", "tokens_per_s")}
            values = "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
            print(f"{line['kind']:<10} step {line['step']:>3}  {values}", flush=True)
        exported = child.result()["exported"]
    seconds = time.perf_counter() - began
    lines = read_metrics(config.output)
    plot = "training.png" if draw_plot(lines, f"{config.output}/training.png") else None
    report = train_report_markdown(config, lines, exported=exported, seconds=seconds, plot=plot)
    (out / "run" / "report.md").write_text(report)
    first, last = (line for line in lines if line["kind"] == "evaluation")
    print(f"{config.steps} steps in {seconds:.0f} s; report: {config.output}/report.md")
    print("| held-out rows | before | after |", "|---|--:|--:|", sep="\n")
    for name, key in (("KD", "kd_loss"), ("perplexity", "perplexity"), ("top-1 agreement", "top1_agreement_0")):
        print(f"| {name} | {first[key]:.4g} | {last[key]:.4g} |")


if __name__ == "__main__":
    main()
