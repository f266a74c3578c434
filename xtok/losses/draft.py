"""Draft losses: soft cross-entropy of a draft model against its target, in bins, with the vocabulary possibly sharded.

    streaming_vocab_parallel_soft_ce             student logits are there already
    projected_streaming_vocab_parallel_soft_ce   hidden rows and the frozen head; the [T, V] logits never exist
    dflash_projected_vocab_parallel_soft_ce      blocks of a DFlash draft: slots become rows, indexed teacher rows, decaying weights

Row loss: CE = logsumexp(s) - sum(softmax(t) * s) over the whole vocabulary, in nats; the teacher's entropy is not subtracted.
A row with mask 0 costs nothing and contributes exactly nothing, whatever it holds. No gradient reaches teacher or head.
Math is fp32 (fp64 for an fp64 student). All functions return `DraftLossStats`: sums to be reduced outside and divided once.

Shapes: T rows, V vocabulary columns of this rank, H hidden size, B bins, N blocks, K = gamma + 1 slots, S teacher positions.
Under tensor parallelism hidden rows are replicated and head and teacher logits hold a contiguous, possibly uneven shard of the
vocabulary; every rank gets the whole loss and the whole hidden gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from xtok.losses.agreement import agree_across_ranks
from xtok.losses.draft_checks import DraftBins, check_dflash, check_projected, check_unprojected
from xtok.losses.projected_soft_ce import ProjectedVocabParallelSoftCE
from xtok.losses.soft_ce import Supervision, VocabParallelSoftCE
from xtok.losses.stats import DraftLossStats
from xtok.losses.tiles import compute_dtype

__all__ = [
    "DEFAULT_DRAFT_TOKEN_CHUNK_SIZE",
    "DraftLossStats",
    "dflash_projected_vocab_parallel_soft_ce",
    "projected_streaming_vocab_parallel_soft_ce",
    "streaming_vocab_parallel_soft_ce",
]

DEFAULT_DRAFT_TOKEN_CHUNK_SIZE = 4096


def streaming_vocab_parallel_soft_ce(
    *,
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    token_chunk_size: int,
    tp_group: dist.ProcessGroup | None,
    bin_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> DraftLossStats:
    """Soft cross-entropy sums of student logits, with fp32 work bounded to one tile of rows.

    student_logits, teacher_logits: [..., V], floating point. mask: [...], boolean or fractional (finite, at least 0); scales numerator
    and count alike.
    token_chunk_size: rows whose softmax difference may be kept for the backward; more rows are recomputed tile by tile.
    bin_ids: int64 [...], the bin of each row (None: all in bin 0). weights: [B], real (None: one bin of weight 1); handed through to
    the result, where a NaN or infinite one shows in `normalized`.
    tp_group: the ranks the vocabulary is spread over. They must pass the same mask, bins and chunk size: this function, unlike the
    projected one, does not compare them.

    Raises ValueError (shapes, devices, chunk size, bins, mask values) or TypeError (dtypes, no tensor) before any work. Collectives:
    one gather of 5 numbers a supervised row in the forward, none in the backward. The gradient has the dtype of student_logits.
    """
    bins = check_unprojected(student_logits, teacher_logits, mask, token_chunk_size, bin_ids, weights)
    numerators = VocabParallelSoftCE.apply(  # type: ignore[no-untyped-call]
        student_logits, teacher_logits.detach(), bins.supervision, token_chunk_size, tp_group, _wants_gradient(student_logits)
    )
    return DraftLossStats(numerators, bins.counts, bins.weights)


def projected_streaming_vocab_parallel_soft_ce(
    *,
    student_hidden: Tensor,
    output_weight: Tensor,
    selected_teacher_logits: Tensor,
    mask: Tensor,
    token_chunk_size: int,
    tp_group: dist.ProcessGroup | None,
    bin_ids: Tensor | None = None,
    weights: Tensor | None = None,
    _skip_tp_metadata_check: bool = False,
) -> DraftLossStats:
    """Soft cross-entropy sums of student_hidden @ output_weight.T, tile by tile, hidden gradient made in the forward.

    student_hidden: [..., H], at most 4 dims, replicated over `tp_group`. output_weight: [V, H] in the same dtype; it gets no
    gradient. selected_teacher_logits: [..., V] in any floating dtype. mask, bin_ids, weights: as in
    `streaming_vocab_parallel_soft_ce`. token_chunk_size: rows of one tile of fp32 logits.

    Logits are fp32 whatever the dtype of the head. Extra memory: one fp32 [supervised rows, H] buffer and a tile (two of each under
    tensor parallelism). Collectives: two to agree on the arguments (`_skip_tp_metadata_check` leaves these out; for callers that ran
    them on what these arguments come from), one gather of 5 numbers a supervised row, one sum of the hidden gradient in the backward.

    Raises, before any work and on all ranks of `tp_group` alike, ValueError (shapes, devices, head dtype, chunk size, bins, mask
    values, ranks that differ) or TypeError (no tensor; dtypes that are not floating point; a complex mask; bin_ids not int64).
    """

    def validate() -> DraftBins:
        return check_projected(student_hidden, output_weight, selected_teacher_logits, mask, token_chunk_size, bin_ids, weights)

    with_gradient = _wants_gradient(student_hidden)
    if _skip_tp_metadata_check:
        bins = validate()
    else:
        bins = agree_across_ranks(
            tp_group=tp_group,
            validate=validate,
            tensors={
                "student_hidden": student_hidden,
                "output_weight": output_weight,
                "selected_teacher_logits": selected_teacher_logits,
                "mask": mask,
                "bin_ids": bin_ids,
                "weights": weights,
            },
            scalars={"token_chunk_size": token_chunk_size, "student_hidden.requires_grad": with_gradient},
            exact_values=("mask", "bin_ids", "weights"),
            vocabulary_axes={"output_weight": 0, "selected_teacher_logits": -1},
        )
    supervision = bins.supervision
    numerators = ProjectedVocabParallelSoftCE.apply(  # type: ignore[no-untyped-call]
        student_hidden,
        output_weight,
        selected_teacher_logits,
        supervision,
        supervision.rows,
        token_chunk_size,
        tp_group,
        with_gradient,
    )
    return DraftLossStats(numerators, bins.counts, bins.weights)


def dflash_projected_vocab_parallel_soft_ce(
    *,
    draft_hidden: Tensor,
    output_weight: Tensor,
    teacher_logits: Tensor,
    sample_rows: Tensor,
    label_positions: Tensor,
    loss_mask: Tensor,
    position_decay: float,
    token_chunk_size: int,
    tp_group: dist.ProcessGroup | None,
) -> DraftLossStats:
    """Soft cross-entropy sums of DFlash blocks, one bin a predicted slot.

    draft_hidden: [N, gamma + 1, H]. output_weight: [V, H]. teacher_logits: [B, S, V]; its rows are gathered tile by tile.
    sample_rows: int64 [N], the row of teacher_logits each block lives in. label_positions: int64 [N, gamma + 1], the position P of
    the token a slot predicts; teacher position P - 1 predicts it. loss_mask: bool [N, gamma + 1]; slot 0, the verified anchor token,
    is always left out (on a copy). position_decay: above 0, at most 1.

    Returns bins k = 0..gamma - 1 for slots 1..gamma, with weights position_decay ** k and rank-local counts of shape (gamma,).
    N = 0 gives zeros that are still connected to draft_hidden. Inactive slots may hold any position.
    Raises ValueError, TypeError or, for an active slot outside teacher_logits, IndexError; on all ranks of `tp_group` alike.
    """

    def validate() -> _DFlashRows:
        check_dflash(
            draft_hidden, output_weight, teacher_logits, sample_rows, label_positions, loss_mask, position_decay, token_chunk_size
        )
        return _dflash_rows(draft_hidden, teacher_logits, sample_rows, label_positions, loss_mask)

    with_gradient = _wants_gradient(draft_hidden)
    teacher_rows, supervision = agree_across_ranks(
        tp_group=tp_group,
        validate=validate,
        tensors={
            "draft_hidden": draft_hidden,
            "output_weight": output_weight,
            "teacher_logits": teacher_logits,
            "sample_rows": sample_rows,
            "label_positions": label_positions,
            "loss_mask": loss_mask,
        },
        scalars={
            "token_chunk_size": token_chunk_size,
            "position_decay": position_decay,
            "draft_hidden.requires_grad": with_gradient,
        },
        exact_values=("sample_rows", "label_positions", "loss_mask"),
        vocabulary_axes={"output_weight": 0, "teacher_logits": -1},
    )
    numerators = ProjectedVocabParallelSoftCE.apply(  # type: ignore[no-untyped-call]
        draft_hidden, output_weight, teacher_logits, supervision, teacher_rows, token_chunk_size, tp_group, with_gradient
    )
    gamma = supervision.num_bins
    counts = supervision.scale.new_zeros(gamma).index_add_(0, supervision.bin_ids, supervision.scale)
    weights = [float(position_decay) ** slot for slot in range(gamma)]
    return DraftLossStats(numerators, counts, torch.tensor(weights, dtype=counts.dtype, device=counts.device))


_DFlashRows = tuple[Tensor, Supervision]


def _dflash_rows(
    draft_hidden: Tensor, teacher_logits: Tensor, sample_rows: Tensor, label_positions: Tensor, loss_mask: Tensor
) -> _DFlashRows:
    """Flat teacher rows of the active slots, int64 [n], and the slots themselves as supervised hidden rows."""
    active = loss_mask.clone()
    active[:, 0] = False
    num_rows, num_positions, _ = teacher_logits.shape
    teacher_row = sample_rows.unsqueeze(-1).expand_as(label_positions)[active]
    # Row P - 1 predicts the token at position P. Both coordinates are checked before they are joined: (row 2, P = -3) would
    # otherwise land on a legal row of row 1.
    label_position = label_positions[active]
    outside = (teacher_row < 0) | (teacher_row >= num_rows) | (label_position < 1) | (label_position > num_positions)
    slots = active.nonzero()
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        block, slot = slots[first].tolist()
        raise IndexError(
            f"block {block}, slot {slot}: sample_rows is {int(teacher_row[first])} and label_positions {int(label_position[first])}, "
            f"but teacher_logits has shape {tuple(teacher_logits.shape)}: rows are in [0, {num_rows}), label positions of active slots in "
            f"[1, {num_positions}] ({int(outside.sum())} active slots outside)"
        )
    scale = torch.ones(len(slots), dtype=compute_dtype(draft_hidden.dtype), device=draft_hidden.device)
    hidden_rows = slots[:, 0] * loss_mask.shape[1] + slots[:, 1]
    supervision = Supervision(hidden_rows, scale, slots[:, 1] - 1, loss_mask.shape[1] - 1)
    return teacher_row * num_positions + label_position - 1, supervision


def _wants_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad
