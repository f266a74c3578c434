"""Tiny random targets of several architectures, and drafts for them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from xtok.draft.dflash import DFlashConfig, DFlashDraftModel
from xtok.draft.dspark import DSparkConfig, DSparkDraftModel
from xtok.draft.target import FrozenTarget
from xtok.draft.training import DraftBatch

VOCAB, HIDDEN, LAYERS, MASK_TOKEN = 61, 24, 4, 60

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGET_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_SHARED),
    "smollm_tied": LlamaConfig(**_SHARED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SHARED),
    "qwen3": Qwen3Config(**_SHARED, head_dim=16),
    "mistral": MistralConfig(**_SHARED, head_dim=6, sliding_window=8),
    "gemma": GemmaConfig(**_SHARED, head_dim=16),
    "gemma2": Gemma2Config(**_SHARED, head_dim=16, sliding_window=8, final_logit_softcapping=3.0, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**_SHARED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
}
ARCHITECTURES = sorted(TARGET_CONFIGS)

QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
"""A published pair's target: for exact shapes on the meta device."""


@functools.cache
def tiny_target(architecture: str, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    """One random target per architecture, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(17)
        model = AutoModelForCausalLM.from_config(TARGET_CONFIGS[architecture], attn_implementation="eager")
    return FrozenTarget(model.to(dtype).eval())


def tiny_dflash(architecture: str = "llama", *, seed: int = 0, **settings: Any) -> DFlashDraftModel:
    """A two-layer DFlash draft with weights large enough to matter."""
    settings = {"num_draft_layers": 2, "block_size": 4, "target_layer_ids": (0, 2), "init_std": 0.2, **settings}
    config = DFlashConfig.from_target(TARGET_CONFIGS[architecture], mask_token_id=MASK_TOKEN, **settings)
    return DFlashDraftModel(config, generator=torch.Generator().manual_seed(seed))


def tiny_dspark(architecture: str = "llama", *, seed: int = 0, **settings: Any) -> DSparkDraftModel:
    """A two-layer DSpark draft with a Markov head of rank 5."""
    settings = {
        "num_draft_layers": 2, "block_size": 3, "target_layer_ids": (0, 2), "init_std": 0.2, "markov_rank": 5, **settings
    }  # fmt: skip
    config = DSparkConfig.from_target(TARGET_CONFIGS[architecture], mask_token_id=MASK_TOKEN, **settings)
    return DSparkDraftModel(config, generator=torch.Generator().manual_seed(seed))


def random_batch(num_rows: int, seq_len: int, *, seed: int = 0, supervised_from: int = 0) -> DraftBatch:
    """Random tokens; the first `supervised_from` of each row are a prompt."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB - 1, (num_rows, seq_len), generator=generator)
    loss_mask = (torch.arange(seq_len) >= supervised_from).float().expand(num_rows, seq_len).clone()
    return DraftBatch(input_ids, loss_mask, torch.arange(num_rows) + 100 * seed)
