"""Rotary embedding of the draft body, and the repair of rotary frequencies that a dtype cast has rounded.

`model.to(torch.bfloat16)` also rounds `inv_freq` to 8 bits of mantissa; at position 30,000 that is an angle off by whole turns.

Shapes: B samples, P positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RotaryEmbedding", "apply_rotary", "pin_rope_inv_freq_fp32"]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions (rotate-half pairing, full head dim), always computed in fp32.

    The frequencies are a non-persistent fp32 buffer: dtype casts of the model move it but never round it.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, *, theta: float, scaling: dict[str, Any] | None = None, max_positions: int = 32768) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling, self.max_positions = head_dim, theta, scaling, max_positions
        inv_freq, self.attention_scaling = self.compute_inv_freq()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def compute_inv_freq(self) -> tuple[Tensor, float]:
        """(fp32 [D / 2] frequencies on CPU, scale of cosines and sines), after `scaling` as Hugging Face defines it."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
        rope_type = (self.scaling or {}).get("rope_type", "default")
        if rope_type == "default":
            return 1.0 / (self.theta**exponents), 1.0
        return _scaled_inv_freq(self, rope_type)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [B, P] -> fp32 cosines and sines, each [B, P, D]."""
        angles = position_ids.unsqueeze(-1).to(torch.float32) * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.is_meta:
            return self
        inv_freq, self.attention_scaling = self.compute_inv_freq()
        self.inv_freq = inv_freq.to(self.inv_freq.device)
        return self


def _scaled_inv_freq(rotary: RotaryEmbedding, rope_type: str) -> tuple[Tensor, float]:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_scaling type {rope_type!r} is unknown: use default or one of {sorted(ROPE_INIT_FUNCTIONS)}")
    config = Qwen3Config(
        head_dim=rotary.head_dim,
        max_position_embeddings=rotary.max_positions,
        rope_parameters={**(rotary.scaling or {}), "rope_theta": rotary.theta},
    )
    with torch.device("cpu"):  # real frequencies even while a model is laid out on the meta device
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return inv_freq.to(torch.float32), float(attention_scaling)


def apply_rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, heads, P, D] by cosines and sines [B, P, D]; computed in fp32 (or wider), returned in the states' dtype."""
    first, second = states.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (states * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)).to(states.dtype)


def pin_rope_inv_freq_fp32(module: nn.Module) -> None:
    """Recompute every rotary `inv_freq` buffer under `module` in fp32, in place, after a dtype cast.

    Knows Hugging Face rotary modules (one set of frequencies, or one per layer type) and `RotaryEmbedding`; frequencies are
    computed anew from the configuration, because widening rounded ones would keep the damage.

    Raises:
        ValueError: a rounded `inv_freq` in a module whose frequencies cannot be recomputed.
    """
    for path, child in module.named_modules():
        names = [name for name, _ in child.named_buffers(recurse=False) if name.endswith("inv_freq")]
        for name in names:
            buffer = getattr(child, name)
            fresh = _fresh_inv_freq(child, name)
            if fresh is None and buffer.dtype != torch.float32:
                raise ValueError(
                    f"{path or type(child).__name__}.{name} was cast to {buffer.dtype} and {type(child).__name__} does not say "
                    "how to recompute it: cast the model before its rotary embedding is built, or keep that module in fp32"
                )
            if fresh is not None:
                setattr(child, name, fresh.to(device=buffer.device, dtype=torch.float32))


def _fresh_inv_freq(module: nn.Module, name: str) -> Tensor | None:
    if isinstance(module, RotaryEmbedding):
        return module.compute_inv_freq()[0]
    config, rope_type = getattr(module, "config", None), getattr(module, "rope_type", None)
    if config is None or rope_type is None:
        return None
    layer_type = name.removesuffix("inv_freq").removesuffix("original_").removesuffix("_") or None
    kind = rope_type[layer_type] if isinstance(rope_type, dict) else rope_type
    extra = {"layer_type": layer_type} if isinstance(rope_type, dict) else {}
    if kind == "default":
        init: Any = module.compute_default_rope_parameters
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        init = ROPE_INIT_FUNCTIONS[kind]
    fresh, _ = init(config, device=torch.device("cpu"), **extra)
    return torch.as_tensor(fresh)
