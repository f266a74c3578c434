"""Speculative decoding in its simplest correct form, greedy or sampling, one sequence at a time: for evaluation.

Invariant of the loop: tokens y[0..n] are known, the target has processed y[0..n-1], and y[n] is the anchor. A round drafts m tokens
after the anchor, runs the target once over anchor and drafts, keeps the longest accepted prefix and adds one token of the target's
own; greedy output is the target's own greedy output, token for token (in fp32; lower precision may round a tie differently).

Caches: the target's keys and values are cropped to the accepted prefix; the draft's context keys and values only grow.

Shapes: m drafted tokens, n new context rows, H hidden size, V vocabulary size, T tapped layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError

__all__ = [
    "DecodingResult",
    "Drafter",
    "Proposal",
    "Sampler",
    "plain_decode",
    "speculative_decode",
    "tau",
    "verify_greedy",
    "verify_sampled",
]

_LEAST_TEMPERATURE = 1e-6
"""Below it, logits over temperature leave fp32: that is greedy, and is asked for as 0."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, and the distributions they were drawn from when sampling."""

    tokens: Tensor  # int64 [m]
    probabilities: Tensor | None = None  # [m, V]; None: the tokens were certain (one-hot)


class Drafter(Protocol):
    """Anything that drafts tokens after an anchor."""

    @property
    def layer_ids(self) -> Sequence[int]:
        """Target layers whose features `observe` gets."""

    def reset(self) -> None:
        """Forget the sequence."""

    def observe(self, features: Tensor) -> None:
        """Features [1, n, T * H] of the next n positions that the target has processed for good."""

    def propose(self, anchor_token: int, anchor_position: int, sampler: Sampler) -> Proposal:
        """Draft tokens for the positions after the anchor; `observe` has seen exactly the positions before it."""


@dataclass(slots=True)
class Sampler:
    """How tokens are chosen: argmax at temperature 0, else a draw from the tempered softmax."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not _LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature must be 0 (greedy), or at least {_LEAST_TEMPERATURE} and finite, got {self.temperature}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax of [..., V] at this temperature."""
        return (logits.float() / self.temperature).softmax(dim=-1)

    def draw(self, probabilities: Tensor) -> int:
        """One token from [V]."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def uniform(self) -> float:
        """One number from [0, 1)."""
        return float(torch.rand((), generator=self.generator, device=None if self.generator is None else self.generator.device))

    def choose(self, logits: Tensor) -> int:
        """One token for [V] logits."""
        return int(logits.argmax()) if self.greedy else self.draw(self.probabilities(logits))


@dataclass(slots=True)
class DecodingResult:
    """What one prompt gave."""

    tokens: list[int] = field(default_factory=list)
    """Generated tokens, the prompt left out, cut after a stop token or at the limit."""
    round_lengths: list[int] = field(default_factory=list)
    """Per round, accepted drafts plus the target's own token, before any cut."""
    num_drafted: list[int] = field(default_factory=list)
    """Per round, drafts proposed."""


def tau(results: Sequence[DecodingResult]) -> float:
    """Mean accepted length of a round over all rounds of all prompts, the target's own token counted; NaN without rounds."""
    rounds = [length for result in results for length in result.round_lengths]
    return sum(rounds) / len(rounds) if rounds else float("nan")


def verify_greedy(drafted: Tensor, target_logits: Tensor) -> tuple[int, int]:
    """(accepted drafts, the target's next token) for drafts [m] and logits [m + 1, V]."""
    choices = target_logits.argmax(dim=-1)
    accepted = int((drafted == choices[:-1]).to(torch.int64).cumprod(dim=0).sum())
    return accepted, int(choices[accepted])


def verify_sampled(proposal: Proposal, target_probabilities: Tensor, sampler: Sampler) -> tuple[int, int]:
    """Rejection sampling: the emitted tokens follow the target's distribution exactly, whatever the draft proposes.

    Draft d_i is accepted with min(1, p_t(d_i) / p_d(d_i)); the first rejected place draws from the normalised max(p_t - p_d, 0),
    and with all accepted the token after them from p_t.

    Args:
        proposal: m tokens and their distributions.
        target_probabilities: [m + 1, V].

    Returns:
        (accepted drafts, next token).
    """
    for i, token in enumerate(proposal.tokens.tolist()):
        target = target_probabilities[i]
        if proposal.probabilities is None:
            draft = torch.zeros_like(target)
            draft[token] = 1.0
        else:
            draft = proposal.probabilities[i]
        if sampler.uniform() * float(draft[token]) >= float(target[token]):
            residual = (target - draft).clamp_(min=0.0)
            # Equal distributions leave a residual of rounding errors at most: then any draw from the target is right.
            return i, sampler.draw(residual if float(residual.sum()) > 0.0 else target)
    return len(proposal.tokens), sampler.draw(target_probabilities[-1])


@torch.no_grad()
def speculative_decode(
    target: FrozenTarget,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampler: Sampler | None = None,
    use_cache: bool = True,
) -> DecodingResult:
    """Generate from one prompt, drafting ahead.

    Args:
        prompt: token ids of the target, at least one.
        max_new_tokens: limit on generated tokens, at least 1.
        stop_ids: generation ends after the first of these (it is kept).
        sampler: default greedy.
        use_cache: False recomputes the target from the start in every round: slow, for checks, and what is done anyway for a
            target with a recurrent state.

    Raises:
        ValueError: empty prompt, ids that the target does not have, or no token to generate.
    """
    sampler = sampler or Sampler()
    known, start, result = _checked(target, prompt, max_new_tokens), len(prompt), DecodingResult()
    drafter.reset()
    stream = _TargetStream(target, drafter.layer_ids, use_cache)
    logits, features = stream.advance(known)
    drafter.observe(features)
    known.append(sampler.choose(logits[-1]))
    while not _finished(known, start, max_new_tokens, stop_ids):
        anchor = len(known) - 1
        proposal = drafter.propose(known[anchor], anchor, sampler)
        logits, features = stream.advance([known[anchor], *proposal.tokens.tolist()])
        if sampler.greedy:
            accepted, bonus = verify_greedy(proposal.tokens, logits)
        else:
            accepted, bonus = verify_sampled(proposal, sampler.probabilities(logits), sampler)
        known += [*proposal.tokens[:accepted].tolist(), bonus]
        stream.keep(len(known) - 1)
        drafter.observe(features[:, : accepted + 1])
        result.round_lengths.append(accepted + 1)
        result.num_drafted.append(len(proposal.tokens))
    result.tokens = _cut(known[start:], max_new_tokens, stop_ids)
    return result


@torch.no_grad()
def plain_decode(
    target: FrozenTarget,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampler: Sampler | None = None,
) -> list[int]:
    """The same without a draft, one token a target forward: what `speculative_decode` must equal when greedy."""
    sampler = sampler or Sampler()
    known, start = _checked(target, prompt, max_new_tokens), len(prompt)
    stream = _TargetStream(target, (), use_cache=True)
    fresh = known[:]
    while not _finished(known, start, max_new_tokens, stop_ids):
        logits, _ = stream.advance(fresh)
        fresh = [sampler.choose(logits[-1])]
        known += fresh
    return _cut(known[start:], max_new_tokens, stop_ids)


class _TargetStream:
    """The target over a growing sequence whose end may be taken back."""

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], use_cache: bool) -> None:
        self._target, self._layer_ids = target, layer_ids
        self._processed: list[int] = []
        self._cache: Any = None
        if use_cache and target.keeps_every_position:
            from transformers import DynamicCache

            # Without a configuration every layer keeps all rows, so that a window's rows can be taken back too.
            self._cache = DynamicCache()

    def advance(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and features [1, n, T * H] of n more tokens."""
        self._processed += tokens
        fresh = list(tokens) if self._cache is not None else self._processed
        ids = torch.tensor([fresh], dtype=torch.int64, device=self._target.device)
        logits, features = self._target.step(ids, self._layer_ids, self._cache)
        return logits[-len(tokens) :], features[:, features.shape[1] - len(tokens) :]

    def keep(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens."""
        surplus = len(self._processed) - num_tokens
        if surplus > 0:
            del self._processed[num_tokens:]
            if self._cache is not None:
                self._cache.crop(-surplus)


def _checked(target: FrozenTarget, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    if not len(prompt) or max_new_tokens < 1:
        raise ValueError(f"need a prompt and max_new_tokens >= 1, got {len(prompt)} prompt tokens and {max_new_tokens}")
    known = [int(token) for token in prompt]
    target.check_tokens(torch.tensor(known))
    return known


def _finished(known: Sequence[int], start: int, max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    return len(known) - start >= max_new_tokens or any(token in stop_ids for token in known[start:])


def _cut(tokens: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> list[int]:
    for i, token in enumerate(tokens[:max_new_tokens]):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens[:max_new_tokens]
