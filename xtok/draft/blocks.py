"""What a draft block is fed: target features at chosen layers, slot positions, anchor and mask embeddings.

Shapes: B samples, S sequence length, A anchors a row, K block slots, H hidden size, L target layers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

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
    "EMBEDDING_LAYER_ID",
    "block_token_ids",
    "create_noise_embed",
    "create_position_ids",
    "extract_context_feature",
    "validate_target_layer_ids",
]

EMBEDDING_LAYER_ID = -1
"""Layer id of the embedding output; id j >= 0 is the residual stream after target layer j."""


def validate_target_layer_ids(target_layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuse layer ids that cannot be captured.

    Warns (`UserWarning`) for the embedding output and the last layer: serving engines cannot capture these.

    Args:
        target_layer_ids: ids to capture, each in {-1} ∪ [0, num_layers - 1], strictly increasing.
        num_layers: L, layers of the target.

    Raises:
        ValueError: empty, not integers, out of range, or not strictly increasing.
    """
    ids = integer_list("target_layer_ids", target_layer_ids)
    if not ids:
        raise ValueError("target_layer_ids is empty: name at least one target layer to take features from")
    outside = [i for i in ids if not EMBEDDING_LAYER_ID <= i < num_layers]
    if outside:
        raise ValueError(
            f"target_layer_ids {outside} do not exist in a target of {num_layers} layers: "
            f"use {EMBEDDING_LAYER_ID} (embedding output) or 0..{num_layers - 1}"
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        raise ValueError(f"target_layer_ids must be strictly increasing, got {ids}")
    uncapturable = [i for i in ids if i in (EMBEDDING_LAYER_ID, num_layers - 1)]
    if uncapturable:
        warnings.warn(
            f"target layers {uncapturable} (embedding output or last layer) cannot be captured by serving engines; "
            "a draft trained on them runs only here",
            UserWarning,
            stacklevel=2,
        )


def extract_context_feature(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Concatenate the chosen layers' outputs.

    Args:
        hidden_states: L + 1 tensors [B, S, H] as Hugging Face returns them, the embedding output first.
        layer_ids: integers (a sequence, tensor or array); -1 takes the embedding output, j takes `hidden_states[j + 1]`.

    Returns:
        [B, S, len(layer_ids) * H].

    Raises:
        ValueError: no id, an id that is no integer or outside the tuple, or chosen layers that differ in shape, dtype or device.
        TypeError: no hidden states.
    """
    if hidden_states is None:
        raise TypeError("hidden_states is None: call the target with output_hidden_states=True")
    ids = integer_list("layer_ids", layer_ids)
    outside = [i for i in ids if not 0 <= i + 1 < len(hidden_states)]
    if outside or not ids:
        raise ValueError(f"layer_ids {ids} do not fit {len(hidden_states)} hidden states (ids start at -1)")
    chosen = [hidden_states[i + 1] for i in ids]
    for layer_id, states in zip(ids, chosen, strict=True):
        if not isinstance(states, Tensor):
            raise TypeError(f"hidden_states of layer id {layer_id} must be a tensor, got {type(states).__name__}")
    kinds = {layer_id: (tuple(states.shape), states.dtype, states.device) for layer_id, states in zip(ids, chosen, strict=True)}
    if len(set(kinds.values())) > 1:
        listed = "; ".join(f"{layer_id}: {shape} {dtype} on {device}" for layer_id, (shape, dtype, device) in kinds.items())
        raise ValueError(f"hidden_states of the chosen layers must agree in shape, dtype and device, got {listed}")
    return torch.cat(chosen, dim=-1)


def create_position_ids(*, anchor_positions: Tensor, block_size: int, doc_positions: Tensor | None = None) -> Tensor:
    """Rotary position of every slot: the anchor's position plus 0..K-1.

    Args:
        anchor_positions: int64 [B, A].
        block_size: K, at least 1.
        doc_positions: int64 [B, S], position within the document, for packed rows (positions restart per document).

    Returns:
        int64 [B, A * K].

    Raises:
        ValueError: a block size below 1, shapes or devices that do not fit. TypeError: dtypes. IndexError: an anchor outside
            `doc_positions`.
    """
    check_count("block_size", block_size, minimum=1)
    check_shape("anchor_positions", anchor_positions, ("B", "A"))
    check_integers("anchor_positions", anchor_positions)
    anchor_positions = anchor_positions.to(torch.int64)
    if doc_positions is not None:
        check_shape("doc_positions", doc_positions, (anchor_positions.shape[0], "S"))
        check_integers("doc_positions", doc_positions)
        check_one_device(anchor_positions=anchor_positions, doc_positions=doc_positions)
        check_anchors_inside(anchor_positions, doc_positions.shape[1])
    base = anchor_positions if doc_positions is None else doc_positions.gather(1, anchor_positions)
    slots = torch.arange(block_size, device=anchor_positions.device)
    return (base.unsqueeze(-1) + slots).flatten(1)


def create_noise_embed(
    *,
    input_ids: Tensor,
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    mask_token_id: int,
    block_size: int,
    embed_tokens: Callable[[Tensor], Tensor],
) -> Tensor:
    """Embeddings of the blocks' inputs: the anchor's token in slot 0, the mask token in all other slots and in dummy blocks.

    Args:
        input_ids: int64 [B, S].
        anchor_positions: int64 [B, A]; dummy blocks may hold any position.
        block_keep_mask: bool [B, A], False for dummy blocks.
        mask_token_id: id of the mask token.
        block_size: K, at least 1.
        embed_tokens: the target's embedding, int64 [...] -> [..., H].

    Returns:
        [B, A * K, H].

    Raises:
        ValueError: a block size below 1, a mask token outside the embedding, shapes, devices or mask values that do not fit.
        TypeError: dtypes. IndexError: an anchor of a real block outside its row.
    """
    rows = getattr(embed_tokens, "num_embeddings", None)
    if isinstance(rows, int) and isinstance(mask_token_id, int) and mask_token_id >= rows:
        raise ValueError(f"mask_token_id is {mask_token_id}, but embed_tokens has {rows} rows")
    return embed_tokens(
        block_token_ids(
            input_ids=input_ids,
            anchor_positions=anchor_positions,
            block_keep_mask=block_keep_mask,
            mask_token_id=mask_token_id,
            block_size=block_size,
        )
    )


def block_token_ids(
    *, input_ids: Tensor, anchor_positions: Tensor, block_keep_mask: Tensor, mask_token_id: int, block_size: int
) -> Tensor:
    """The ids that `create_noise_embed` embeds: int64 [B, A * K]."""
    check_count("block_size", block_size, minimum=1)
    check_count("mask_token_id", mask_token_id, minimum=0)
    check_shape("anchor_positions", anchor_positions, ("B", "A"))
    num_rows, num_anchors = anchor_positions.shape
    check_shape("input_ids", input_ids, (num_rows, "S"))
    check_shape("block_keep_mask", block_keep_mask, (num_rows, num_anchors))
    check_integers("input_ids", input_ids)
    check_integers("anchor_positions", anchor_positions)
    check_one_device(input_ids=input_ids, anchor_positions=anchor_positions, block_keep_mask=block_keep_mask)
    check_mask("block_keep_mask", block_keep_mask)
    keep = block_keep_mask.bool()
    check_anchors_inside(anchor_positions, input_ids.shape[1], keep)
    tokens = torch.full((num_rows, num_anchors, block_size), mask_token_id, dtype=torch.int64, device=input_ids.device)
    if input_ids.shape[1]:
        anchor_tokens = input_ids.to(torch.int64).gather(1, anchor_positions.to(torch.int64).where(keep, 0))
        tokens[:, :, 0] = torch.where(keep, anchor_tokens, tokens[:, :, 0])
    return tokens.flatten(1)
