"""The decoding loop: greedy output is the target's own whatever the draft, caches change nothing, sampling is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from tests.unit.draft.tiny import ARCHITECTURES, TARGET_CONFIGS, VOCAB, tiny_dflash, tiny_dspark, tiny_target
from xtok.draft.decoding import (
    DecodingResult,
    Proposal,
    Sampler,
    plain_decode,
    speculative_decode,
    tau,
    verify_greedy,
    verify_sampled,
)
from xtok.draft.drafter import ModelDrafter
from xtok.draft.target import FrozenTarget
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step, run_blocks
from xtok.errors import ConfigError

PROMPT = [5, 9, 33, 14, 7]
NEW = 23


class Oracle:
    """Drafts the target's own continuation, or a continuation that is wrong everywhere."""

    layer_ids = (1,)

    def __init__(self, target: FrozenTarget, num_drafts: int, *, shift: int = 0) -> None:
        self._sequence = [*PROMPT, *plain_decode(target, PROMPT, max_new_tokens=NEW + 10)]
        self._num_drafts, self._shift, self.num_observed = num_drafts, shift, 0

    def reset(self) -> None:
        self.num_observed = 0

    def observe(self, features: Tensor) -> None:
        self.num_observed += features.shape[1]

    def propose(self, anchor_token: int, anchor_position: int, sampler: Sampler) -> Proposal:
        assert self.num_observed == anchor_position
        assert anchor_token == self._sequence[anchor_position]
        right = self._sequence[anchor_position + 1 : anchor_position + 1 + self._num_drafts]
        return Proposal((torch.tensor(right) + self._shift) % VOCAB)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_random_drafts_leave_greedy_output_alone(architecture: str, kind: str, use_cache: bool) -> None:
    target = tiny_target(architecture)
    model = tiny_dflash(architecture) if kind == "dflash" else tiny_dspark(architecture)
    drafter = ModelDrafter(model, target, use_cache=use_cache)
    got = speculative_decode(target, drafter, PROMPT, max_new_tokens=NEW, use_cache=use_cache)
    assert got.tokens == plain_decode(target, PROMPT, max_new_tokens=NEW)
    assert set(got.num_drafted) == {3}
    ids = torch.tensor([PROMPT + got.tokens])
    assert got.tokens == target.model(ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_perfect_and_wrong_drafts(use_cache: bool) -> None:
    target = tiny_target("llama")
    plain = plain_decode(target, PROMPT, max_new_tokens=NEW)
    perfect = speculative_decode(target, Oracle(target, 4), PROMPT, max_new_tokens=NEW, use_cache=use_cache)
    wrong = speculative_decode(target, Oracle(target, 4, shift=1), PROMPT, max_new_tokens=NEW, use_cache=use_cache)
    assert perfect.tokens == wrong.tokens == plain
    assert set(perfect.round_lengths) == {5}
    assert set(wrong.round_lengths) == {1}
    assert tau([perfect]) == 5
    assert tau([perfect, wrong]) == (5 * len(perfect.round_lengths) + len(wrong.round_lengths)) / (
        len(perfect.round_lengths) + len(wrong.round_lengths)
    )


@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 8])
def test_stop_inside_a_block(place: int) -> None:
    target = tiny_target("llama")
    plain = plain_decode(target, PROMPT, max_new_tokens=NEW)
    stop = plain[place]
    first = plain.index(stop)
    got = speculative_decode(target, Oracle(target, 4), PROMPT, max_new_tokens=NEW, stop_ids={stop})
    assert got.tokens == plain[: first + 1] == plain_decode(target, PROMPT, max_new_tokens=NEW, stop_ids={stop})


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
def test_length_limit_inside_a_block(limit: int) -> None:
    target = tiny_target("llama")
    got = speculative_decode(target, Oracle(target, 4), PROMPT, max_new_tokens=limit)
    assert got.tokens == plain_decode(target, PROMPT, max_new_tokens=limit)
    assert len(got.tokens) == limit


@pytest.mark.parametrize("build", [tiny_dflash, tiny_dspark])
def test_append_only_context_cache_equals_recomputation(build: Any) -> None:
    target, model = tiny_target("qwen3"), build("qwen3")
    cached, fresh = ModelDrafter(model, target), ModelDrafter(model, target, use_cache=False)
    ids = torch.randint(3, 60, (1, 30), generator=torch.Generator().manual_seed(2))
    features = target.features(ids, model.config.target_layer_ids).context
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 25)):
        for drafter in (cached, fresh):
            drafter.observe(features[:, start:stop])
        anchor = int(ids[0, stop])
        torch.testing.assert_close(cached._run_body(anchor, stop), fresh._run_body(anchor, stop), rtol=1e-4, atol=1e-5)
    for drafter in (cached, fresh):
        drafter.reset()
        drafter.observe(features[:, :3])
    assert torch.equal(cached.propose(4, 3, Sampler()).tokens, fresh.propose(4, 3, Sampler()).tokens)


def test_draft_equals_the_training_forward() -> None:
    """What the loop drafts at an anchor is what training scores there: one more guard against labels off by one."""
    from tests.unit.draft.test_models import place_blocks

    target = tiny_target("llama")
    ids = torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(2))
    batch = DraftBatch(ids, torch.ones(1, 16), torch.tensor([0]))
    for model in (tiny_dflash(), tiny_dspark()):
        features = target.features(ids, model.config.target_layer_ids)
        hidden = run_blocks(model, target, batch, place_blocks(model, batch, [[9]]), features).hidden[0, 0]
        drafter = ModelDrafter(model, target)
        drafter.observe(features.context[:, :9])
        drafted = drafter._run_body(int(ids[0, 9]), 9)
        torch.testing.assert_close(drafted, hidden[model.config.first_supervised_slot :], rtol=1e-4, atol=1e-5)


def test_confidence_threshold_cuts_before_the_first_doubtful_slot() -> None:
    target, model = tiny_target("llama"), tiny_dspark(block_size=5)
    with torch.no_grad():
        model.confidence_head.proj.weight.zero_()
    plain = plain_decode(target, PROMPT, max_new_tokens=NEW)
    for bias, threshold, drafted in ((2.0, 0.5, 5), (-2.0, 0.5, 0), (-2.0, 0.0, 5)):
        torch.nn.init.constant_(model.confidence_head.proj.bias, bias)
        drafter = ModelDrafter(model, target, confidence_threshold=threshold)
        got = speculative_decode(target, drafter, PROMPT, max_new_tokens=NEW)
        assert set(got.num_drafted) == {drafted}
        assert got.tokens == plain
    with pytest.raises(ValueError, match="needs a draft with a confidence head"):
        ModelDrafter(tiny_dflash(), target, confidence_threshold=0.5)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_drafted_tokens_are_those_that_training_scores_highest(head: str) -> None:
    """Slot by slot the loop feeds on what it drafted: teacher-forced with the same tokens, each is the argmax of its slot."""
    target, model = tiny_target("llama"), tiny_dspark(markov_head_type=head, block_size=5, init_std=0.5)
    torch.nn.init.normal_(model.markov_head.markov_w2.weight, std=8.0, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(2))
    drafter = ModelDrafter(model, target)
    drafter.observe(target.features(ids[:, :8], model.config.target_layer_ids).context)
    drafted = drafter.propose(int(ids[0, 8]), 8, Sampler()).tokens
    row = torch.cat([ids, drafted[None]], dim=1)
    batch = DraftBatch(row, (torch.arange(14) == 9).float()[None], torch.tensor([0]))  # one anchor: position 8
    logits = draft_step(model, target, batch, DraftStepSettings(1, materialize_logits=True)).output.draft_logits
    assert drafted.tolist() == logits[0, 0].argmax(-1).tolist() == drafter.propose(int(ids[0, 8]), 8, Sampler()).tokens.tolist()
    assert len(set(drafted.tolist())) > 1
    plain = target.logits(drafter._run_body(int(ids[0, 8]), 8)).argmax(-1)
    assert not torch.equal(drafted, plain)  # the bias matters here


def test_a_hopeless_confidence_is_a_number_too() -> None:
    target, model = tiny_target("llama"), tiny_dspark()
    torch.nn.init.constant_(model.confidence_head.proj.bias, -1e4)
    got = speculative_decode(target, ModelDrafter(model, target, confidence_threshold=0.5), PROMPT, max_new_tokens=4)
    assert set(got.num_drafted) == {0}


def test_a_target_with_a_recurrent_state_is_recomputed() -> None:
    """Its cache cannot give tokens back; output stays that of the model over the whole sequence."""
    config = Qwen3NextConfig(
        **{**TARGET_CONFIGS["llama"].to_dict(), "model_type": "qwen3_next", "architectures": None, "head_dim": 8},
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = FrozenTarget(AutoModelForCausalLM.from_config(config).eval())
    assert not target.keeps_every_position
    tokens = plain_decode(target, PROMPT, max_new_tokens=8)
    assert tokens == target.model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert speculative_decode(target, ModelDrafter(tiny_dflash(), target), PROMPT, max_new_tokens=8).tokens == tokens


def test_verify_greedy_counts_the_matching_prefix() -> None:
    logits = torch.eye(5)[[1, 2, 3, 4]]
    assert verify_greedy(torch.tensor([1, 2, 3]), logits) == (3, 4)
    assert verify_greedy(torch.tensor([1, 0, 3]), logits) == (1, 2)
    assert verify_greedy(torch.tensor([], dtype=torch.int64), logits[:1]) == (0, 1)


@pytest.mark.parametrize("certain", [False, True])
def test_sampled_tokens_follow_the_target(certain: bool) -> None:
    """The first two emitted tokens of a round are distributed as the target's, by chi-squared over many rounds."""
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(temperature=1.0, generator=generator)
    target = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]])
    draft = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])
    rounds, first, second, lengths = 6000, torch.zeros(4), torch.zeros(4), 0.0
    for _ in range(rounds):
        drawn = torch.tensor([1, 2]) if certain else torch.multinomial(draft, 1, generator=generator)[:, 0]
        accepted, bonus = verify_sampled(Proposal(drawn, None if certain else draft), target, sampler)
        emitted = [*drawn[:accepted].tolist(), bonus]
        lengths += accepted >= 1
        first[emitted[0]] += 1
        if len(emitted) > 1:
            second[emitted[1]] += 1
    for counts, expected in ((first, target[0]), (second, target[1])):
        wanted = expected * counts.sum()
        assert ((counts - wanted) ** 2 / wanted).sum() < 16.3  # 3 degrees of freedom, 0.1 % quantile
    overlap = 0.3 if certain else float(torch.minimum(target[0], draft[0]).sum())
    assert lengths / rounds == pytest.approx(overlap, abs=0.03)


def test_sampling_loop_follows_the_target() -> None:
    target = tiny_target("llama")
    drafter = ModelDrafter(tiny_dspark(), target)
    probabilities = (target.model(torch.tensor([PROMPT])).logits[0, -1] / 0.7).softmax(-1)
    sampler = Sampler(temperature=0.7, generator=torch.Generator().manual_seed(4))
    counts = torch.zeros(VOCAB)
    for _ in range(300):
        counts[speculative_decode(target, drafter, PROMPT, max_new_tokens=2, sampler=sampler).tokens[0]] += 1
    likely = probabilities > 0.02
    torch.testing.assert_close(counts[likely] / 300, probabilities[likely], atol=0.09, rtol=0)


def test_mistakes_are_named() -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="need a prompt"):
        speculative_decode(target, Oracle(target, 2), [], max_new_tokens=3)
    with pytest.raises(ValueError, match="need a prompt"):
        plain_decode(target, [3], max_new_tokens=0)
    for ids in ([3, VOCAB], [-1, 3]):
        with pytest.raises(ValueError, match="beyond the target's 61 embedding rows"):
            speculative_decode(target, Oracle(target, 2), ids, max_new_tokens=3)
    for temperature in (-1.0, 1e-40, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="temperature must be 0"):
            Sampler(temperature=temperature)
    for threshold in (1.5, float("nan")):
        with pytest.raises(ConfigError, match="confidence_threshold must be at most 1"):
            ModelDrafter(tiny_dspark(), target, confidence_threshold=threshold)
    with pytest.raises(ValueError, match="hidden_size 16"):
        ModelDrafter(tiny_dflash(hidden_size=16), target)
    assert tau([DecodingResult()]) != tau([DecodingResult()])
