"""DSpark loss and a draft's training forward: time against bare matmuls, memory against the logits they never make."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.bench.memory import peak_allocated
from xtok.draft.dflash import DFlashConfig, DFlashDraftModel
from xtok.draft.dspark import DSparkConfig, DSparkDraftModel
from xtok.draft.target import FrozenTarget
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step
from xtok.losses.dspark import dspark_projected_vocab_parallel_loss

NAME = "draft_models"
DESCRIPTION = "DSpark loss (T=512, H=1024, V=16384, fp32) and training forwards of drafts (V=151936): time and peak memory"

ROWS, HIDDEN, VOCAB, TILE, RANK = 512, 1024, 16384, 128, 256
MEMORY_TILE = 64  # an eighth of the rows, so that what the tiles save shows beside the gradients
LARGE_VOCAB, SEQ_LEN, NUM_ANCHORS, FEW_ANCHORS, BLOCK_SIZE, CHUNK, STEP_RANK = 151936, 64, 24, 8, 16, 16, 16
MEGABYTE = 1e6
REPEATS = 3


def run() -> list[dict[str, Any]]:
    """Figures of this benchmark."""
    return [*_loss_times(), *_loss_memory(), *_step_figures("DFlash"), *_step_figures("DSpark")]


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


def _tiled(inputs: dict[str, Any], tile: int = TILE) -> None:
    stats = dspark_projected_vocab_parallel_loss(**inputs, token_chunk_size=tile)
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


def _times(calls: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of interleaved runs."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
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
    calls = (partial(_tiled, _problem(), MEMORY_TILE), partial(_dense, _problem()))
    tiled, dense = (peak_allocated(call) / MEGABYTE for call in calls)
    # Gradients of hidden rows, features and bias weight, once made and once handed on, and a few tiles.
    limit = (ROWS * (HIDDEN + RANK) + VOCAB * RANK) * 4 * 2 + 6 * MEMORY_TILE * VOCAB * 4
    return [
        _figure("DSpark loss, extra memory, against dense autograd", tiled, dense, "<= 0.35", "MB"),
        _figure("DSpark loss, extra memory, against gradients and six tiles", tiled, limit / MEGABYTE, "<= 1", "MB"),
    ]


def _step_figures(kind: str) -> list[dict[str, Any]]:
    """A training forward and backward with metrics: what it holds, and what it costs where few slots are supervised."""
    inputs = _step_inputs(kind)
    _step(inputs, FEW_ANCHORS)  # warms up
    every, few = (_peak_and_slots(inputs, num_anchors) for num_anchors in (NUM_ANCHORS, FEW_ANCHORS))
    seconds = _times(
        {"all": lambda: _step(inputs, NUM_ANCHORS), "part": lambda: _step(inputs, NUM_ANCHORS, sparse=True)}, repeats=1
    )
    tiles = 8 * CHUNK * LARGE_VOCAB * 4 / MEGABYTE
    if kind == "DSpark":  # the Markov head's gradient, once made and once handed on
        tiles += 2 * LARGE_VOCAB * STEP_RANK * 4 / MEGABYTE
    slot = LARGE_VOCAB * 4 / MEGABYTE
    per_slot = (every[0] - few[0]) / (every[1] - few[1])
    return [
        # What a slot leaves behind are rows of its width: body activations and gradients, a few kilobytes against 608 of logits.
        _figure(f"{kind} step, memory of each further supervised slot, against its logits", per_slot, slot, "<= 0.1", "MB"),
        _figure(f"{kind} step, extra memory, against eight tiles and the heads' gradients", every[0], tiles, "<= 1", "MB"),
        _figure(f"{kind} step, extra memory, against one copy of slots x vocabulary", every[0], every[1] * slot, "<= 0.5", "MB"),
        _figure(f"{kind} step, 1/8 of the slots supervised, time against all", seconds["part"], seconds["all"], "<= 0.5", "s"),
    ]


def _figure(metric: str, value: float, baseline: float, limit: str | None, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "baseline": baseline, "limit": limit, "unit": unit}


def _step_inputs(kind: str) -> tuple[FrozenTarget, Any]:
    """A small target with a large vocabulary, and a draft whose gradients exist, as in any training step but the first."""
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
    torch.manual_seed(0)
    target = FrozenTarget(LlamaForCausalLM(config).eval())
    model: Any
    if kind == "DFlash":
        model = DFlashDraftModel(DFlashConfig.from_target(config, **shared))
    else:
        model = DSparkDraftModel(DSparkConfig.from_target(config, markov_rank=STEP_RANK, **shared))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return target, model


def _step(inputs: tuple[FrozenTarget, Any], num_anchors: int, *, sparse: bool = False) -> float:
    """One step; `sparse` leaves the first two predicted slots of each block supervised. Returns the supervised slots."""
    target, model = inputs
    ids = torch.arange(SEQ_LEN)[None] * 7 % (LARGE_VOCAB - 1)
    loss_mask = (torch.arange(SEQ_LEN) % 3 < 2).float()[None] if sparse else torch.ones(1, SEQ_LEN)
    batch = DraftBatch(ids, loss_mask, torch.tensor([0]))
    result = draft_step(model, target, batch, DraftStepSettings(num_anchors=num_anchors, token_chunk_size=CHUNK))
    result.loss().backward()
    return float(result.counts.sum())


def _peak_and_slots(inputs: tuple[FrozenTarget, Any], num_anchors: int) -> tuple[float, float]:
    """(megabytes above the level before the step, supervised slots)."""
    slots: list[float] = []
    peak = peak_allocated(lambda: slots.append(_step(inputs, num_anchors)))
    return peak / MEGABYTE, slots[0]
