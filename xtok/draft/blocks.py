"""What a draft block is fed: target features at chosen layers, slot positions, anchor and mask embeddings.

Shapes: B samples, S sequence length, A anchors a row, K block slots, H hidden size, L target layers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor

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
    ids = list(target_layer_ids)
    if not ids:
        raise ValueError("target_layer_ids is empty: name at least one target layer to take features from")
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral)]
    if wrong:
        raise ValueError(f"target_layer_ids must be integers, got {wrong}")
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
        layer_ids: -1 takes the embedding output, j takes `hidden_states[j + 1]`.

    Returns:
        [B, S, len(layer_ids) * H].

    Raises:
        ValueError: no id, or an id outside the tuple.
    """
    outside = [i for i in layer_ids if not 0 <= i + 1 < len(hidden_states)]
    if outside or not layer_ids:
        raise ValueError(f"layer_ids {list(layer_ids)} do not fit {len(hidden_states)} hidden states (ids start at -1)")
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)


def create_position_ids(*, anchor_positions: Tensor, block_size: int, doc_positions: Tensor | None = None) -> Tensor:
    """Rotary position of every slot: the anchor's position plus 0..K-1.

    Args:
        anchor_positions: int64 [B, A].
        block_size: K.
        doc_positions: int64 [B, S], position within the document, for packed rows (positions restart per document).

    Returns:
        int64 [B, A * K].
    """
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
        anchor_positions: int64 [B, A].
        block_keep_mask: bool [B, A], False for dummy blocks.
        mask_token_id: id of the mask token.
        block_size: K.
        embed_tokens: the target's embedding, int64 [...] -> [..., H].

    Returns:
        [B, A * K, H].
    """
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
    num_rows, num_anchors = anchor_positions.shape
    tokens = torch.full((num_rows, num_anchors, block_size), mask_token_id, dtype=torch.int64, device=input_ids.device)
    anchor_tokens = input_ids.to(torch.int64).gather(1, anchor_positions)
    tokens[:, :, 0] = torch.where(block_keep_mask.bool(), anchor_tokens, tokens[:, :, 0])
    return tokens.flatten(1)
