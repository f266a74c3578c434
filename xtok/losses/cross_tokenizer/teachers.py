"""Several teachers: how much each counts in a micro-batch, and which logits are compared.

Weights other than fixed ones come from the teachers' own supervised tokens in this micro-batch: they are detached, equal on every rank
of a tp group, and belong to the micro-batch (another accumulation or data-parallel layout gives other weights).

Shapes: N teachers; S supervised rows of one teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtok.losses.cross_tokenizer.chunks import SupervisedTokens, require_keys, supervised_tokens
from xtok.losses.cross_tokenizer.collectives import max_over_shards
from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig
from xtok.losses.cross_tokenizer.label_log_probs import row_statistics
from xtok.losses.cross_tokenizer.logits import AveragedLogits, LogitsSource
from xtok.projection.projection import Projection

__all__ = ["average_teachers", "check_one_vocabulary", "teacher_supervised_tokens", "teacher_weights"]


UNKNOWN_SCORE = 1e9


def teacher_supervised_tokens(batch: Mapping[str, Any], teacher_index: int, *, same_tokenizer: bool) -> SupervisedTokens:
    """The teacher's own supervised tokens with a predictor; a same-tokenizer teacher reads the student's."""
    if same_tokenizer:
        return supervised_tokens(batch)
    names = [f"teacher_{teacher_index}_{name}" for name in ("input_ids", "token_mask")]
    require_keys(batch, [*names, "sample_mask"], why=f"the supervised tokens of teacher {teacher_index}")
    return supervised_tokens({"input_ids": batch[names[0]], "token_mask": batch[names[1]], "sample_mask": batch["sample_mask"]})


def teacher_weights(
    config: CrossTokenizerDistillationConfig,
    sources: Sequence[LogitsSource],
    tokens: Sequence[SupervisedTokens | None],
    *,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """One weight a teacher, `[N]`, detached. `select_teacher` gives 1 to the teacher of lowest cross-entropy and 0 to the others."""
    device = sources[0].device
    if config.teacher_combination != "select_teacher" and config.teacher_weighting == "fixed":
        return torch.tensor(config.teacher_weights or [1.0] * len(sources), dtype=torch.float64, device=device)
    scores = torch.stack([_scores(source, part, config.token_tile_size) for source, part in zip(sources, tokens, strict=True)])
    scores = max_over_shards(scores, tp_group)  # equal already; this makes them the same bits
    cross_entropy, entropy, max_probability = scores.unbind(dim=1)
    if config.teacher_combination == "select_teacher":
        return torch.nn.functional.one_hot(cross_entropy.argmin(), len(sources)).double()
    alpha = config.teacher_weighting_alpha
    exponent = {"cross_entropy": -alpha * cross_entropy, "entropy": -alpha * entropy, "max_probability": alpha * max_probability}
    return torch.softmax(exponent[config.teacher_weighting], dim=0)


def _scores(source: LogitsSource, tokens: SupervisedTokens | None, tile_size: int) -> Tensor:
    """Mean cross-entropy, entropy and highest probability of a teacher on its supervised tokens, `[3]` float64."""
    assert tokens is not None
    statistics = row_statistics(source, tokens.rows, tokens.labels, tile_size=tile_size, details=True)
    values = torch.stack([-statistics.label_log_prob, statistics.entropy, statistics.max_probability]).double()
    total = (values * tokens.weights.double()).sum(dim=1)
    # A teacher without a supervised token says nothing: it is never the best one.
    worst = torch.tensor([UNKNOWN_SCORE, UNKNOWN_SCORE, -UNKNOWN_SCORE], dtype=total.dtype, device=total.device)
    return total / tokens.count if bool(tokens.count > 0) else worst


def check_one_vocabulary(projections: Sequence[Projection | None]) -> None:
    """Raise ValueError unless all teachers speak one vocabulary, as averaging their logits needs."""
    vocabularies = {"the student's" if p is None else p.teacher_fingerprint for p in projections}
    if len(vocabularies) > 1:
        raise ValueError(
            f"averaged_logits needs teachers of one vocabulary, got {sorted(vocabularies)}: "
            "use teacher_combination='sum' or 'select_teacher'"
        )


def average_teachers(
    sources: list[LogitsSource], weights: Tensor, batch: Mapping[str, Any], projections: Sequence[Projection | None]
) -> AveragedLogits:
    """One source in place of all. Raises ValueError when the teachers were not fed the same tokens."""
    if projections[0] is not None:
        first = batch["teacher_0_input_ids"]
        for index in range(1, len(sources)):
            other = batch[f"teacher_{index}_input_ids"]
            if first.shape != other.shape or not bool((first == other).all()):
                raise ValueError(
                    f"averaged_logits needs the same tokens for every teacher, but teacher {index}'s differ from teacher 0's"
                )
    return AveragedLogits(sources, weights)
