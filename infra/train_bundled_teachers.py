"""Train the two tiny teachers of the quickstart: a small Llama for each teacher tokenizer learns the bundled chats by cross-entropy.

    python infra/train_bundled_teachers.py [--out out/teachers] [--steps 60]

Random models have nothing to teach; half a minute of learning gives a student something to learn. The chats are published once more with
the teacher's tokenizer in the student's place, trained on, and the model is exported to OUT/<tokenizer>.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from schemas.config import PreprocessConfig
from schemas.train_config import TrainConfig
from xtok.shards.pipeline import preprocess
from xtok.train.child import TrainingProcess

BUNDLED = Path(__file__).resolve().parent / "bundled"
TOKENIZERS = ("spm_bpe", "unigram_nfkc")
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")  # of a teacher that is whole


def publish(tokenizer: Path, output: Path) -> None:
    """The bundled chats for this tokenizer alone: a teacher with the student's own tokenizer has no files."""
    side = {"tokenizer": str(tokenizer), "context_length": 2048, "accept_dropped_reasoning": True}
    config = {
        "mode": "chat",
        "sources": [str(BUNDLED / "chats.jsonl")],
        "student": side,
        "teachers": [side],
        "output": str(output),
        "render_date": "2025-01-02",
    }
    preprocess(PreprocessConfig.model_validate(config))


def train(name: str, folder: Path, steps: int) -> str:
    """Train on what `publish` left in `folder`; the line to print."""
    began = time.monotonic()
    config = TrainConfig.model_validate(
        {
            "student": {
                "model": str(BUNDLED / "models" / "tiny_teacher"),
                "tokenizer": str(BUNDLED / "tokenizers" / name),
                "random_weights": True,
            },
            "dataset": str(folder / "data"),
            "output": str(folder / "run"),
            "objectives": {"distill": None, "ce": 1.0},
            "batch_tokens": 1600,
            "steps": steps,
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5},
            "checkpoint": {"every_steps": None},
        }
    )
    with TrainingProcess(config) as child:
        losses = [line["loss"] for line in child.lines() if line["kind"] == "train"]
        exported = child.result()["exported"]["student"]
    target = folder.with_suffix("")
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(exported, target)
    shutil.rmtree(folder)
    seconds = time.monotonic() - began
    return f"teacher {name}: {steps} steps in {seconds:.0f} s, cross-entropy {losses[0]:.2f} -> {losses[-1]:.2f}, in {target}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/teachers"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the two learn side by side
    names = [name for name in TOKENIZERS if not all((options.out / name / file).exists() for file in MODEL_FILES)]
    for name in sorted(set(TOKENIZERS) - set(names)):
        print(f"teacher {name}: already in {options.out / name}")
    folders = [options.out / f"{name}.work" for name in names]
    for name, folder in zip(names, folders, strict=True):
        publish(BUNDLED / "tokenizers" / name, folder / "data")
    with ThreadPoolExecutor(len(TOKENIZERS)) as pool:
        for line in pool.map(train, names, folders, [options.steps] * len(names)):
            print(line)


if __name__ == "__main__":
    main()
