"""Which keys a draft slot may see, and the one place that decides how attention is computed.

A slot sees the target's features strictly before its anchor (the anchor's own features do not exist yet when the draft runs) in
the anchor's document, and all slots of its own block. Visibility is by position, never by block index: blocks may overlap.

Shapes: B samples, A anchors a row, K block slots, S context rows, Q = A·K queries, P = S + Q keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Attend", "Backend", "BlockVisibility", "plan_attention"]

Backend = Literal["auto", "sdpa", "flex"]


@dataclass(frozen=True, slots=True)
class BlockVisibility:
    """The rule, once, for both backends."""

    anchor_positions: Tensor  # int64 [B, A]
    block_keep_mask: Tensor  # bool [B, A]; dummy blocks see themselves only, so that no row of the softmax is empty
    block_size: int
    context_len: int
    doc_ids: Tensor | None = None  # int64 [B, S], packed rows

    @property
    def num_queries(self) -> int:
        return self.anchor_positions.shape[1] * self.block_size

    def visible(self, b: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Elementwise rule over broadcastable int64 indices; keys below S are context rows, the others slots."""
        block = query // self.block_size
        anchor = self.anchor_positions[b, block]
        row = key.clamp(max=max(self.context_len - 1, 0))
        context = (key < self.context_len) & self.block_keep_mask[b, block] & (row < anchor)
        if self.doc_ids is not None and self.context_len:
            context = context & (self.doc_ids[b, row] == self.doc_ids[b, anchor])
        return context | ((key >= self.context_len) & ((key - self.context_len) // self.block_size == block))

    def dense(self) -> Tensor:
        """bool [B, 1, Q, S + Q], True where visible."""
        device = self.anchor_positions.device
        b = torch.arange(self.anchor_positions.shape[0], device=device).view(-1, 1, 1)
        query = torch.arange(self.num_queries, device=device).view(1, -1, 1)
        key = torch.arange(self.context_len + self.num_queries, device=device).view(1, 1, -1)
        return self.visible(b, query, key).unsqueeze(1)


class Attend(Protocol):
    """[B, heads, Q, D] queries, [B, key heads, P, D] keys and values -> [B, heads, Q, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor: ...


def plan_attention(visibility: BlockVisibility | None, device: torch.device, backend: Backend = "auto") -> Attend:
    """The attention of one forward, mask built once for all layers.

    Args:
        visibility: the rule; None when every key is visible (one block, context cut at its anchor: the decoding loop).
        device: where the draft runs.
        backend: "auto" is FlexAttention on CUDA, PyTorch's SDPA with an explicit mask elsewhere. "flex" elsewhere runs it
            uncompiled: for checks.
    """
    if visibility is None:
        return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    if backend == "flex" or (backend == "auto" and device.type == "cuda"):
        return _plan_flex(visibility, device)
    mask = visibility.dense()
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def _plan_flex(visibility: BlockVisibility, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask

    num_rows, num_queries = visibility.anchor_positions.shape[0], visibility.num_queries
    block_mask = create_block_mask(
        lambda b, head, query, key: visibility.visible(b, query, key),
        B=num_rows,
        H=None,
        Q_LEN=num_queries,
        KV_LEN=visibility.context_len + num_queries,
        device=str(device),
    )
    flex = _flex_attention(device.type == "cuda")
    return lambda query, key, value: flex(query, key, value, block_mask=block_mask, enable_gqa=True)


@cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
