"""What a rank does in the draft-loss tests: cut its shard of the vocabulary out of a whole problem, run the loss, report."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.memory import peak_allocated
from tests.dist.harness import RankContext
from tests.draft_problems import dflash_problem, gradient_of, projected_problem, unprojected_problem
from xtok.losses import draft

LOSSES = {
    "unprojected": (draft.streaming_vocab_parallel_soft_ce, unprojected_problem, "student_logits"),
    "projected": (draft.projected_streaming_vocab_parallel_soft_ce, projected_problem, "student_hidden"),
    "dflash": (draft.dflash_projected_vocab_parallel_soft_ce, dflash_problem, "draft_hidden"),
}
_VOCABULARY_AXES = {
    "student_logits": -1,
    "teacher_logits": -1,
    "selected_teacher_logits": -1,
    "output_weight": 0,
}


def even_shards(vocab: int, world_size: int) -> list[int]:
    """Column counts of each rank, as equal as they come."""
    return [vocab // world_size + (rank < vocab % world_size) for rank in range(world_size)]


def shard_of(problem: dict[str, Any], widths: list[int], rank: int) -> dict[str, Any]:
    """The arguments of one rank: its columns of the vocabulary, everything else whole."""
    start = sum(widths[:rank])
    shard = dict(problem)
    for name, axis in _VOCABULARY_AXES.items():
        if name in shard:
            wants_gradient = shard[name].requires_grad
            shard[name] = shard[name].detach().narrow(axis, start, widths[rank]).requires_grad_(wants_gradient)
    return shard


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    """Count calls of torch.distributed's collectives."""
    counts: dict[str, int] = {}
    originals = {
        name: getattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "barrier")
    }

    def counting(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def run_loss(
    context: RankContext, kind: str, sizes: list[Any], options: dict[str, Any], widths: list[int], chunk: int
) -> dict[str, Any]:
    """Loss and gradient of this rank's shard; dtype names stand for dtypes in `sizes`."""
    loss, make, differentiable = LOSSES[kind]
    problem = make(*[getattr(torch, size) if isinstance(size, str) else size for size in sizes], **options)
    arguments = shard_of(problem, widths, context.rank)
    with counted_collectives() as forward:
        stats = loss(**arguments, token_chunk_size=chunk, tp_group=context.group)
    with counted_collectives() as backward:
        gradient = gradient_of(stats, arguments[differentiable])
    return {
        "numerators": stats.numerators,
        "counts": stats.counts,
        "weights": stats.weights,
        "gradient": gradient,
        "forward": forward,
        "backward": backward,
    }


def run_on_shards_of(context: RankContext, kind: str, problem: dict[str, Any], widths: list[int], chunk: int) -> dict[str, Any]:
    """Like `run_loss` for arguments made by the test (they arrive without requires_grad)."""
    loss, _, differentiable = LOSSES[kind]
    arguments = shard_of(problem, widths, context.rank)
    arguments[differentiable] = arguments[differentiable].clone().requires_grad_()
    stats = loss(**arguments, token_chunk_size=chunk, tp_group=context.group)
    return {"numerators": stats.numerators, "gradient": gradient_of(stats, arguments[differentiable])}


def run_changed(context: RankContext, kind: str, change: str, at_ranks: list[int], options: dict[str, Any]) -> None:
    """Run a small valid problem after `change` (a name of CHANGES) on some ranks only, and again unchanged to show that the group
    still works when the changed call raised."""
    loss, make, _ = LOSSES[kind]
    sizes = (6, 8, 5, torch.float32) if kind == "projected" else (4, 3, 8, 5, torch.float32)
    arguments = shard_of(make(*sizes, **options), even_shards(8, context.world_size), context.rank)
    arguments |= {"token_chunk_size": 2, "tp_group": context.group}
    changed = dict(arguments)
    if context.rank in at_ranks:
        change_function = CHANGES[change]
        changed |= change_function(changed) if len(inspect.signature(change_function).parameters) else change_function()
    try:
        loss(**changed)
    finally:
        loss(**arguments)


def run_peak_memory(context: RankContext, sizes: list[int], widths: list[int], chunk: int, mask: str) -> int:
    """Peak bytes that a forward and backward of the projected loss allocate on this rank."""
    arguments = shard_of(projected_problem(*sizes, torch.float32, mask=mask), widths, context.rank)

    def step() -> None:
        stats = draft.projected_streaming_vocab_parallel_soft_ce(**arguments, token_chunk_size=chunk, tp_group=context.group)
        torch.autograd.grad(stats.numerators.sum(), arguments["student_hidden"])

    return peak_allocated(step)


def _put(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    copy = tensor.detach().clone()
    copy.view(-1)[index] = value
    return copy


CHANGES: dict[str, Any] = {
    # one field of the header
    "hidden rows": lambda a: {"student_hidden": a["student_hidden"][:-1]},
    "hidden size": lambda a: {"student_hidden": a["student_hidden"][:, :-1]},
    "hidden ndim": lambda a: {"student_hidden": a["student_hidden"].unsqueeze(0)},
    "hidden dtype": lambda a: {"student_hidden": a["student_hidden"].double()},
    "hidden device": lambda a: {"student_hidden": a["student_hidden"].to("meta")},
    "hidden without gradient": lambda a: {"student_hidden": a["student_hidden"].detach()},
    "head hidden size": lambda a: {"output_weight": a["output_weight"][:, :-1]},
    "head ndim": lambda a: {"output_weight": a["output_weight"].unsqueeze(0)},
    "head dtype": lambda a: {"output_weight": a["output_weight"].double()},
    "teacher rows": lambda a: {"selected_teacher_logits": a["selected_teacher_logits"][:-1]},
    "teacher dtype": lambda a: {"selected_teacher_logits": a["selected_teacher_logits"].bfloat16()},
    "teacher unknown dtype": lambda a: {"selected_teacher_logits": a["selected_teacher_logits"].to(torch.float8_e4m3fn)},
    "mask shape": lambda a: {"mask": a["mask"][:-1]},
    "mask dtype": lambda a: {"mask": a["mask"].float()},
    "mask device": lambda a: {"mask": a["mask"].to("meta")},
    "mask missing": lambda: {"mask": None},
    "mask not a tensor": lambda a: {"mask": a["mask"].tolist()},
    "bins missing": lambda: {"bin_ids": None},
    "bins shape": lambda a: {"bin_ids": a["bin_ids"][:-1]},
    "bins dtype": lambda a: {"bin_ids": a["bin_ids"].int()},
    "weights missing": lambda: {"weights": None},
    "weights shape": lambda a: {"weights": a["weights"][:-1]},
    "weights dtype": lambda a: {"weights": a["weights"].double()},
    "chunk size": lambda: {"token_chunk_size": 3},
    "chunk size zero": lambda: {"token_chunk_size": 0},
    "chunk size type": lambda: {"token_chunk_size": 2.0},
    # exact values
    "mask value": lambda a: {"mask": ~a["mask"]},
    "bins value": lambda a: {"bin_ids": 1 - a["bin_ids"].clamp(max=1)},
    "weights value": lambda a: {"weights": _put(a["weights"], 1, 0.123)},
    "weights NaN": lambda a: {"weights": _put(a["weights"], 1, float("nan"))},
    # a fault that one rank alone can see
    "teacher columns": lambda a: {"selected_teacher_logits": a["selected_teacher_logits"][:, :-1]},
    "head columns": lambda a: {"output_weight": a["output_weight"][:0]},
    "bins out of range": lambda a: {"bin_ids": a["bin_ids"] + 7},
    "mask NaN": lambda a: {"mask": _put(a["mask"], 2, float("nan"))},
    "mask negative": lambda a: {"mask": _put(a["mask"], 2, -1.0)},
    "mask complex": lambda a: {"mask": a["mask"].to(torch.complex64)},
    # DFlash
    "decay": lambda: {"position_decay": 0.8 + 2**-53},
    "decay NaN": lambda: {"position_decay": float("nan")},
    "blocks": lambda a: {"draft_hidden": a["draft_hidden"][:-1]},
    "slots": lambda a: {"draft_hidden": a["draft_hidden"][:, :-1]},
    "teacher sequences": lambda a: {"teacher_logits": a["teacher_logits"][:-1]},
    "teacher positions": lambda a: {"teacher_logits": a["teacher_logits"][:, :-1]},
    "dflash teacher columns": lambda a: {"teacher_logits": a["teacher_logits"][..., :-1]},
    "dflash hidden dtype": lambda a: {"draft_hidden": a["draft_hidden"].double()},
    "rows value": lambda a: {"sample_rows": (a["sample_rows"] + 1) % 3},
    "rows dtype": lambda a: {"sample_rows": a["sample_rows"].int()},
    "rows outside": lambda a: {"sample_rows": a["sample_rows"] + 99},
    "positions value": lambda a: {"label_positions": _put(a["label_positions"], 0, -998)},
    "positions shape": lambda a: {"label_positions": a["label_positions"][:, :-1]},
    "positions below int64": lambda a: {"label_positions": torch.full_like(a["label_positions"], -(2**63))},
    "positions outside": lambda a: {"label_positions": torch.full_like(a["label_positions"], 99)},
    "loss mask value": lambda a: {"loss_mask": _put(a["loss_mask"], 0, 0)},
    "loss mask dtype": lambda a: {"loss_mask": a["loss_mask"].float()},
    "loss mask missing": lambda: {"loss_mask": None},
}


def run_unknown_dtypes(context: RankContext, same: bool) -> dict[str, Any]:
    """Teacher logits in a dtype outside the header's table: the same on all ranks, or another on rank 1."""
    dtype = torch.float8_e5m2 if context.rank == 1 and not same else torch.float8_e4m3fn
    arguments = shard_of(projected_problem(6, 8, 5, torch.float32), even_shards(8, context.world_size), context.rank)
    arguments["selected_teacher_logits"] = arguments["selected_teacher_logits"].to(dtype)
    stats = draft.projected_streaming_vocab_parallel_soft_ce(**arguments, token_chunk_size=4, tp_group=context.group)
    return {"numerators": stats.numerators}
