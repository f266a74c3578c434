"""Draft training over real gloo ranks: data parallel, vocabulary parallel, capture under FSDP2, metrics reduced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import RankContext, ranks
from tests.unit.draft.tiny import VOCAB, random_batch, tiny_dflash, tiny_dspark, tiny_target
from xtok.draft.metrics import reduce_metrics
from xtok.draft.target import FrozenTarget
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step

START_SECONDS = 150.0
"""The first case of a group imports transformers in every rank."""
SETTINGS = DraftStepSettings(num_anchors=5, seed=3, token_chunk_size=6)


def build(kind: str, architecture: str = "llama") -> Any:
    return tiny_dflash(architecture) if kind == "dflash" else tiny_dspark(architecture, markov_head_type="gated")


def batch_of_four() -> DraftBatch:
    batch = random_batch(4, 14, supervised_from=3)
    batch.loss_mask[1, 6:] = 0.0  # rows, and so ranks, with different numbers of supervised slots
    return batch


def part_of(batch: DraftBatch, rows: slice) -> DraftBatch:
    return DraftBatch(batch.input_ids[rows], batch.loss_mask[rows], batch.idx[rows])


def summary(model: torch.nn.Module, loss: Tensor, metrics: dict[str, Any]) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients, **{f"metric {name}": metric.value() for name, metric in metrics.items()}}


def one_process(kind: str, architecture: str = "llama") -> dict[str, Tensor]:
    model = build(kind, architecture)
    step = draft_step(model, tiny_target(architecture), batch_of_four(), SETTINGS)
    step.loss().backward()
    return summary(model, step.loss(), step.metrics)


def run_data_parallel(context: RankContext, kind: str) -> dict[str, Tensor]:
    """Each rank its rows; counts summed outside; gradients summed as the loss is normalised by the global counts."""
    model = build(kind)
    share = 4 // context.world_size
    batch = part_of(batch_of_four(), slice(context.rank * share, (context.rank + 1) * share))
    step = draft_step(model, tiny_target("llama"), batch, SETTINGS)
    counts = step.counts.clone()
    dist.all_reduce(counts)
    loss = step.loss(counts)
    loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return summary(model, loss, reduce_metrics(step.metrics))


def run_vocabulary_parallel(context: RankContext, kind: str, architecture: str, widths: tuple[int, ...]) -> dict[str, Tensor]:
    model, target = build(kind, architecture), tiny_target(architecture)
    start = sum(widths[: context.rank])
    head = target.head_weight()[start : start + widths[context.rank]]
    step = draft_step(model, target, batch_of_four(), SETTINGS, tp_group=context.group, head_weight=head)
    step.loss().backward()
    return summary(model, step.loss(), step.metrics)


def assert_same(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            scale = float(value.abs().nan_to_num().max())
            torch.testing.assert_close(result[name], value, rtol=1e-4, atol=2e-5 * scale + 1e-7, msg=name)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel_equals_one_process(kind: str, world_size: int) -> None:
    assert_same(ranks(world_size).values(run_data_parallel, kind, timeout_seconds=START_SECONDS), one_process(kind))


@pytest.mark.parametrize(
    ("kind", "architecture"), [("dflash", "llama"), ("dspark", "llama"), ("dflash", "gemma2"), ("dspark", "gemma2")]
)
@pytest.mark.parametrize("widths", [(31, 30), (9, 20, 2, 30)])
def test_vocabulary_parallel_equals_one_process(kind: str, architecture: str, widths: tuple[int, ...]) -> None:
    assert sum(widths) == VOCAB
    results = ranks(len(widths)).values(run_vocabulary_parallel, kind, architecture, widths, timeout_seconds=START_SECONDS)
    assert_same(results, one_process(kind, architecture))


def run_sharded_draft(context: RankContext, kind: str) -> dict[str, Tensor]:
    """The draft itself under FSDP2; FSDP2 averages gradients over ranks, a globally normalised loss wants their sum."""
    model = build(kind)
    mesh = init_device_mesh("cpu", (context.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    share = 4 // context.world_size
    batch = part_of(batch_of_four(), slice(context.rank * share, (context.rank + 1) * share))
    step = draft_step(model, tiny_target("llama"), batch, SETTINGS)
    counts = step.counts.clone()
    dist.all_reduce(counts)
    loss = step.loss(counts)
    loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    gradients = {name: parameter.grad.full_tensor() * context.world_size for name, parameter in model.named_parameters()}
    return {"loss": loss, **gradients, **{f"metric {n}": metric.value() for n, metric in reduce_metrics(step.metrics).items()}}


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_sharded_draft_equals_one_process(kind: str) -> None:
    assert_same(ranks(2).values(run_sharded_draft, kind, timeout_seconds=START_SECONDS), one_process(kind))


def run_sharded_target(context: RankContext, architecture: str) -> list[Tensor]:
    """Features, head and embedding of a target under FSDP2, and a training step of a draft on it."""
    plain = tiny_target(architecture)
    mesh = init_device_mesh("cpu", (context.world_size,))
    sharded = type(plain.model)(plain.model.config)
    sharded.load_state_dict(plain.model.state_dict())
    sharded.eval()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    target = FrozenTarget(sharded)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(context.rank))
    differences = []
    for _ in range(2):  # a second forward finds no hook of the first
        got, expected = target.features(ids, (-1, 0, 2)), plain.features(ids, (-1, 0, 2))
        differences += [(got.context - expected.context).abs().max(), (got.final_hidden - expected.final_hidden).abs().max()]
    hooks = sum(len(module._forward_hooks) for module in sharded.modules())
    model = tiny_dflash(architecture)
    losses = [draft_step(model, t, random_batch(2, 12), SETTINGS).loss() for t in (target, plain)]
    differences += [(losses[0] - losses[1]).abs(), (target.embed(ids) - plain.embed(ids)).abs().max()]
    after = sum(len(module._forward_hooks) for module in sharded.modules())
    return [torch.stack(differences).detach().max(), torch.tensor(hooks - after)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_capture_under_fsdp2(architecture: str) -> None:
    for difference, surplus_hooks in ranks(2).values(run_sharded_target, architecture, timeout_seconds=START_SECONDS):
        assert difference < 1e-5
        assert surplus_hooks == 0
