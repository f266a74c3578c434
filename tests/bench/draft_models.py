"""DSpark loss and a draft's training forward: time against bare matmuls, memory against the logits they never make."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from xtok.draft.dflash import DFlashConfig, DFlashDraftModel
from xtok.draft.dspark import DSparkConfig, DSparkDraftModel
from xtok.draft.target import FrozenTarget
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step
from xtok.losses.dspark import dspark_projected_vocab_parallel_loss

NAME = "draft_models"
DESCRIPTION = "DSpark loss (T=1024, H=1024, V=32768, fp32) and training forwards of drafts (V=151936): time and peak memory"

ROWS, HIDDEN, VOCAB, TILE, RANK = 1024, 1024, 32768, 128, 256
LARGE_VOCAB, SEQ_LEN, NUM_ANCHORS, BLOCK_SIZE, CHUNK = 151936, 128, 64, 16, 64
MEGABYTE = 1e6
REPEATS = 3


def run() -> list[dict[str, Any]]:
    """Figures of this benchmark."""
    return [*_loss_times(), *_loss_memory(), *_step_figures()]


def _problem(share: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {
        "student_hidden": torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_(),
        "output_weight": torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5,
        "teacher_logits": torch.randn(ROWS, VOCAB, generator=generator),
        "target_ids": torch.randint(0, VOCAB, (ROWS,), generator=generator),
        "mask": (torch.rand(ROWS, generator=generator) < share).float(),
        "bias_features": torch.randn(ROWS, RANK, generator=generator).requires_grad_(),
        "bias_weight": (torch.randn(VOCAB, RANK, generator=generator) / RANK).requires_grad_(),
    }
    return inputs


def _tiled(inputs: dict[str, Any]) -> None:
    stats = dspark_projected_vocab_parallel_loss(**inputs, token_chunk_size=TILE)
    stats.combined(normalization_counts=stats.cross_entropy.counts).backward()


def _dense(inputs: dict[str, Any]) -> None:
    """The direct way: all logits at once, autograd."""
    rows = inputs["mask"] > 0
    logits = inputs["student_hidden"][rows] @ inputs["output_weight"].T + inputs["bias_features"][rows] @ inputs["bias_weight"].T
    distance = (logits.softmax(-1) - inputs["teacher_logits"][rows].softmax(-1)).abs().sum()
    (0.1 * F.cross_entropy(logits, inputs["target_ids"][rows]) + 0.9 * distance / rows.sum()).backward()


def _matmuls(inputs: dict[str, Any]) -> None:
    """The three matmuls over the head that recomputation needs, and the three over the bias weight."""
    rows = inputs["mask"] > 0
    hidden, features = inputs["student_hidden"].detach()[rows], inputs["bias_features"].detach()[rows]
    bias = inputs["bias_weight"].detach()
    for start in range(0, len(hidden), TILE):
        tile, part = hidden[start : start + TILE], features[start : start + TILE]
        for _ in range(2):
            logits = tile @ inputs["output_weight"].T
            logits.addmm_(part, bias.T)
        logits @ inputs["output_weight"]
        logits @ bias
        logits.T @ part


def _times(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of interleaved runs."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _loss_times() -> list[dict[str, Any]]:
    figures = []
    for share, label in ((1.0, "all rows"), (0.5, "half the rows")):
        inputs = _problem(share)
        calls = {"tiled": _tiled, "matmuls": _matmuls, "dense": _dense}
        seconds = _times({name: partial(call, inputs) for name, call in calls.items()})
        figures += [
            _figure(f"DSpark loss, {label}, against its bare matmuls", seconds["tiled"], seconds["matmuls"], "<= 1.5", "s"),
            _figure(f"DSpark loss, {label}, against dense autograd", seconds["tiled"], seconds["dense"], None, "s"),
        ]
    return figures


def _loss_memory() -> list[dict[str, Any]]:
    tiled, dense = _peak_of("loss-tiled"), _peak_of("loss-dense")
    # Gradients of hidden rows, features and bias weight, and a few tiles.
    limit = (ROWS * (HIDDEN + RANK) + VOCAB * RANK) * 4 * 2 + 6 * TILE * VOCAB * 4
    return [
        _figure("DSpark loss, extra memory, against dense autograd", tiled["peak"], dense["peak"], "<= 0.35", "MB"),
        _figure("DSpark loss, extra memory, against gradients and six tiles", tiled["peak"], limit / MEGABYTE, "<= 1", "MB"),
    ]


def _step_figures() -> list[dict[str, Any]]:
    logits = NUM_ANCHORS * BLOCK_SIZE * LARGE_VOCAB * 4 / MEGABYTE
    figures = []
    for kind in ("dflash", "dspark"):
        whole, part = _peak_of(f"step-{kind}-1"), _peak_of(f"step-{kind}-8")
        label = "DFlash" if kind == "dflash" else "DSpark"
        figures += [
            _figure(f"{label} step, extra memory, against one copy of slots x vocabulary", whole["peak"], logits, "<= 0.6", "MB"),
            _figure(f"{label} step, 1/8 of the slots supervised, time against all", part["seconds"], whole["seconds"], "<= 0.5", "s"),
            _figure(f"{label} step, 1/8 of the slots supervised, extra memory against all", part["peak"], whole["peak"], "<= 1.05", "MB"),
        ]
    return figures


def _figure(metric: str, value: float, baseline: float, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}


def _peak_of(case: str) -> dict[str, float]:
    """Run a case in a process of its own: a peak can only be read once."""
    done = subprocess.run([sys.executable, "-m", "tests.bench.draft_models", case], check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE


def _measure(prepare: Callable[[], Any], call: Callable[[Any], None], warm: Callable[[Any], None]) -> dict[str, float]:
    inputs = prepare()
    warm(inputs)
    before, began = _peak(), time.perf_counter()
    call(inputs)
    return {"peak": _peak() - before, "seconds": time.perf_counter() - began}


def _step_case(kind: str, divisor: int) -> dict[str, float]:
    """A training forward and backward; `divisor` of 8 leaves the first two predicted slots of each block supervised."""
    config = LlamaConfig(
        vocab_size=LARGE_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    shared: dict[str, Any] = {"mask_token_id": LARGE_VOCAB - 1, "num_draft_layers": 2, "block_size": BLOCK_SIZE}

    def prepare() -> Any:
        torch.manual_seed(0)
        target = FrozenTarget(LlamaForCausalLM(config).eval())
        if kind == "dflash":
            return target, DFlashDraftModel(DFlashConfig.from_target(config, **shared))
        return target, DSparkDraftModel(DSparkConfig.from_target(config, markov_rank=16, **shared))

    def step(inputs: Any, num_anchors: int) -> None:
        target, model = inputs
        ids = torch.arange(SEQ_LEN)[None] * 7 % (LARGE_VOCAB - 1)
        loss_mask = torch.ones(1, SEQ_LEN)
        if divisor > 1:
            loss_mask = (torch.arange(SEQ_LEN) % (BLOCK_SIZE // divisor + 1) < BLOCK_SIZE // divisor).float()[None]
        batch = DraftBatch(ids, loss_mask, torch.tensor([0]))
        draft_step(model, target, batch, DraftStepSettings(num_anchors=num_anchors, token_chunk_size=CHUNK)).loss().backward()

    return _measure(prepare, lambda inputs: step(inputs, NUM_ANCHORS), _warm_weights)


def _warm_weights(inputs: Any) -> None:
    """Allocate the gradients that any training step holds, so that the peak shows what comes on top."""
    for parameter in inputs[1].parameters():
        parameter.grad = torch.ones_like(parameter)


def _loss_case(call: Callable[[dict[str, Any]], None]) -> dict[str, float]:
    return _measure(_problem, call, lambda inputs: None)


def _main(case: str) -> None:
    if case.startswith("step-"):
        _, kind, divisor = case.split("-")
        result = _step_case(kind, int(divisor))
    else:
        result = _loss_case(_tiled if case == "loss-tiled" else _dense)
    print(json.dumps(result))


if __name__ == "__main__":
    _main(sys.argv[1])
