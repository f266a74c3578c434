"""What a trained draft is worth: speculative decoding of prompts with a target, and the figures to judge it by.

`speculate` is the body of `xtok speculate TARGET DRAFT --prompts FILE`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError

from xtok.draft.baselines import UnigramDrafter, most_frequent_token, untrained
from xtok.draft.decoding import DecodingResult, Drafter, Sampler, plain_decode, speculative_decode, tau
from xtok.draft.drafter import ModelDrafter
from xtok.draft.export import load_draft
from xtok.draft.prompts import read_prompts
from xtok.draft.target import FrozenTarget
from xtok.errors import ConfigError
from xtok.tokenizers import load_tokenizer

__all__ = ["SpeculationReport", "evaluate_drafter", "load_target", "speculate", "stop_token_ids"]


@dataclass(slots=True)
class SpeculationReport:
    """Results of all prompts, in order."""

    results: list[DecodingResult] = field(default_factory=list)
    num_equal: int | None = None
    """Prompts whose output equals plain greedy decoding; None when not checked (sampling)."""
    seconds: float = 0.0
    plain_seconds: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    """tau of what the draft has to beat, by name; empty when not asked for."""

    @property
    def tau(self) -> float:
        """Mean accepted length of a round, the target's own token counted, pooled over prompts."""
        return tau(self.results)

    @property
    def length_counts(self) -> dict[int, int]:
        """Rounds by accepted length."""
        return dict(sorted(Counter(length for result in self.results for length in result.round_lengths).items()))

    @property
    def agrees(self) -> bool:
        """False when a checked greedy output differs from plain decoding."""
        return self.num_equal is None or self.num_equal == len(self.results)

    def text(self) -> str:
        """The report as printed: accepted length by round, tau, and the check against plain greedy decoding."""
        lines = [f"prompt {i}: {' '.join(map(str, result.round_lengths)) or '-'}" for i, result in enumerate(self.results)]
        counts = self.length_counts
        total = sum(counts.values())
        lines += [f"accepted length {length}: {count} rounds ({count / total:.1%})" for length, count in counts.items()]
        tokens = sum(len(result.tokens) for result in self.results)
        lines.append(f"tau {self.tau:.3f} over {total} rounds, {tokens} tokens in {self.seconds:.1f} s")
        lines += [f"tau {value:.3f} with {name}" for name, value in self.baselines.items()]
        if self.num_equal is not None:
            verdict = "equals" if self.agrees else "DIFFERS FROM"
            lines.append(
                f"greedy output {verdict} plain greedy decoding: {self.num_equal} of {len(self.results)} prompts, "
                f"plain took {self.plain_seconds or 0.0:.1f} s"
            )
        return "\n".join(lines)


def evaluate_drafter(
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampler: Sampler | None = None,
    check: bool = True,
    progress: Callable[[int, DecodingResult], None] | None = None,
) -> SpeculationReport:
    """Decode every prompt with a drafter; greedy outputs are compared with plain decoding if `check`."""
    sampler = sampler or Sampler()
    report = SpeculationReport()
    check = check and sampler.greedy
    if check:
        report.num_equal, report.plain_seconds = 0, 0.0
    for number, prompt in enumerate(prompts):
        began = time.perf_counter()
        result = speculative_decode(target, drafter, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids, sampler=sampler)
        report.seconds += time.perf_counter() - began
        report.results.append(result)
        if report.num_equal is not None and report.plain_seconds is not None:
            began = time.perf_counter()
            plain = plain_decode(target, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            report.plain_seconds += time.perf_counter() - began
            report.num_equal += plain == result.tokens
        if progress is not None:
            progress(number, result)
    return report


def speculate(
    target: str,
    draft: str,
    prompts: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    confidence_threshold: float = 0.0,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    check: bool = True,
    baselines: bool = False,
    progress: Callable[[int, DecodingResult], None] | None = None,
) -> SpeculationReport:
    """Load target, draft and prompts, and decode.

    Args:
        target: folder or hub id of the target, with its tokenizer.
        draft: folder or URL of an exported draft.
        prompts: file as in `xtok.draft.prompts`.
        max_new_tokens: limit on each answer, at least 1.
        temperature: 0 is greedy.
        seed: of sampling.
        confidence_threshold: DSpark: draft up to the first slot below it.
        limit: first prompts only.
        max_prompt_tokens: keep the last tokens of longer prompts.
        dtype: of target and draft; only in fp32 is greedy output guaranteed to equal plain decoding (ties may round apart).
        check: compare greedy output with plain greedy decoding.
        baselines: decode as well with the draft before training, and with a guess of the answers' most frequent token.
        progress: called after each prompt with its number and result.

    Raises:
        ConfigError, TokenizerError, StorageError: a setting out of range, what cannot be loaded, or a draft that does not fit the
            target.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be within 0..2^63 - 1, got {seed}")
    sampler = Sampler(temperature)
    # What is wrong is said in the order of its cost: settings, prompts, draft, and only then a target of many gigabytes.
    tokenizer = load_tokenizer(target).transformers_tokenizer
    ids = read_prompts(prompts, tokenizer, limit=limit, max_tokens=max_prompt_tokens)
    model = load_draft(draft, dtype=dtype).eval()
    frozen = FrozenTarget(load_target(target, dtype=dtype))
    frozen.check_head()
    for prompt in ids:
        frozen.check_tokens(torch.tensor(prompt))
    drafter = ModelDrafter(model.to(frozen.device), frozen, confidence_threshold=confidence_threshold)
    sampler.generator = torch.Generator(device=frozen.device).manual_seed(seed)

    def evaluate(drafter: Drafter, **settings: Any) -> SpeculationReport:
        stops = stop_token_ids(frozen.model)
        return evaluate_drafter(frozen, drafter, ids, max_new_tokens=max_new_tokens, stop_ids=stops, sampler=sampler, **settings)

    report = evaluate(drafter, check=check, progress=progress)
    if baselines:
        token = most_frequent_token(result.tokens for result in report.results)
        guess = UnigramDrafter(token, model.config.num_draft_slots, frozen.device)
        report.baselines = {
            "an untrained draft": evaluate(ModelDrafter(untrained(model), frozen), check=False).tau,
            f"the most frequent token, {tokenizer.decode([token])!r}, as the draft": evaluate(guess, check=False).tau,
        }
    return report


def load_target(target: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model in evaluation mode, on the accelerator if there is one.

    Raises:
        ConfigError: it cannot be loaded, or the files lack some of its weights (they would be random).
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the target {target}: {error}") from error
    model, found = loaded
    if found["missing_keys"]:
        raise ConfigError(f"the target {target} lacks weights of {type(model).__name__}: {sorted(found['missing_keys'])[:5]}")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def stop_token_ids(model: Any) -> set[int]:
    """Ids that end the target's generation: its generation configuration's end of text, or its configuration's."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return set(eos) if isinstance(eos, list | tuple) else {int(eos)}
    return set()
