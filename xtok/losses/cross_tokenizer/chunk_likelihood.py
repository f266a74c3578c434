"""ALM: how likely each side finds the chunk as a whole. Needs no projection, only the log-probabilities of the tokens themselves.

Shapes: R student tokens and S teacher tokens in valid chunks, C chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtok.losses.cross_tokenizer.chunks import ChunkTable
from xtok.losses.cross_tokenizer.config import CrossTokenizerDistillationConfig

__all__ = ["chunk_likelihood_loss"]


def chunk_likelihood_loss(
    config: CrossTokenizerDistillationConfig, chunks: ChunkTable, student_log_probs: Tensor, teacher_log_probs: Tensor
) -> Tensor:
    """Σ over chunks of weight · binary KL between the chunk's likelihoods, a scalar (not normalized).

    student_log_probs `[R]` (with gradient), teacher_log_probs `[S]`: log softmax at each token, in the order of `chunks`.
    """
    x = _likelihood(config, student_log_probs, chunks.student_chunk, chunks.num_chunks)
    y = _likelihood(config, teacher_log_probs.detach(), chunks.teacher_chunk, chunks.num_chunks)
    divergence = y * (y / x).log() + (1 - y) * ((1 - y) / (1 - x)).log()
    return (chunks.weights.to(divergence.dtype) * divergence).sum().to(student_log_probs.dtype)


def _likelihood(config: CrossTokenizerDistillationConfig, log_probs: Tensor, chunk: Tensor, num_chunks: int) -> Tensor:
    # float64: in float32 a small epsilon makes 1 - epsilon one, and the second term 0 · log(0 / 0).
    total = torch.zeros(num_chunks, dtype=torch.float64, device=log_probs.device).index_add(0, chunk, log_probs.double())
    return (total / config.alm_temperature).exp().clamp(config.alm_epsilon, 1 - config.alm_epsilon)
