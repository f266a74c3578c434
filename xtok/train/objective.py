"""The loss of one micro-batch, whatever it is made of, and the counts that normalize it.

Shapes: B samples, T positions, N teachers, K_d drafted slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schemas.train_config import TrainConfig
from xtok.batch import BatchedDataDict
from xtok.draft.metrics import MetricSum
from xtok.draft.target import TargetFeatures
from xtok.draft.training import DraftBatch, DraftStepSettings, build_blocks, draft_config, draft_step
from xtok.losses.cross_tokenizer import CrossTokenizerDistillationLoss, HiddenLogits
from xtok.losses.cross_tokenizer.chunks import supervised_tokens
from xtok.losses.cross_tokenizer.label_log_probs import label_log_probs
from xtok.losses.cross_tokenizer.logits import LogitsSource
from xtok.train.models import BodyOutput, CausalBody, Teacher

__all__ = ["Counts", "Objective"]


@dataclass(frozen=True)
class Counts:
    """Normalizers of one step over all ranks and micro-batches: float64.

    tokens: scalar N_t. chunks: `[N]`, N_c of each teacher (0 for a same-tokenizer one). slots: `[K_d]`, supervised draft slots.
    """

    tokens: Tensor
    chunks: Tensor
    slots: Tensor

    def summed(self, others: Sequence[Counts], group: dist.ProcessGroup) -> Counts:
        """This plus the others, added up over the ranks of `group` in one collective."""
        packed = torch.stack([torch.cat([c.tokens[None], c.chunks, c.slots]) for c in (self, *others)]).sum(dim=0)
        dist.all_reduce(packed, group=group)
        num_teachers = self.chunks.shape[0]
        return Counts(packed[0], packed[1 : 1 + num_teachers], packed[1 + num_teachers :])


class Objective:
    """student: the body. loss_fn: None without distillation. teachers: in the dataset's order. draft: None without one."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        student: CausalBody,
        loss_fn: CrossTokenizerDistillationLoss | None,
        teachers: Sequence[Teacher],
        draft: nn.Module | None,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        self.config, self.student, self.loss_fn, self.teachers, self.draft = config, student, loss_fn, teachers, draft
        self._vocab_size, self._tp_group = vocab_size, tp_group

    def count(self, batch: BatchedDataDict, epoch: int) -> Counts:
        """This micro-batch's part of the normalizers; runs no model."""
        device = batch["input_ids"].device
        if self.loss_fn is None:
            tokens, chunks = supervised_tokens(batch).count, []
        else:
            counted = self.loss_fn.count_valid(batch)
            tokens, chunks = counted.num_valid_tokens, counted.num_valid_chunks
        values = [tokens.new_zeros(()) if c is None else c for c in chunks]
        slots = torch.zeros(0, dtype=torch.float64, device=device)
        if self.draft is not None:
            layout = draft_config(self.draft)
            mask = build_blocks(layout, self._draft_batch(batch), self._draft_settings(epoch)).eval_mask
            slots = mask.sum(dim=(0, 1)).double()[layout.first_supervised_slot :]
        stacked = torch.stack(values) if values else torch.zeros(0, dtype=torch.float64, device=device)
        return Counts(tokens.double(), stacked.double(), slots)

    def __call__(self, batch: BatchedDataDict, counts: Counts, epoch: int) -> tuple[Tensor, dict[str, MetricSum]]:
        """Loss of this micro-batch, divided by the step's counts, and its metrics as unreduced pairs."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.trains_student):
            body = self.student(batch["input_ids"])
        parts: list[Tensor] = []
        metrics: dict[str, MetricSum] = {}
        if self.loss_fn is not None:
            loss, found = self._distill(body, batch, counts)
            parts.append(loss)
            metrics |= found
        if self.loss_fn is None and self.config.objectives.ce:
            loss, metrics["ce_loss"] = self._cross_entropy(body, batch, counts)
            parts.append(self.config.objectives.ce * loss)
        elif "ce_loss" not in metrics and not torch.is_grad_enabled():
            metrics["ce_loss"] = self._cross_entropy(body, batch, counts)[1]  # an evaluation shows it, whatever is trained
        if self.draft is not None:
            loss, found = self._draft(body, batch, counts, epoch)
            parts.append(float(self.config.objectives.draft or 0.0) * loss)
            metrics |= found
        total = torch.stack([part.float() for part in parts]).sum()
        return total, metrics

    def _distill(self, body: BodyOutput, batch: BatchedDataDict, counts: Counts) -> tuple[Tensor, dict[str, MetricSum]]:
        assert self.loss_fn is not None
        projections = self.loss_fn.projections
        logits = []
        for index, (teacher, projection) in enumerate(zip(self.teachers, projections, strict=True)):
            logits.append(teacher.logits(batch["input_ids" if projection is None else f"teacher_{index}_input_ids"]))
        chunks = [None if p is None else counts.chunks[i] for i, p in enumerate(projections)]
        loss, metrics = self.loss_fn(
            student_logits=HiddenLogits(body.hidden, body.head),
            teacher_logits=logits,
            batch=batch,
            num_valid_tokens=counts.tokens,
            num_valid_chunks=chunks,
            tp_group=self._tp_group,
        )
        config = self.loss_fn.config
        if not (config.ce_weight > 0 or config.dynamic_scaling or "alm" in self.loss_fn.modes):
            del metrics["ce_loss"]  # not computed
        return loss, metrics

    def _cross_entropy(self, body: BodyOutput, batch: BatchedDataDict, counts: Counts) -> tuple[Tensor, MetricSum]:
        source = LogitsSource(
            HiddenLogits(body.hidden, body.head), vocab_size=self._vocab_size, group=self._tp_group, name="student_logits"
        )
        tokens = supervised_tokens(batch)
        log_probs = label_log_probs(source, tokens.rows, tokens.labels, tile_size=128)
        total = -(log_probs * tokens.weights).sum()
        return total / counts.tokens.clamp_min(1e-12).to(total.dtype), MetricSum(total.detach().double(), tokens.count)

    def _draft(self, body: BodyOutput, batch: BatchedDataDict, counts: Counts, epoch: int) -> tuple[Tensor, dict[str, MetricSum]]:
        assert self.draft is not None
        assert body.context is not None
        step = draft_step(
            self.draft,
            self.student.target,
            self._draft_batch(batch),
            self._draft_settings(epoch),
            features=TargetFeatures(body.context, body.hidden.detach()),
            tp_group=self._tp_group,
            head_weight=body.head.detach(),
        )
        return step.loss(counts.slots), {f"draft_{name}": metric for name, metric in step.metrics.items()}

    def _draft_batch(self, batch: BatchedDataDict) -> DraftBatch:
        mask = (batch["token_mask"] > 0) & (batch["sample_mask"] > 0)[:, None]
        idx = torch.tensor(batch["idx"], dtype=torch.int64, device=mask.device)
        return DraftBatch(batch["input_ids"], mask.float(), idx)

    def _draft_settings(self, epoch: int) -> DraftStepSettings:
        return DraftStepSettings(num_anchors=self.config.draft.num_anchors, seed=self.config.seed, epoch=epoch)
