"""Body of a draft: Qwen3-shaped layers whose keys and values come from the target's features and from the block itself.

Queries come from the block's slots only; the context (fused target features, one row a position) is normalized once, is the same
at every layer, and is never queried or updated.

Shapes: B samples, Q slots (all blocks of a row), S context rows, P = S + Q keys, H hidden size, T tapped layers, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xtok.draft.attention import Attend
from xtok.draft.config import DraftConfig
from xtok.draft.model import BlockStates, split_blocks
from xtok.draft.rope import RotaryEmbedding, apply_rotary

__all__ = ["ContextCache", "DraftAttention", "DraftBody", "DraftLayer", "DraftMLP", "Rotation"]

Rotation = tuple[Tensor, Tensor]


@dataclass(slots=True)
class ContextCache:
    """Keys and values of context rows, per layer; append-only, because accepted tokens never change. Slots are never cached."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Context rows held so far."""
        return self.keys[0].shape[2] if self.keys else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, key heads, new rows, D] to a layer; returns all of its rows."""
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], keys], dim=2)
            self.values[layer] = torch.cat([self.values[layer], values], dim=2)
        return self.keys[layer], self.values[layer]


class DraftAttention(nn.Module):
    """Grouped-query attention of slots over context and slots, with RMS norms on queries and keys before RoPE."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        query_width, key_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        slots: Tensor,
        context: Tensor,
        slot_rotation: Rotation,
        context_rotation: Rotation,
        attend: Attend,
        cache: ContextCache | None,
    ) -> Tensor:
        query = apply_rotary(self.q_norm(self._heads(self.q_proj(slots))), *slot_rotation)
        slot_keys, slot_values = self._keys_values(slots, slot_rotation)
        context_keys, context_values = self._keys_values(context, context_rotation)
        if cache is not None:
            context_keys, context_values = cache.append(self.layer, context_keys, context_values)
        keys = torch.cat([context_keys, slot_keys], dim=2)
        values = torch.cat([context_values, slot_values], dim=2)
        attended = attend(query, keys, values).transpose(1, 2).flatten(2)
        out: Tensor = self.o_proj(attended)
        return out

    def _keys_values(self, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return apply_rotary(self.k_norm(self._heads(self.k_proj(rows))), *rotation), self._heads(self.v_proj(rows))

    def _heads(self, states: Tensor) -> Tensor:
        return torch.unflatten(states, -1, (-1, self.head_dim)).transpose(1, 2)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; the context skips the input norm."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        slots: Tensor,
        context: Tensor,
        slot_rotation: Rotation,
        context_rotation: Rotation,
        attend: Attend,
        cache: ContextCache | None,
    ) -> Tensor:
        slots = slots + self.self_attn(self.input_layernorm(slots), context, slot_rotation, context_rotation, attend, cache)
        out: Tensor = slots + self.mlp(self.post_attention_layernorm(slots))
        return out


class DraftBody(nn.Module):
    """Fused context features, draft layers and what follows them; parameter names are those of the published checkpoints.

    The target's embedding and head are not part of it: callers pass embedded slots in and project the output themselves.

    Args:
        config: dimensions and wiring.
        generator: draws the initial weights; None uses the global one.
    """

    def __init__(self, config: DraftConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, layer) for layer in range(config.num_draft_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling, max_positions=config.max_position_embeddings
        )
        self.build_heads()
        self.initialize(generator)

    def build_heads(self) -> None:
        """Modules after the final norm: none here."""

    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: N(0, init_std) matrices, norms 1, biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.init_std, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(
        self,
        *,
        slot_embeddings: Tensor,
        slot_positions: Tensor,
        context_features: Tensor,
        context_positions: Tensor,
        attend: Attend,
        previous_tokens: Tensor | None = None,
        cache: ContextCache | None = None,
    ) -> BlockStates:
        """All slots of all blocks, heads teacher-forced.

        Args:
            slot_embeddings: [B, Q, H] the target's embeddings of the blocks' inputs.
            slot_positions: int64 [B, Q] rotary positions.
            context_features: [B, S, T * H] the tapped layers, concatenated; with a cache only the rows it does not hold yet.
            context_positions: int64 [B, S].
            attend: from `plan_attention`.
            previous_tokens: int64 [B, Q] the token before each slot's prediction, token[anchor + k]; None leaves the heads out
                (the decoding loop runs them slot by slot).
            cache: context keys and values of earlier calls, appended to in place.
        """
        dtype = self.fc.weight.dtype
        context = self.hidden_norm(self.fc(context_features.to(dtype)))
        slots = slot_embeddings.to(dtype)
        slot_rotation, context_rotation = self.rotary_emb(slot_positions), self.rotary_emb(context_positions)
        for layer in self.layers:
            slots = layer(slots, context, slot_rotation, context_rotation, attend, cache)
        hidden = split_blocks(self.norm(slots), self.config.block_size)
        return (
            BlockStates(hidden) if previous_tokens is None else self.with_heads(hidden, previous_tokens.view(hidden.shape[:-1]))
        )

    def with_heads(self, hidden: Tensor, previous_tokens: Tensor) -> BlockStates:
        """What the heads add to hidden [B, A, K, H], given int64 previous tokens [B, A, K]: nothing here."""
        return BlockStates(hidden)
