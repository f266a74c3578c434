"""Slow twin of the draft body: one block at a time, one head at a time, nothing masked because nothing hidden is ever passed in.

Shares no module with the fast path: it reads a state dict. For tests only.

Shapes: K block slots, a context rows (all before the anchor), H hidden size, T tapped layers, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from xtok.draft.config import DraftConfig

__all__ = ["block_hidden"]


def block_hidden(
    weights: Mapping[str, Tensor],
    config: DraftConfig,
    *,
    slot_embeddings: Tensor,
    context_features: Tensor,
    anchor_position: int,
) -> Tensor:
    """Hidden states [K, H] of one block.

    Args:
        slot_embeddings: [K, H].
        context_features: [a, T * H], the features of positions 0..a-1 of the anchor's own document.
        anchor_position: a, the anchor's position in its document.
    """
    assert len(context_features) == anchor_position
    context = _rms(context_features @ weights["fc.weight"].T, weights["hidden_norm.weight"], config)
    slots = slot_embeddings
    for layer in range(config.num_draft_layers):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}
        normed = _rms(slots, own["input_layernorm.weight"], config)
        slots = slots + _attention(own, config, normed, context, anchor_position)
        normed = _rms(slots, own["post_attention_layernorm.weight"], config)
        gate = normed @ own["mlp.gate_proj.weight"].T
        up = normed @ own["mlp.up_proj.weight"].T
        slots = slots + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    return _rms(slots, weights["norm.weight"], config)


def _rms(rows: Tensor, weight: Tensor, config: DraftConfig) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def _attention(own: Mapping[str, Tensor], config: DraftConfig, slots: Tensor, context: Tensor, anchor: int) -> Tensor:
    queries = slots @ own["self_attn.q_proj.weight"].T
    rows = torch.cat([context, slots])
    keys, values = rows @ own["self_attn.k_proj.weight"].T, rows @ own["self_attn.v_proj.weight"].T
    positions = list(range(anchor)) + [anchor + k for k in range(len(slots))]
    width, share = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    heads = []
    for head in range(config.num_attention_heads):
        key_head = head // share
        query = _rms(queries[:, head * width : (head + 1) * width], own["self_attn.q_norm.weight"], config)
        key = _rms(keys[:, key_head * width : (key_head + 1) * width], own["self_attn.k_norm.weight"], config)
        query, key = _rotate(query, positions[anchor:], config), _rotate(key, positions, config)
        probabilities = (query @ key.T / math.sqrt(width)).softmax(-1)
        heads.append(probabilities @ values[:, key_head * width : (key_head + 1) * width])
    return torch.cat(heads, dim=-1) @ own["self_attn.o_proj.weight"].T


def _rotate(rows: Tensor, positions: list[int], config: DraftConfig) -> Tensor:
    """Rotate each pair (i, i + D/2) by position · theta^(-2i/D)."""
    half = config.head_dim // 2
    out = []
    for row, position in zip(rows, positions, strict=True):
        angles = torch.tensor([position * config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)], dtype=rows.dtype)
        first, second = row[:half], row[half:]
        out.append(torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]))
    return torch.stack(out)
