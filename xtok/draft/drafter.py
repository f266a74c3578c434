"""A trained draft model as the drafter of the decoding loop.

Shapes: K block slots, m drafted tokens, n context rows, H hidden size, V vocabulary size, r Markov rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from xtok.draft.attention import plan_attention
from xtok.draft.body import ContextCache
from xtok.draft.decoding import Proposal, Sampler
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.draft.model import BlockStates
from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Drafts a block per round: one pass of the body, then the Markov head slot by slot where there is one.

    Args:
        model: DFlash or DSpark.
        target: gives embedding and head.
        confidence_threshold: DSpark: keep the slots before the first whose confidence is below it, at most 1; <= 0 keeps all.
        use_cache: False recomputes the draft's context every round: for checks.

    Raises:
        ConfigError: a draft that does not fit the target, or a threshold without a confidence head.
    """

    def __init__(
        self,
        model: DFlashDraftModel | DSparkDraftModel,
        target: FrozenTarget,
        *,
        confidence_threshold: float = 0.0,
        use_cache: bool = True,
    ) -> None:
        target.check_draft(model.config)
        if not -math.inf < confidence_threshold <= 1.0:
            raise ConfigError(f"confidence_threshold must be at most 1 (0 keeps every slot), got {confidence_threshold}")
        self.layer_ids: Sequence[int] = model.config.target_layer_ids
        self._model, self._target, self._threshold, self._use_cache = model, target, confidence_threshold, use_cache
        self._markov = model.markov_head if isinstance(model, DSparkDraftModel) else None
        self._confident = model if isinstance(model, DSparkDraftModel) and model.confidence_head is not None else None
        if confidence_threshold > 0 and self._confident is None:
            raise ConfigError(f"confidence_threshold {confidence_threshold} needs a draft with a confidence head")
        self._head = target.head_weight()
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache = ContextCache()
        self._pending: list[Tensor] = []
        self._num_observed = 0

    def observe(self, features: Tensor) -> None:
        """Take features [1, n, T * H] of the next n positions."""
        self._pending.append(features)
        self._num_observed += features.shape[1]

    @torch.no_grad()
    def propose(self, anchor_token: int, anchor_position: int, sampler: Sampler) -> Proposal:
        """Draft K - 1 (at-position) or at most K (next-token) tokens."""
        assert self._num_observed == anchor_position, "the context must end right before the anchor"
        hidden = self._run_body(anchor_token, anchor_position)
        logits = self._target.logits(hidden, self._head)
        if self._markov is None and self._confident is None:
            return _propose_all(logits, sampler)
        return self._propose_in_order(hidden, logits, anchor_token, sampler)

    def _run_body(self, anchor_token: int, anchor_position: int) -> Tensor:
        """Hidden states [m, H] of the slots that draft."""
        config, device = self._model.config, self._target.device
        context = torch.cat(self._pending, dim=1)
        cached = self._cache.num_rows
        tokens = torch.full((1, config.block_size), config.mask_token_id, dtype=torch.int64, device=device)
        tokens[0, 0] = anchor_token
        states: BlockStates = self._model(
            slot_embeddings=self._target.embed(tokens),
            slot_positions=torch.arange(anchor_position, anchor_position + config.block_size, device=device).unsqueeze(0),
            context_features=context,
            context_positions=torch.arange(cached, cached + context.shape[1], device=device).unsqueeze(0),
            attend=plan_attention(None, device),
            cache=self._cache if self._use_cache else None,
        )
        self._pending = [context[:, :0]] if self._use_cache else [context]
        return states.hidden[0, 0, config.first_supervised_slot :]

    def _propose_in_order(self, hidden: Tensor, logits: Tensor, anchor_token: int, sampler: Sampler) -> Proposal:
        """Slot by slot: Markov bias from the token just drafted, draw, feed on; stop at the first doubtful slot."""
        previous, tokens, probabilities = anchor_token, [], []
        state = None if self._markov is None else self._markov.start(hidden[0])
        for slot in range(len(hidden)):
            embedding = None
            slot_logits = logits[slot]
            if self._markov is not None and state is not None:
                embedding = self._markov.markov_w1(torch.tensor(previous, device=hidden.device))
                features, state = self._markov.step(hidden[slot], embedding, state)
                slot_logits = slot_logits + self._markov.markov_w2(features)
            if self._is_doubtful(hidden[slot], embedding):
                break
            if not sampler.greedy:
                probabilities.append(sampler.probabilities(slot_logits))
            previous = sampler.draw(probabilities[-1]) if probabilities else int(slot_logits.argmax())
            tokens.append(previous)
        drafted = torch.tensor(tokens, dtype=torch.int64, device=hidden.device)
        return Proposal(drafted, torch.stack(probabilities) if probabilities else None)

    def _is_doubtful(self, hidden: Tensor, embedding: Tensor | None) -> bool:
        if self._threshold <= 0 or self._confident is None:
            return False
        logit = self._confident.confidence(hidden, embedding)
        assert logit is not None
        return float(logit.float().sigmoid()) < self._threshold


def _propose_all(logits: Tensor, sampler: Sampler) -> Proposal:
    if sampler.greedy:
        return Proposal(logits.argmax(dim=-1))
    probabilities = sampler.probabilities(logits)
    drawn = torch.multinomial(probabilities, 1, generator=sampler.generator).squeeze(1)
    return Proposal(drawn, probabilities)
