"""Where the time of a training step goes: in the models, or around them. One process, the real loop, timed from outside.

A small student (4 layers, hidden size 256) learns from a cross-tokenizer and a same-tokenizer teacher of its own size while its draft
is trained; a checkpoint is written every five steps. Exclusive time of each part, from the third step on: processor time of the one
thread that computes, which other programs cannot stretch, and wall time where that is the question (waiting). The bodies' forward and
backward, the optimizer, and the bare matmuls of the heads (student: forward and two of backward; each teacher: forward; the draft's
rows alike) are the models' own work, whoever trains them; all else is ours: waiting for the loader, counting, what the losses do
beyond the heads, metrics and checkpoints. Data: the bundled texts, cut at 512 tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers.utils.logging import disable_progress_bar

from schemas.config import PreprocessConfig
from schemas.train_config import ParallelSettings, TrainConfig
from tests.unit.train.support import BUNDLED, make_model, read_metrics
from xtok.shards.pipeline import preprocess
from xtok.train.loop import run_training
from xtok.train.runtime import start_runtime, stop_runtime

NAME = "training"
DESCRIPTION = "share of a step outside the models' forward and backward"

STEPS, WARM_UP, CHECKPOINT_EVERY = 12, 2, 5
HIDDEN, CONTEXT = 256, 512
# Limits. What is around models and losses is to be negligible: a twentieth of the step, less for each part of it (checkpoints apart:
# in wall time, since they wait for the disk); a step that waits for the loader at all shows. What the losses add (softmax, projection,
# their gradients, for three sets of logits) depends on the sizes, and this small hidden size makes matmuls cheap and it dear: a tenth
# above what was measured (0.38), so that a slower loss shows; the bench `distillation` holds the losses against dense ones.
# part -> the functions that are it; a function that runs inside another counts for itself alone.
TIMED = {
    "bodies": [
        "xtok.train.models.CausalBody.forward",
        "xtok.draft.dflash.DFlashDraftModel.forward",
        "torch.autograd.backward",
    ],
    "optimizer": ["torch.optim.AdamW.step", "torch.nn.utils.clip_grad_norm_"],
    "teachers": ["xtok.train.models.Teacher.logits"],
    "counting": ["xtok.train.step._counts"],
    "loss": ["xtok.train.objective.Objective.__call__"],
    "checkpoint": [f"xtok.train.checkpoint.Checkpoints.{name}" for name in ("save", "publish_if_ready", "finish")],
    "metrics": ["xtok.train.metrics_log.MetricsLog.write", "xtok.train.step._reduced", "xtok.train.step._named"],
    "step": ["xtok.train.loop.train_step"],
}


class Clock:
    """Exclusive seconds of nested parts of one thread: of the processor (`seconds`) and of the wall (`wall`)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was measured; parts that are open stay open."""
        self.seconds.clear()
        self.wall.clear()
        self._since = self.began = (time.thread_time(), time.perf_counter())

    def total(self) -> tuple[float, float]:
        """Processor and wall seconds since the last reset."""
        return time.thread_time() - self.began[0], time.perf_counter() - self.began[1]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        now = (time.thread_time(), time.perf_counter())
        if self._open:
            self.seconds[self._open[-1]] += now[0] - self._since[0]
            self.wall[self._open[-1]] += now[1] - self._since[1]
        self._since = now

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*arguments, **named)

        return timed


def run() -> list[dict[str, Any]]:
    """The figures, as shares of a step and in seconds."""
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        document = _world(Path(folder))
        runtime = start_runtime(ParallelSettings(device="cpu"))
        clock = Clock()
        with ExitStack() as stack:
            for part, names in TIMED.items():
                for name in names:
                    stack.enter_context(patch(name, clock.wrap(part, _target(name))))
            stack.enter_context(patch("xtok.train.loop.export_models", lambda *_, **__: {}))
            stack.enter_context(patch("xtok.train.loop.train_step", _from(clock)))
            run_training(TrainConfig.model_validate(document), runtime)
            total = clock.total()
        stop_runtime()
        lines = read_metrics(Path(document["output"]))[WARM_UP:]
    return figures(clock.seconds, clock.wall, total, lines)


def figures(
    seconds: dict[str, float], wall: dict[str, float], totals: tuple[float, float], lines: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """seconds, wall: of each part of TIMED; totals: both of all steps; lines: the metrics of those steps."""
    total, wall_total = totals
    num_tokens = sum(line["tokens"] for line in lines)
    heads = _head_seconds(num_tokens)
    waiting = sum(line["seconds_waiting"] for line in lines)
    models = seconds["bodies"] + seconds["teachers"] + seconds["optimizer"] + heads
    losses = seconds["loss"] - heads
    outside = total - models
    share = {
        "outside the models": (outside / total, "<= 0.45"),
        "losses beyond the heads' matmuls": (losses / total, "<= 0.42"),
        "around models and losses": ((outside - losses) / total, "<= 0.05"),
        "of that, waiting for the loader": (waiting / wall_total, "<= 0.01"),
        "of that, counting": (seconds["counting"] / total, "<= 0.01"),
        "of that, metrics": (seconds["metrics"] / total, "<= 0.005"),
        "of that, checkpoints, written while training goes on": (wall["checkpoint"] / wall_total, "<= 0.08"),
    }
    shares = [
        {"metric": f"share of a step: {name}", "value": value, "baseline": None, "limit": limit, "unit": "of it"}
        for name, (value, limit) in share.items()
    ]
    step = {"metric": "a step", "value": total / len(lines), "baseline": models / len(lines), "limit": None, "unit": "s"}
    return [*shares, step]


def _from(clock: Clock) -> Callable[..., Any]:
    """The timed step, which starts the measurement after the warm-up."""
    from xtok.train.step import train_step

    timed = clock.wrap("step", train_step)

    def step(*arguments: Any) -> Any:
        if arguments[-1] == WARM_UP:
            clock.reset()
        return timed(*arguments)

    return step


def _target(name: str) -> Callable[..., Any]:
    """The function that a dotted name means."""
    module, _, attribute = name.rpartition(".")
    found: Any
    try:
        found = __import__(module, fromlist=[attribute])
    except ImportError:
        found = _target(module)
    function: Callable[..., Any] = getattr(found, attribute)
    return function


def _head_seconds(num_tokens: int) -> float:
    """Bare matmuls of the heads for `num_tokens` supervised rows: student forward and two of backward, two teachers' forward."""
    rows, vocab_size = 512, 4096
    hidden, weight = torch.randn(rows, HIDDEN), torch.randn(vocab_size, HIDDEN)
    logits = hidden @ weight.T
    began = time.thread_time()
    for _ in range(4):
        for _ in range(3):
            hidden @ weight.T
        logits @ weight
        logits.T @ hidden
    return (time.thread_time() - began) / 4 / rows * num_tokens


def _world(folder: Path) -> dict[str, Any]:
    tokenizers = BUNDLED / "tokenizers"
    names = ("spm_bpe", "chatml_bpe")
    sides = [{"tokenizer": str(tokenizers / name), "context_length": CONTEXT} for name in ("chatml_bpe", *names)]
    output = str(folder / "data")
    data = {"sources": [str(BUNDLED / "udhr.jsonl")], "student": sides[0], "teachers": sides[1:], "output": output, "workers": 1}
    preprocess(PreprocessConfig.model_validate(data))
    sizes: dict[str, Any] = {"hidden": HIDDEN, "layers": 4, "positions": CONTEXT, "heads": 4}
    teachers = [make_model(folder / f"teacher{i}", name, seed=i, **sizes) for i, name in enumerate(names)]
    return {
        "student": {"model": make_model(folder / "student", "chatml_bpe", seed=9, **sizes)},
        "teachers": [{"model": teacher, "dtype": "float32"} for teacher in teachers],
        "dataset": output,
        "output": str(folder / "run"),
        "objectives": {"distill": 1.0, "ce": 0.1, "draft": 0.5},
        "draft": {"mask_token_id": 5, "num_draft_layers": 1, "block_size": 4, "num_anchors": 16},
        "batch_tokens": 2048,
        "accumulation": 4,
        "steps": STEPS,
        "checkpoint": {"every_steps": CHECKPOINT_EVERY},
        "parallel": {"device": "cpu"},
    }
