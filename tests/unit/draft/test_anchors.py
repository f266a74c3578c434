"""Anchors and masks against brute-force loops, and the distribution of the draw."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtok.draft import common
from xtok.draft.anchors import document_counts, sample_generators
from xtok.draft.common import build_anchor_candidate_mask, build_eval_mask, context_doc_ids, sample_anchor_positions

CPU = torch.device("cpu")


def test_public_names_are_sorted_and_present() -> None:
    assert common.__all__ == sorted(common.__all__)
    assert all(hasattr(common, name) for name in common.__all__)


def _documents(data: st.DataObject, num_rows: int, seq_len: int) -> torch.Tensor:
    """Random [B, D] document lengths that fit rows of `seq_len`, zero-length documents included."""
    rows = []
    for _ in range(num_rows):
        left, lengths = seq_len, []
        for _ in range(3):
            lengths.append(data.draw(st.integers(0, left)))
            left -= lengths[-1]
        rows.append(lengths)
    return torch.tensor(rows)


def _remaining_by_loop(seq_lens: torch.Tensor, seq_len: int) -> list[list[int]]:
    rows = []
    for lengths in seq_lens.tolist():
        row: list[int] = []
        for length in lengths:
            row += [length - 1 - i for i in range(length)]
        rows.append(row + [0] * (seq_len - len(row)))
    return rows


def _random_case(data: st.DataObject) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    num_rows, seq_len = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 14))
    values = data.draw(st.lists(st.sampled_from([0.0, 0.4, 0.6, 1.0]), min_size=num_rows * seq_len, max_size=num_rows * seq_len))
    loss_mask = torch.tensor(values).view(num_rows, seq_len)
    if not data.draw(st.booleans()):
        return loss_mask, None, seq_len
    seq_lens = _documents(data, num_rows, seq_len)
    remaining = document_counts(seq_lens=seq_lens, seq_len=seq_len)[1]
    assert remaining.tolist() == _remaining_by_loop(seq_lens, seq_len)
    return loss_mask, remaining, seq_len


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_candidate_mask_matches_loops(data: st.DataObject) -> None:
    loss_mask, remaining, seq_len = _random_case(data)
    got = build_anchor_candidate_mask(seq_len=seq_len, loss_mask=loss_mask, doc_remaining=remaining)
    assert got.shape == (len(loss_mask), max(seq_len - 1, 0))
    assert got.dtype == torch.bool
    for b in range(len(loss_mask)):
        for p in range(seq_len - 1):
            legal = loss_mask[b, p + 1].item() > 0.5 and (remaining is None or remaining[b, p].item() >= 1)
            assert got[b, p].item() == legal


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_drawn_anchors_are_legal_sorted_and_complete(data: st.DataObject) -> None:
    loss_mask, remaining, seq_len = _random_case(data)
    num_anchors = data.draw(st.integers(0, 6))
    candidates = build_anchor_candidate_mask(seq_len=seq_len, loss_mask=loss_mask, doc_remaining=remaining)
    kwargs = {"seq_len": seq_len, "loss_mask": loss_mask, "num_anchors": num_anchors, "device": CPU, "doc_remaining": remaining}
    anchors, keep = sample_anchor_positions(**kwargs, generator=torch.Generator().manual_seed(7))
    again, keep_again = sample_anchor_positions(**kwargs, generator=torch.Generator().manual_seed(7))
    assert torch.equal(anchors, again)
    assert torch.equal(keep, keep_again)
    assert anchors.dtype == torch.int64
    assert anchors.shape == keep.shape == (len(loss_mask), num_anchors)
    for b in range(len(loss_mask)):
        count = min(int(candidates[b].sum()), num_anchors)
        assert keep[b].tolist() == [True] * count + [False] * (num_anchors - count)
        chosen = anchors[b, :count].tolist()
        assert chosen == sorted(set(chosen))
        assert all(candidates[b, p] for p in chosen)
        assert anchors[b, count:].eq(0).all()


def test_draw_is_uniform() -> None:
    candidates = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    draws, num_anchors, num_candidates = 4000, 3, 8
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(11)
    for _ in range(draws):
        anchors, _ = sample_anchor_positions(
            seq_len=11, loss_mask=candidates, num_anchors=num_anchors, device=CPU, generator=generator
        )
        counts[anchors[0]] += 1
    expected = draws * num_anchors / num_candidates
    observed = counts[:-1][candidates[0, 1:] > 0.5]
    assert counts.sum() == observed.sum()
    # Drawing without replacement shrinks the variance by (1 - A/C); 7 degrees of freedom, 0.1 % quantile 24.3.
    statistic = ((observed - expected) ** 2 / (expected * (1 - num_anchors / num_candidates))).sum() * 7 / 8
    assert statistic < 24.3


def test_draw_of_a_sample_depends_on_seed_epoch_and_index_only() -> None:
    loss_mask = torch.ones(3, 40)
    kwargs = {"num_anchors": 5, "device": CPU}
    alone, _ = sample_anchor_positions(
        seq_len=40, loss_mask=loss_mask[:1], generator=sample_generators(seed=1, epoch=2, idx=[9]), **kwargs
    )
    batch, _ = sample_anchor_positions(
        seq_len=40, loss_mask=loss_mask, generator=sample_generators(seed=1, epoch=2, idx=torch.tensor([4, 9, 5])), **kwargs
    )
    padded = torch.nn.functional.pad(loss_mask[:1], (0, 17))
    wider, _ = sample_anchor_positions(
        seq_len=57, loss_mask=padded, generator=sample_generators(seed=1, epoch=2, idx=[9]), **kwargs
    )
    other, _ = sample_anchor_positions(
        seq_len=40, loss_mask=loss_mask[:1], generator=sample_generators(seed=1, epoch=3, idx=[9]), **kwargs
    )
    assert torch.equal(alone[0], batch[1])
    assert torch.equal(alone, wider)
    assert not torch.equal(alone, other)
    with pytest.raises(ValueError, match="1 generators for 3 rows"):
        sample_anchor_positions(seq_len=40, loss_mask=loss_mask, generator=sample_generators(seed=1, epoch=2, idx=[9]), **kwargs)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_eval_mask_matches_loops(data: st.DataObject) -> None:
    loss_mask, remaining, seq_len = _random_case(data)
    num_rows = len(loss_mask)
    num_anchors, block_size, first = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2))
    integers = st.integers(0, seq_len - 1)
    anchors = torch.tensor([[data.draw(integers) for _ in range(num_anchors)] for _ in range(num_rows)])
    keep = torch.tensor([[data.draw(st.booleans()) for _ in range(num_anchors)] for _ in range(num_rows)])
    labels = anchors.unsqueeze(-1) + torch.arange(block_size) + data.draw(st.integers(-2, 2))
    got = build_eval_mask(
        seq_len=seq_len,
        loss_mask=loss_mask,
        label_indices=labels,
        safe_label_indices=labels.clamp(0, seq_len - 1),
        block_keep_mask=keep,
        doc_remaining=remaining,
        anchor_positions=anchors,
        supervised_from_slot=first,
    )
    for b in range(num_rows):
        for a in range(num_anchors):
            alive = bool(keep[b, a])
            for k in range(block_size):
                if k >= first:
                    label, anchor = int(labels[b, a, k]), int(anchors[b, a])
                    alive = alive and 0 <= label < seq_len and loss_mask[b, label].item() > 0.5
                    alive = alive and (remaining is None or label - anchor <= int(remaining[b, anchor]))
                assert got[b, a, k].item() == (alive and k >= first)


def test_negative_labels_are_never_wrapped() -> None:
    labels = torch.tensor([[[-1, 0]]])
    got = build_eval_mask(
        seq_len=3, loss_mask=torch.ones(1, 3), label_indices=labels, safe_label_indices=labels, block_keep_mask=torch.ones(1, 1)
    )
    assert not got.any()


def test_context_doc_ids() -> None:
    got = context_doc_ids(seq_lens=torch.tensor([[2, 0, 3], [0, 0, 0], [6, 0, 0]]), seq_len=6)
    assert got.tolist() == [[0, 0, 2, 2, 2, 3], [3] * 6, [0] * 6]
    positions, remaining = document_counts(seq_lens=torch.tensor([[2, 0, 3]]), seq_len=6)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert remaining.tolist() == [[1, 0, 2, 1, 0, 0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_anchor_candidate_mask(seq_len=4, loss_mask=torch.ones(2, 5)), r"loss_mask must be \[B, 4\]"),
        (
            lambda: sample_anchor_positions(seq_len=5, loss_mask=torch.ones(2, 5), num_anchors=-1, device=CPU),
            "num_anchors must not be negative, got -1",
        ),
        (lambda: document_counts(seq_lens=torch.tensor([[4, 3]]), seq_len=6), "7 tokens do not fit a row of 6"),
        (lambda: context_doc_ids(seq_lens=torch.tensor([4, 3]), seq_len=9), "seq_lens must be"),
        (
            lambda: build_eval_mask(
                seq_len=4,
                loss_mask=torch.ones(1, 4),
                label_indices=torch.ones(1, 1, 2, dtype=torch.int64),
                safe_label_indices=torch.ones(1, 1, 2, dtype=torch.int64),
                block_keep_mask=torch.ones(1, 1, dtype=torch.bool),
                doc_remaining=torch.ones(1, 4),
            ),
            "doc_remaining needs anchor_positions",
        ),
    ],
)
def test_mistakes_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
