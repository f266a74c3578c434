"""Anchored draft blocks: anchors, masks, features and outputs that DFlash and DSpark share.

One public path for what lives in `anchors`, `blocks`, `heads`, `outputs` and `rope`.
"""

from __future__ import annotations

from xtok.draft.anchors import build_anchor_candidate_mask, build_eval_mask, context_doc_ids, sample_anchor_positions
from xtok.draft.blocks import create_noise_embed, create_position_ids, extract_context_feature, validate_target_layer_ids
from xtok.draft.heads import AcceptRatePredictor
from xtok.draft.outputs import DFlashForwardOutput, DSparkForwardOutput
from xtok.draft.rope import pin_rope_inv_freq_fp32

__all__ = [
    "AcceptRatePredictor",
    "DFlashForwardOutput",
    "DSparkForwardOutput",
    "build_anchor_candidate_mask",
    "build_eval_mask",
    "context_doc_ids",
    "create_noise_embed",
    "create_position_ids",
    "extract_context_feature",
    "pin_rope_inv_freq_fp32",
    "sample_anchor_positions",
    "validate_target_layer_ids",
]
