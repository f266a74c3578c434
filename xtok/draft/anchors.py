"""Anchors: which positions may start a draft block, which of them are drawn, and which of a block's slots are supervised.

An anchor is a position whose token is known; the block that starts there predicts the tokens after it. A slot is one position of
a block. Everything here is about positions: no model, no vocabulary.

Shapes: B samples (rows), S sequence length, A anchors a row, K block slots, D documents packed in a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from xtok.draft.common_checks import (
    check_anchors_inside,
    check_count,
    check_integers,
    check_mask,
    check_one_device,
    check_shape,
    integer_list,
)

__all__ = [
    "SUPERVISED_THRESHOLD",
    "build_anchor_candidate_mask",
    "build_eval_mask",
    "context_doc_ids",
    "document_counts",
    "sample_anchor_positions",
    "sample_generators",
]

SUPERVISED_THRESHOLD = 0.5
"""A token is supervised when its loss mask exceeds this."""


def build_anchor_candidate_mask(*, seq_len: int, loss_mask: Tensor, doc_remaining: Tensor | None = None) -> Tensor:
    """Positions that may be anchors: those whose next token is supervised.

    The token at the position itself need not be supervised: the last prompt token is a legal anchor.

    Args:
        seq_len: S.
        loss_mask: [B, S], supervised where > 0.5.
        doc_remaining: [B, S] tokens after each position in its own document, for packed rows; an anchor needs at least one.

    Returns:
        bool [B, S - 1]; [B, 0] when S <= 1.

    Raises:
        ValueError: `loss_mask` or `doc_remaining` that is not [B, S], a mask that is not finite. TypeError: dtypes.
    """
    _check_rows(seq_len, "B", loss_mask, doc_remaining)
    if seq_len <= 1:
        return torch.zeros(loss_mask.shape[0], 0, dtype=torch.bool, device=loss_mask.device)
    candidates = loss_mask[:, 1:] > SUPERVISED_THRESHOLD
    if doc_remaining is not None:
        candidates = candidates & (doc_remaining[:, :-1] >= 1)
    return candidates


def sample_anchor_positions(
    *,
    seq_len: int,
    loss_mask: Tensor,
    num_anchors: int,
    device: torch.device,
    doc_remaining: Tensor | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw up to `num_anchors` anchors a row, uniformly without replacement, in ascending order.

    A row's draw depends on its candidates and the generator's state alone, never on padding.

    Args:
        seq_len, loss_mask, doc_remaining: as in `build_anchor_candidate_mask`.
        num_anchors: A, at least 0.
        device: where the results live.
        generator: one generator for all rows in turn, or one per row (then a row's draw does not depend on its batch). Peers of
            one tensor-parallel group must pass identically seeded ones.

    Returns:
        (anchors int64 [B, A], keep_mask bool [B, A]): anchors beyond a row's candidates are 0 with keep_mask False.

    Raises:
        ValueError: negative `num_anchors`, wrong mask shapes or values, or another number of generators than rows. TypeError: dtypes.
    """
    check_count("num_anchors", num_anchors, minimum=0)
    candidates = build_anchor_candidate_mask(seq_len=seq_len, loss_mask=loss_mask, doc_remaining=doc_remaining).cpu()
    num_rows = candidates.shape[0]
    if generator is None or isinstance(generator, torch.Generator):
        generators: Sequence[torch.Generator | None] = [generator] * num_rows
    else:
        generators = generator
    if len(generators) != num_rows:
        raise ValueError(f"{len(generators)} generators for {num_rows} rows: pass one, or one per row")
    anchors = torch.zeros(num_rows, num_anchors, dtype=torch.int64)
    keep_mask = torch.zeros(num_rows, num_anchors, dtype=torch.bool)
    for row, row_generator in enumerate(generators):
        chosen = _draw(candidates[row].nonzero().squeeze(1), num_anchors, row_generator)
        anchors[row, : len(chosen)] = chosen
        keep_mask[row, : len(chosen)] = True
    return anchors.to(device), keep_mask.to(device)


def _draw(positions: Tensor, num_anchors: int, generator: torch.Generator | None) -> Tensor:
    draw_device = torch.device("cpu") if generator is None else generator.device
    order = torch.randperm(len(positions), generator=generator, device=draw_device)[:num_anchors].cpu()
    return positions[order].sort().values


def sample_generators(*, seed: int, epoch: int, idx: Tensor | Sequence[int]) -> list[torch.Generator]:
    """One CPU generator per sample, seeded by (seed, epoch, idx): the draw of a sample is the same in any batch on any rank.

    Raises ValueError for an idx that is no integer: 4.0 would name another sample than 4.
    """
    generators = []
    for sample in integer_list("idx", idx):
        digest = hashlib.blake2b(f"{seed}/{epoch}/{sample}".encode(), digest_size=8).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
    return generators


def build_eval_mask(
    *,
    seq_len: int,
    loss_mask: Tensor,
    label_indices: Tensor,
    safe_label_indices: Tensor,
    block_keep_mask: Tensor,
    doc_remaining: Tensor | None = None,
    anchor_positions: Tensor | None = None,
    supervised_from_slot: int = 0,
) -> Tensor:
    """Slots that are supervised: a contiguous prefix of each block, from `supervised_from_slot` on.

    A slot counts while its label lies inside the row (and the anchor's document), its label is supervised, its block is real, and
    all slots before it count. The first `supervised_from_slot` slots never break the chain and are never supervised.

    Args:
        seq_len, loss_mask, doc_remaining: as in `build_anchor_candidate_mask`.
        label_indices: int64 [B, A, K], the position each slot predicts; negative or beyond S is invalid.
        safe_label_indices: the same, clamped into the row.
        block_keep_mask: bool [B, A].
        anchor_positions: int64 [B, A]; needed with `doc_remaining`. Dummy blocks may hold any position.
        supervised_from_slot: 0 for the next-token layout (DSpark), 1 for the at-position layout (DFlash).

    Returns:
        bool [B, A, K].

    Raises:
        ValueError: shapes or mask values that do not fit, or `doc_remaining` without `anchor_positions`. TypeError: dtypes.
        IndexError: with `doc_remaining`, an anchor of a real block outside its row.
    """
    check_count("supervised_from_slot", supervised_from_slot, minimum=0)
    check_shape("label_indices", label_indices, ("B", "A", "K"))
    num_rows, num_anchors, _ = label_indices.shape
    check_shape("safe_label_indices", safe_label_indices, tuple(label_indices.shape))
    check_shape("block_keep_mask", block_keep_mask, (num_rows, num_anchors))
    _check_rows(seq_len, num_rows, loss_mask, doc_remaining)
    check_integers("label_indices", label_indices)
    check_integers("safe_label_indices", safe_label_indices)
    check_one_device(
        loss_mask=loss_mask, label_indices=label_indices, safe_label_indices=safe_label_indices, block_keep_mask=block_keep_mask
    )
    check_mask("block_keep_mask", block_keep_mask)
    keep = block_keep_mask.bool()
    if seq_len == 0:
        return torch.zeros_like(label_indices, dtype=torch.bool)
    flat = safe_label_indices.to(torch.int64).clamp(0, seq_len - 1).flatten(1)
    supervised = (loss_mask.gather(1, flat) > SUPERVISED_THRESHOLD).view_as(label_indices)
    valid = supervised & (label_indices >= 0) & (label_indices < seq_len) & keep.unsqueeze(-1)
    if doc_remaining is not None:
        if anchor_positions is None:
            raise ValueError("doc_remaining needs anchor_positions: a label is measured from its anchor")
        check_shape("anchor_positions", anchor_positions, (num_rows, num_anchors))
        check_integers("anchor_positions", anchor_positions)
        check_one_device(loss_mask=loss_mask, anchor_positions=anchor_positions)
        check_anchors_inside(anchor_positions, seq_len, keep)
        anchors = anchor_positions.to(torch.int64).where(keep, 0)
        remaining = doc_remaining.gather(1, anchors).unsqueeze(-1)
        valid = valid & (label_indices - anchors.unsqueeze(-1) <= remaining)
    slot_supervised = torch.arange(label_indices.shape[2], device=valid.device) >= supervised_from_slot
    chain = (valid | ~slot_supervised).to(torch.int64).cumprod(dim=-1).bool()
    return chain & slot_supervised & keep.unsqueeze(-1)


def context_doc_ids(*, seq_lens: Tensor, seq_len: int) -> Tensor:
    """Document index of each position of packed rows.

    Args:
        seq_lens: int [B, D], tokens of each document in order; zero-length documents own no position.
        seq_len: S.

    Returns:
        int64 [B, S]; positions past a row's last document get D, documents past S own none.

    Raises:
        ValueError: not two-dimensional, or a negative length. TypeError: lengths that are not integers.
    """
    ends = _document_lengths(seq_lens, seq_len).cumsum(dim=1)
    positions = torch.arange(seq_len, device=seq_lens.device).expand(seq_lens.shape[0], seq_len).contiguous()
    return torch.searchsorted(ends, positions, right=True)


def document_counts(*, seq_lens: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Where each position stands in its own document.

    Returns:
        (doc_positions, doc_remaining), both int64 [B, S]: tokens before and tokens after each position in its document. In the
        tail past the last document both are 0, so no anchor is drawn there.

    Raises:
        ValueError, TypeError: as `context_doc_ids`; ValueError also for documents that do not fit into S: their remaining tokens would
            not be there.
    """
    lengths = _document_lengths(seq_lens, seq_len)
    totals = [sum(row) for row in seq_lens.tolist()] if bool((lengths.sum(dim=1) > seq_len).any()) else []
    if totals:
        raise ValueError(f"documents of {max(totals)} tokens do not fit a row of {seq_len}")
    doc_ids = context_doc_ids(seq_lens=seq_lens, seq_len=seq_len)
    ends = torch.nn.functional.pad(lengths.cumsum(dim=1), (1, 1))
    positions = torch.arange(seq_len, device=seq_lens.device).expand_as(doc_ids)
    in_document = doc_ids < seq_lens.shape[1]
    starts, stops = ends.gather(1, doc_ids), ends.gather(1, doc_ids + 1)
    return (positions - starts).where(in_document, 0), (stops - 1 - positions).where(in_document, 0)


def _document_lengths(seq_lens: Tensor, seq_len: int) -> Tensor:
    """Checked int64 [B, D] lengths, none above S + 1, so that no sum of them overflows: what lies past S is never asked for."""
    check_count("seq_len", seq_len, minimum=0)
    check_shape("seq_lens", seq_lens, ("B", "D"))
    check_integers("seq_lens", seq_lens)
    lengths = seq_lens.to(torch.int64)
    if bool((lengths < 0).any()):
        raise ValueError(f"seq_lens must be lengths >= 0, got {int(lengths.min())} in shape {tuple(seq_lens.shape)}")
    return lengths.clamp(max=seq_len + 1)


def _check_rows(seq_len: int, num_rows: int | str, loss_mask: Tensor, doc_remaining: Tensor | None) -> None:
    """`loss_mask` and `doc_remaining` belong to the same rows: both [B, S], never one broadcast over the other."""
    check_count("seq_len", seq_len, minimum=0)
    check_shape("loss_mask", loss_mask, (num_rows, seq_len))
    if doc_remaining is not None:
        check_shape("doc_remaining", doc_remaining, tuple(loss_mask.shape))
    check_one_device(loss_mask=loss_mask, doc_remaining=doc_remaining)
    check_mask("loss_mask", loss_mask)
    if doc_remaining is not None:
        check_mask("doc_remaining", doc_remaining)
