"""From block hidden states to losses as bins and metrics as pairs, reading supervised slots alone.

DFlash trains on the target's distribution (soft cross-entropy), a group of blocks at a time: the target's logits are made for the
rows a group needs and dropped. DSpark trains on sampled tokens, distance and confidence; its loss makes the target's logits tile by
tile itself. Acceptance metrics come from the same kernel.

Shapes: B samples, S sequence length, A anchors a row, K block slots, N supervised blocks, H hidden size, Vl vocabulary columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xtok.draft.config import DraftConfig
from xtok.draft.metrics import MetricSum, acceptance_metrics
from xtok.draft.model import BlockStates
from xtok.draft.target import FrozenTarget
from xtok.losses.draft import DraftLossStats, dflash_projected_vocab_parallel_soft_ce, streaming_vocab_parallel_soft_ce
from xtok.losses.dspark import DSparkLossStats, dspark_projected_vocab_parallel_loss, dspark_slot_weights
from xtok.losses.dspark_inputs import vocabulary_place
from xtok.losses.dspark_kernel import project

__all__ = ["DraftLosses", "ObjectiveInputs", "dflash_losses", "dspark_losses"]

_UNUSED_POSITION = -999


@dataclass(frozen=True, slots=True)
class DraftLosses:
    """The loss bins of one forward, whichever objective made them."""

    stats: DraftLossStats | DSparkLossStats

    @property
    def counts(self) -> Tensor:
        """Supervised slots per bin on this rank; all terms share them."""
        return self.stats.counts if isinstance(self.stats, DraftLossStats) else self.stats.cross_entropy.counts

    def combined(self, normalization_counts: Tensor, **term_weights: float) -> Tensor:
        """Scalar loss; `term_weights` are DSpark's (`DSparkLossStats.combined`)."""
        if isinstance(self.stats, DSparkLossStats):
            return self.stats.combined(normalization_counts=normalization_counts, **term_weights)
        if term_weights:
            raise TypeError(f"DFlash has one term; it takes no {sorted(term_weights)}")
        return self.stats.normalized(normalization_counts=normalization_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """What both objectives read."""

    config: DraftConfig
    states: BlockStates
    target_ids: Tensor  # int64 [B, A, K]
    label_indices: Tensor  # int64 [B, A, K]
    eval_mask: Tensor  # bool [B, A, K]
    final_hidden: Tensor  # [B, S, H] of the target
    target: FrozenTarget
    head: Tensor  # [Vl, H]
    token_chunk_size: int
    tp_group: dist.ProcessGroup | None

    def teacher_rows(self) -> Tensor:
        """int64 [B, A, K] flat row b·S + P - 1 of the target's hidden state that predicts the token at P; clamped into the row."""
        seq_len = self.final_hidden.shape[1]
        rows = torch.arange(len(self.final_hidden), device=self.label_indices.device).view(-1, 1, 1) * seq_len
        return rows + (self.label_indices - 1).clamp(0, seq_len - 1)

    def slot_bins(self) -> Tensor:
        """int64 [B, A, K] slot of each position."""
        return torch.arange(self.eval_mask.shape[2], device=self.eval_mask.device).expand(self.eval_mask.shape).contiguous()


def dflash_losses(inputs: ObjectiveInputs, *, with_metrics: bool) -> tuple[DraftLosses, dict[str, MetricSum]]:
    """Soft cross-entropy of slots 1..K-1 against the target, in groups of blocks that fill one tile."""
    blocks_per_group = max(1, inputs.token_chunk_size // inputs.config.num_draft_slots)
    active = inputs.eval_mask.flatten(0, 1).any(dim=-1).nonzero().squeeze(1)
    # Without any block one empty group keeps the loss connected to the body.
    groups = torch.split(active, blocks_per_group) if len(active) else (active,)
    hidden = inputs.states.hidden.flatten(0, 1).to(inputs.head.dtype)
    parts = [_dflash_group(inputs, hidden, group) for group in groups]
    stats = DraftLossStats(
        numerators=torch.stack([part.numerators for part in parts]).sum(dim=0),
        counts=torch.stack([part.counts for part in parts]).sum(dim=0),
        weights=parts[0].weights,
    )
    metrics = {}
    if with_metrics:
        with torch.no_grad():
            metrics = {"loss": _loss_metric(stats), **_agreement_metrics(inputs, _dspark_stats(inputs, heads=False))}
    return DraftLosses(stats), metrics


def dspark_losses(inputs: ObjectiveInputs, *, with_metrics: bool) -> tuple[DraftLosses, dict[str, MetricSum]]:
    """Cross-entropy, L1 distance and confidence of slots 0..K-1."""
    stats = _dspark_stats(inputs, heads=True)
    metrics = {}
    if with_metrics:
        metrics = {"ce": _loss_metric(stats.cross_entropy), "l1": _loss_metric(stats.l1_distance)}
        if stats.confidence is not None:
            metrics["confidence_bce"] = _loss_metric(stats.confidence)
        metrics |= _agreement_metrics(inputs, stats)
    return DraftLosses(stats), metrics


def _dflash_group(inputs: ObjectiveInputs, hidden: Tensor, group: Tensor) -> DraftLossStats:
    """Stats of the blocks `group` int64 [N] of hidden [B·A, K, H]."""
    mask = inputs.eval_mask.flatten(0, 1)[group]
    wanted, place = torch.unique(inputs.teacher_rows().flatten(0, 1)[group][mask], return_inverse=True)
    if not len(wanted):
        wanted = wanted.new_zeros(1)  # the loss wants a teacher row, though no slot reads it
    positions = torch.full_like(mask, _UNUSED_POSITION, dtype=torch.int64)
    positions[mask] = place + 1
    with torch.no_grad():
        teacher = inputs.target.logits(inputs.final_hidden.flatten(0, 1)[wanted], inputs.head).unsqueeze(0)
    shared: dict[str, Any] = {"token_chunk_size": inputs.token_chunk_size, "tp_group": inputs.tp_group}
    decay = math.exp(-1.0 / inputs.config.effective_slot_decay)
    if inputs.target.softcap is not None:
        return _capped_group(inputs, hidden[group], teacher[0], positions, mask, decay)
    return dflash_projected_vocab_parallel_soft_ce(
        draft_hidden=hidden[group],
        output_weight=inputs.head,
        teacher_logits=teacher,
        sample_rows=torch.zeros_like(group),
        label_positions=positions,
        loss_mask=mask,
        position_decay=decay,
        **shared,
    )


def _capped_group(
    inputs: ObjectiveInputs, hidden: Tensor, teacher: Tensor, positions: Tensor, mask: Tensor, decay: float
) -> DraftLossStats:
    """The same for targets with softcapped logits, which no projected loss can express: the group's logits are made, and made
    again in backward."""
    num_bins = inputs.config.num_draft_slots
    weights = decay ** torch.arange(num_bins, dtype=torch.float32, device=mask.device)
    if not bool(mask.any()):
        zeros = hidden.float().sum() * weights.new_zeros(num_bins)
        return DraftLossStats(zeros, weights.new_zeros(num_bins), weights)
    slots = mask.nonzero()
    rows = hidden[slots[:, 0], slots[:, 1]]
    if inputs.tp_group is not None:
        rows = _SumGradient.apply(rows, inputs.tp_group)  # type: ignore[no-untyped-call]

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        stats = streaming_vocab_parallel_soft_ce(
            student_logits=inputs.target.cap(_project_differentiably(rows, inputs.head)),
            teacher_logits=teacher[positions[mask] - 1],
            mask=torch.ones(len(rows), device=rows.device),
            token_chunk_size=inputs.token_chunk_size,
            tp_group=inputs.tp_group,
            bin_ids=slots[:, 1] - 1,
            weights=weights,
        )
        return stats.numerators, stats.counts

    numerators, counts = checkpoint(run, rows, use_reentrant=False)
    return DraftLossStats(numerators, counts, weights.to(counts.dtype))


def _dspark_stats(inputs: ObjectiveInputs, *, heads: bool) -> DSparkLossStats:
    states, head = inputs.states, inputs.head
    features = weight = None
    if heads and states.bias_features is not None and states.bias_weight is not None:
        features, weight = states.bias_features.to(head.dtype), states.bias_weight
        if inputs.tp_group is not None:
            start, _ = vocabulary_place(head.shape[0], inputs.tp_group, head.device)
            weight = _SumGradient.apply(weight, inputs.tp_group)[start : start + head.shape[0]]  # type: ignore[no-untyped-call]
        weight = weight.to(head.dtype)
    return dspark_projected_vocab_parallel_loss(
        student_hidden=states.hidden.to(head.dtype),
        output_weight=head,
        teacher_hidden=inputs.final_hidden.to(head.dtype),
        teacher_rows=inputs.teacher_rows(),
        target_ids=inputs.target_ids,
        mask=inputs.eval_mask,
        bias_features=features,
        bias_weight=weight,
        confidence_logits=states.confidence if heads else None,
        bin_ids=inputs.slot_bins(),
        weights=dspark_slot_weights(inputs.eval_mask.shape[2], slot_decay=inputs.config.effective_slot_decay, device=head.device),
        token_chunk_size=inputs.token_chunk_size,
        logit_softcap=inputs.target.softcap,
        tp_group=inputs.tp_group,
    )


def _loss_metric(stats: DraftLossStats) -> MetricSum:
    numerator = (stats.numerators.detach() * stats.weights).sum().double()
    return MetricSum(numerator, (stats.counts * stats.weights).sum().double())


def _agreement_metrics(inputs: ObjectiveInputs, stats: DSparkLossStats) -> dict[str, MetricSum]:
    """greedy: argmax of the draft equals the target's; overlap: chance that a sampled draft is accepted."""
    metrics: dict[str, MetricSum] = {}
    rates = {"greedy": stats.draft_tokens == stats.teacher_tokens, "overlap": stats.overlap}
    for name, accept in rates.items():
        pairs = acceptance_metrics(
            accept=accept, eval_mask=inputs.eval_mask, first_supervised_slot=inputs.config.first_supervised_slot
        )
        metrics[f"{name}_acceptance_by_slot"], metrics[f"tau_{name}"] = pairs["acceptance_by_slot"], pairs["tau"]
    return metrics


class _ProjectFrozen(torch.autograd.Function):
    """`project` with a gradient for the hidden rows alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = hidden.dtype
        return project(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return project(upstream[0], weight.to(upstream[0].dtype).T).to(ctx.dtype), None


def _project_differentiably(hidden: Tensor, weight: Tensor) -> Tensor:
    logits: Tensor = _ProjectFrozen.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return logits


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks of a group: for a replicated tensor that each rank uses in part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        gradient = upstream[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
