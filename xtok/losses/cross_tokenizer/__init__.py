"""Distillation across tokenizers: `CrossTokenizerDistillationLoss`, its configuration, and logits given as hidden states."""

from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig
from xtok.losses.cross_tokenizer.logits import HiddenLogits
from xtok.losses.cross_tokenizer.loss import CrossTokenizerDistillationLoss, ValidCounts

__all__ = ["CrossTokenizerDistillationConfig", "CrossTokenizerDistillationLoss", "HiddenLogits", "ValidCounts"]
