"""One training forward of a draft: target features and a batch in, losses as bins and metrics as pairs out.

Per step: anchors are drawn (seeded per sample by seed, epoch and idx), blocks are built and run through the body, and the losses
read hidden rows of supervised slots alone. Nothing of size slots × vocabulary exists, and the target's logits are made for a few
rows at a time.

Shapes: B samples, S sequence length, D documents packed in a row, A anchors a row, K block slots, Q = A·K, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtok.draft.anchors import build_eval_mask, context_doc_ids, document_counts, sample_anchor_positions, sample_generators
from xtok.draft.attention import Backend, BlockVisibility, plan_attention
from xtok.draft.blocks import create_noise_embed, create_position_ids
from xtok.draft.config import DraftConfig
from xtok.draft.metrics import MetricSum
from xtok.draft.model import BlockStates
from xtok.draft.objectives import DraftLosses, ObjectiveInputs, dflash_losses, dspark_losses
from xtok.draft.outputs import DFlashForwardOutput, DSparkForwardOutput
from xtok.draft.target import FrozenTarget, TargetFeatures

__all__ = ["Blocks", "DraftBatch", "DraftStep", "DraftStepSettings", "build_blocks", "draft_config", "draft_step", "run_blocks"]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """A batch of token rows, padded on the right."""

    input_ids: Tensor  # int64 [B, S], not empty
    loss_mask: Tensor  # [B, S], supervised where > 0.5; 0 on padding
    idx: Tensor  # int64 [B], the samples' ordinals: they seed the anchors
    seq_lens: Tensor | None = None  # int [B, D] document lengths, packed rows only

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2 or self.loss_mask.shape != self.input_ids.shape:
            raise ValueError(f"input_ids and loss_mask must both be [B, S], got {self.input_ids.shape}, {self.loss_mask.shape}")
        num_rows, seq_len = self.input_ids.shape
        if not num_rows or not seq_len:
            raise ValueError(f"a batch needs a token, got [{num_rows}, {seq_len}]: a rank without samples takes a row of padding")
        if self.idx.shape != (num_rows,):
            raise ValueError(f"idx must be [{num_rows}], got {tuple(self.idx.shape)}")
        if self.seq_lens is not None and (self.seq_lens.ndim != 2 or len(self.seq_lens) != num_rows):
            raise ValueError(f"seq_lens must be [{num_rows}, D], got {tuple(self.seq_lens.shape)}")
        for name, tensor in (("idx", self.idx), ("seq_lens", self.seq_lens)):
            if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                raise TypeError(f"{name} must be integers, got {tensor.dtype}")
        if self.input_ids.dtype != torch.int64:
            raise TypeError(f"input_ids must be int64, got {self.input_ids.dtype}")


@dataclass(frozen=True, slots=True)
class DraftStepSettings:
    """How a training forward samples, tiles and reports."""

    num_anchors: int = 512
    seed: int = 0
    epoch: int = 0
    token_chunk_size: int = 1024
    attention: Backend = "auto"
    with_metrics: bool = True
    """For DFlash, metrics are a pass of their own (two matmuls over the head): large runs take them every few steps."""
    materialize_logits: bool = False
    """Also make `draft_logits` and `aligned_target_logits` [B, A, K, V]: for tests and inspection, not for training."""

    def __post_init__(self) -> None:
        if self.num_anchors < 1 or self.token_chunk_size < 1:
            raise ValueError(
                f"num_anchors and token_chunk_size must be at least 1, got {self.num_anchors} and {self.token_chunk_size}"
            )


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Result of one training forward; nothing is reduced over micro-batches or ranks yet."""

    losses: DraftLosses
    output: DFlashForwardOutput | DSparkForwardOutput
    metrics: dict[str, MetricSum] = field(default_factory=dict)

    @property
    def counts(self) -> Tensor:
        """Supervised slots per bin on this rank: sum them over micro-batches and ranks and pass the sum to `loss`."""
        return self.losses.counts

    def loss(self, normalization_counts: Tensor | None = None, **term_weights: float) -> Tensor:
        """Scalar loss divided by Σ counts · weights; None: by this forward's own counts.

        Args:
            term_weights: DSpark alone: ce_weight, l1_weight, confidence_weight of `DSparkLossStats.combined`.
        """
        return self.losses.combined(self.counts if normalization_counts is None else normalization_counts, **term_weights)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Anchored blocks of a batch: where they start, what their slots predict, which of these are supervised."""

    anchors: Tensor  # int64 [B, A]
    keep: Tensor  # bool [B, A]
    label_indices: Tensor  # int64 [B, A, K]
    target_ids: Tensor  # int64 [B, A, K], 0 where the label lies outside the row
    eval_mask: Tensor  # bool [B, A, K]


def build_blocks(config: DraftConfig, batch: DraftBatch, settings: DraftStepSettings) -> Blocks:
    """Draw anchors and lay blocks of `config.block_size` slots at them."""
    seq_len, device = batch.input_ids.shape[1], batch.input_ids.device
    remaining = None
    if batch.seq_lens is not None:
        remaining = document_counts(seq_lens=batch.seq_lens, seq_len=seq_len)[1]
    anchors, keep = sample_anchor_positions(
        seq_len=seq_len,
        loss_mask=batch.loss_mask,
        num_anchors=settings.num_anchors,
        device=device,
        doc_remaining=remaining,
        generator=sample_generators(seed=settings.seed, epoch=settings.epoch, idx=batch.idx),
    )
    slots = torch.arange(config.block_size, device=device)
    labels = anchors.unsqueeze(-1) + slots + config.label_offset
    inside = labels < seq_len
    safe = labels.clamp(max=seq_len - 1)
    eval_mask = build_eval_mask(
        seq_len=seq_len,
        loss_mask=batch.loss_mask,
        label_indices=labels,
        safe_label_indices=safe,
        block_keep_mask=keep,
        doc_remaining=remaining,
        anchor_positions=anchors,
        supervised_from_slot=config.first_supervised_slot,
    )
    target_ids = batch.input_ids.gather(1, safe.flatten(1)).view_as(safe).where(inside & keep.unsqueeze(-1), 0)
    return Blocks(anchors, keep, labels, target_ids, eval_mask)


def run_blocks(
    model: nn.Module, target: FrozenTarget, batch: DraftBatch, blocks: Blocks, features: TargetFeatures, backend: Backend = "auto"
) -> BlockStates:
    """Run the draft over all blocks of a batch, heads teacher-forced."""
    config = draft_config(model)
    seq_len, device = batch.input_ids.shape[1], batch.input_ids.device
    doc_ids = doc_positions = None
    context_positions = torch.arange(seq_len, device=device).expand(batch.input_ids.shape)
    if batch.seq_lens is not None:
        doc_ids = context_doc_ids(seq_lens=batch.seq_lens, seq_len=seq_len)
        doc_positions = document_counts(seq_lens=batch.seq_lens, seq_len=seq_len)[0]
        context_positions = doc_positions
    visibility = BlockVisibility(blocks.anchors, blocks.keep, config.block_size, seq_len, doc_ids)
    previous = blocks.anchors.unsqueeze(-1) + torch.arange(config.block_size, device=device)
    states: BlockStates = model(
        slot_embeddings=create_noise_embed(
            input_ids=batch.input_ids,
            anchor_positions=blocks.anchors,
            block_keep_mask=blocks.keep,
            mask_token_id=config.mask_token_id,
            block_size=config.block_size,
            embed_tokens=target.embed,
        ),
        slot_positions=create_position_ids(
            anchor_positions=blocks.anchors, block_size=config.block_size, doc_positions=doc_positions
        ),
        context_features=features.context,
        context_positions=context_positions,
        attend=plan_attention(visibility, device, backend),
        previous_tokens=batch.input_ids.gather(1, previous.flatten(1).clamp(max=seq_len - 1)),
    )
    return states


def draft_step(
    model: nn.Module,
    target: FrozenTarget,
    batch: DraftBatch,
    settings: DraftStepSettings | None = None,
    *,
    features: TargetFeatures | None = None,
    tp_group: dist.ProcessGroup | None = None,
    head_weight: Tensor | None = None,
) -> DraftStep:
    """One training forward of a `DFlashDraftModel` or `DSparkDraftModel` (bare, or wrapped with a `.module`).

    A batch without any anchor gives zero loss that still reaches every parameter.

    Args:
        model: the draft; its parameters are the only ones that get gradients.
        target: the frozen target.
        batch: rows of tokens; packed documents are respected.
        settings: sampling, tiles and reports.
        features: the target's features of this batch if the caller has them; else the target runs here.
        tp_group: ranks that share the vocabulary; all of them run the same batch.
        head_weight: [Vl, H] this rank's contiguous shard of the target's head, in rank order; default the whole head.

    Returns:
        `DraftStep`: bins, outputs and metrics of this rank.

    Raises:
        ConfigError: a draft made for another target.
        ValueError: token ids that the target does not have, documents longer than their row, features of another batch.
    """
    settings = settings or DraftStepSettings()
    config = draft_config(model)
    target.check_draft(config)
    target.check_tokens(batch.input_ids)
    if features is None:
        features = target.features(batch.input_ids, config.target_layer_ids, seq_lens=batch.seq_lens)
    _check_features(config, batch, features)
    blocks = build_blocks(config, batch, settings)
    states = run_blocks(model, target, batch, blocks, features, settings.attention)
    inputs = ObjectiveInputs(
        config=config,
        states=states,
        target_ids=blocks.target_ids,
        label_indices=blocks.label_indices,
        eval_mask=blocks.eval_mask,
        final_hidden=features.final_hidden,
        target=target,
        head=target.head_weight() if head_weight is None else head_weight.detach(),
        token_chunk_size=settings.token_chunk_size,
        tp_group=tp_group,
    )
    make_losses = dflash_losses if config.layout == "at_position" else dspark_losses
    losses, metrics = make_losses(inputs, with_metrics=settings.with_metrics)
    return DraftStep(losses, _output(config, states, blocks, features, target, settings), metrics)


def draft_config(model: nn.Module) -> DraftConfig:
    """The draft's configuration, through a data-parallel wrapper."""
    config: Any = getattr(getattr(model, "module", model), "config", None)
    if not isinstance(config, DraftConfig):
        raise TypeError(f"{type(model).__name__} is no draft model: expected DFlashDraftModel or DSparkDraftModel")
    return config


def _check_features(config: DraftConfig, batch: DraftBatch, features: TargetFeatures) -> None:
    for name, tensor, width in (
        ("context", features.context, len(config.target_layer_ids) * config.hidden_size),
        ("final_hidden", features.final_hidden, config.hidden_size),
    ):
        wanted = (*batch.input_ids.shape, width)
        if tensor.shape != wanted:
            raise ValueError(f"features.{name} must be {wanted} for this batch and draft, got {tuple(tensor.shape)}")


def _output(
    config: DraftConfig,
    states: BlockStates,
    blocks: Blocks,
    features: TargetFeatures,
    target: FrozenTarget,
    settings: DraftStepSettings,
) -> DFlashForwardOutput | DSparkForwardOutput:
    logits = aligned = None
    if settings.materialize_logits:
        logits = target.logits(states.hidden)
        if states.bias_features is not None and states.bias_weight is not None:
            logits = logits + states.bias_features @ states.bias_weight.T
        rows = (blocks.label_indices - 1).clamp(0, features.final_hidden.shape[1] - 1)
        batch_index = torch.arange(rows.shape[0], device=rows.device).view(-1, 1, 1)
        aligned = target.logits(features.final_hidden[batch_index, rows])
    shared: dict[str, Any] = {
        "draft_logits": logits,
        "target_ids": blocks.target_ids,
        "eval_mask": blocks.eval_mask,
        "block_keep_mask": blocks.keep,
        "aligned_target_logits": aligned,
        "first_supervised_slot": config.first_supervised_slot,
        "draft_hidden": states.hidden,
        "anchor_positions": blocks.anchors,
        "label_indices": blocks.label_indices,
    }
    if config.layout == "at_position":
        return DFlashForwardOutput(**shared)
    return DSparkForwardOutput(**shared, confidence_pred=states.confidence)
