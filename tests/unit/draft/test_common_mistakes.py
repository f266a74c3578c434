"""Mistakes in the arguments of the anchored-block functions: typed, by name, with the offending value; never a broadcast or a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from xtok.draft.anchors import document_counts, sample_generators
from xtok.draft.blocks import block_token_ids
from xtok.draft.common import (
    build_anchor_candidate_mask,
    build_eval_mask,
    context_doc_ids,
    create_noise_embed,
    create_position_ids,
    extract_context_feature,
    sample_anchor_positions,
    validate_target_layer_ids,
)

NAN, INF = float("nan"), float("inf")
B, S, A, K = 2, 5, 3, 4
ANCHORS = torch.tensor([[0, 1, 2], [3, 0, 4]])
LABELS = ANCHORS.unsqueeze(-1) + torch.arange(K)
META = torch.device("meta")


def _with(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


ARGUMENTS: dict[Callable[..., Any], dict[str, Any]] = {
    build_anchor_candidate_mask: {
        "seq_len": S,
        "loss_mask": torch.ones(B, S),
        "doc_remaining": torch.ones(B, S, dtype=torch.int64),
    },
    sample_anchor_positions: {"seq_len": S, "loss_mask": torch.ones(B, S), "num_anchors": A, "device": torch.device("cpu")},
    build_eval_mask: {
        "seq_len": S,
        "loss_mask": torch.ones(B, S),
        "label_indices": LABELS,
        "safe_label_indices": LABELS.clamp(max=S - 1),
        "block_keep_mask": torch.ones(B, A, dtype=torch.bool),
        "doc_remaining": torch.full((B, S), 3),
        "anchor_positions": ANCHORS,
    },
    context_doc_ids: {"seq_lens": torch.tensor([[2, 3], [1, 0]]), "seq_len": S},
    document_counts: {"seq_lens": torch.tensor([[2, 3], [1, 0]]), "seq_len": S},
    create_position_ids: {"anchor_positions": ANCHORS, "block_size": K, "doc_positions": torch.arange(S).expand(B, S)},
    create_noise_embed: {
        "input_ids": torch.arange(B * S).view(B, S),
        "anchor_positions": ANCHORS,
        "block_keep_mask": torch.ones(B, A, dtype=torch.bool),
        "mask_token_id": 19,
        "block_size": K,
        "embed_tokens": torch.nn.Embedding(20, 6),
    },
    extract_context_feature: {"hidden_states": tuple(torch.zeros(1, 2, 3) for _ in range(5)), "layer_ids": [-1, 2]},
    validate_target_layer_ids: {"target_layer_ids": [0, 2], "num_layers": 6},
    sample_generators: {"seed": 1, "epoch": 2, "idx": [0, 1]},
}
Mistake = tuple[Callable[..., Any], dict[str, Any], type[Exception], str]

MASKS: list[Mistake] = [
    *[
        (function, {"loss_mask": mask}, error, message)
        for function in (build_anchor_candidate_mask, sample_anchor_positions, build_eval_mask)
        for mask, error, message in [
            (_with(torch.ones(B, S), (1, 3), NAN), ValueError, r"loss_mask holds nan at \[1, 3\]"),
            (_with(torch.ones(B, S).bfloat16(), (0, 2), INF), ValueError, r"loss_mask holds inf at \[0, 2\]"),
            (torch.ones(B, S, dtype=torch.complex64), TypeError, r"loss_mask must be boolean or real, got torch\.complex64"),
            (torch.ones(B, S + 1), ValueError, r"loss_mask must be \[(B|2), 5\], got \(2, 6\)"),
            (None, TypeError, "loss_mask must be a tensor, got None"),
        ]
    ],
    *[
        (function, {"block_keep_mask": mask}, error, message)
        for function in (build_eval_mask, create_noise_embed)
        for mask, error, message in [
            (_with(torch.ones(B, A), (0, 1), NAN), ValueError, r"block_keep_mask holds nan at \[0, 1\]"),
            (torch.ones(B, A, dtype=torch.complex64), TypeError, "block_keep_mask must be boolean or real"),
            (torch.ones(1, A), ValueError, r"block_keep_mask must be \[2, 3\], got \(1, 3\)"),
            (torch.ones(B, A, device=META), ValueError, "block_keep_mask on meta"),
        ]
    ],
]
BATCHES: list[Mistake] = [
    (
        build_anchor_candidate_mask,
        {"doc_remaining": torch.ones(1, S)},
        ValueError,
        r"doc_remaining must be \[2, 5\], got \(1, 5\)",
    ),
    (build_anchor_candidate_mask, {"loss_mask": torch.ones(1, S)}, ValueError, r"doc_remaining must be \[1, 5\], got \(2, 5\)"),
    (
        build_anchor_candidate_mask,
        {"doc_remaining": torch.ones(3, S)},
        ValueError,
        r"doc_remaining must be \[2, 5\], got \(3, 5\)",
    ),
    (build_anchor_candidate_mask, {"doc_remaining": torch.ones(B, S, device=META)}, ValueError, "doc_remaining on meta"),
    (sample_anchor_positions, {"doc_remaining": torch.ones(1, S)}, ValueError, "doc_remaining must be"),
    (build_eval_mask, {"loss_mask": torch.ones(1, S)}, ValueError, r"loss_mask must be \[2, 5\], got \(1, 5\)"),
    (build_eval_mask, {"loss_mask": torch.ones(3, S)}, ValueError, r"loss_mask must be \[2, 5\], got \(3, 5\)"),
    (build_eval_mask, {"doc_remaining": torch.ones(3, S)}, ValueError, r"doc_remaining must be \[2, 5\], got \(3, 5\)"),
    (build_eval_mask, {"anchor_positions": ANCHORS[:1]}, ValueError, r"anchor_positions must be \[2, 3\], got \(1, 3\)"),
    (build_eval_mask, {"safe_label_indices": LABELS[:1]}, ValueError, r"safe_label_indices must be \[2, 3, 4\], got \(1, 3, 4\)"),
    (create_noise_embed, {"input_ids": torch.zeros(3, S).long()}, ValueError, r"input_ids must be \[2, S\], got \(3, 5\)"),
    (
        create_position_ids,
        {"doc_positions": torch.zeros(1, S).long()},
        ValueError,
        r"doc_positions must be \[2, S\], got \(1, 5\)",
    ),
]
POSITIONS: list[Mistake] = [
    *[
        (function, {"anchor_positions": _with(ANCHORS, (1, 2), wrong)}, IndexError, rf"{wrong} in row 1, block 2 .*\[0, 5\)")
        for function in (build_eval_mask, create_position_ids, create_noise_embed)
        for wrong in (S, -1, -(2**63), 2**63 - 1)
    ],
    *[
        (function, {name: ARGUMENTS[function][name].float()}, TypeError, rf"{name} must hold integers.*torch\.float32")
        for function, name in [
            (build_eval_mask, "label_indices"),
            (build_eval_mask, "safe_label_indices"),
            (build_eval_mask, "anchor_positions"),
            (create_position_ids, "anchor_positions"),
            (create_position_ids, "doc_positions"),
            (create_noise_embed, "anchor_positions"),
            (create_noise_embed, "input_ids"),
            (context_doc_ids, "seq_lens"),
            (document_counts, "seq_lens"),
        ]
    ],
    (context_doc_ids, {"seq_lens": torch.tensor([[2, -3]])}, ValueError, "seq_lens must be lengths >= 0, got -3"),
    (context_doc_ids, {"seq_lens": torch.ones(2, 3, dtype=torch.bool)}, TypeError, r"integers.*torch\.bool"),
    (document_counts, {"seq_lens": torch.tensor([2, 3])}, ValueError, r"seq_lens must be \[B, D\], got \(2,\)"),
    (document_counts, {"seq_lens": torch.tensor([[2**62, 2**62]])}, ValueError, "documents of 9223372036854775808 tokens"),
    (document_counts, {"seq_lens": torch.tensor([[200, 100]], dtype=torch.uint8)}, ValueError, "documents of 300 tokens"),
]
COUNTS: list[Mistake] = [
    (function, {name: wrong}, error, rf"{name} must .*{wrong}")
    for function, name, wrong, error in [
        (create_noise_embed, "block_size", 0, ValueError),
        (create_noise_embed, "block_size", 2.0, TypeError),
        (create_noise_embed, "mask_token_id", -1, ValueError),
        (create_noise_embed, "mask_token_id", None, TypeError),
        (create_position_ids, "block_size", 0, ValueError),
        (create_position_ids, "block_size", -2, ValueError),
        (sample_anchor_positions, "num_anchors", 2.0, TypeError),
        (sample_anchor_positions, "num_anchors", True, TypeError),
        (build_anchor_candidate_mask, "seq_len", -1, ValueError),
        (build_eval_mask, "supervised_from_slot", -1, ValueError),
        (build_eval_mask, "supervised_from_slot", 0.5, TypeError),
        (context_doc_ids, "seq_len", -1, ValueError),
        (context_doc_ids, "seq_len", 5.5, TypeError),
    ]
] + [(create_noise_embed, {"mask_token_id": 20}, ValueError, "mask_token_id is 20, but embed_tokens has 20 rows")]
LAYERS: list[Mistake] = [
    (
        extract_context_feature,
        {"layer_ids": torch.tensor([0.0, 1.0])},
        ValueError,
        r"layer_ids must be integers, got \[0\.0, 1\.0\]",
    ),
    (extract_context_feature, {"layer_ids": torch.tensor([True, False])}, ValueError, "layer_ids must be integers"),
    (extract_context_feature, {"layer_ids": torch.tensor([[0], [1]])}, ValueError, "layer_ids must be integers"),
    (
        extract_context_feature,
        {"layer_ids": torch.tensor(1)},
        ValueError,
        r"layer_ids must be a sequence of integers, got tensor\(1\)",
    ),
    (extract_context_feature, {"layer_ids": torch.tensor([], dtype=torch.int64)}, ValueError, r"layer_ids \[\] do not fit 5"),
    (extract_context_feature, {"layer_ids": torch.tensor([1, 4])}, ValueError, r"layer_ids \[1, 4\] do not fit 5 hidden states"),
    (extract_context_feature, {"layer_ids": "12"}, ValueError, "layer_ids must be a sequence of integers, got '12'"),
    (extract_context_feature, {"layer_ids": 1}, ValueError, "layer_ids must be a sequence of integers, got 1"),
    (extract_context_feature, {"hidden_states": None}, TypeError, "output_hidden_states=True"),
    (extract_context_feature, {"hidden_states": [None] * 5}, TypeError, "layer id -1 must be a tensor, got NoneType"),
    (
        extract_context_feature,
        {"hidden_states": [torch.zeros(1, 2, 3)] * 3 + [torch.zeros(1, 4, 3)] * 2},
        ValueError,
        r"-1: \(1, 2, 3\).*2: \(1, 4, 3\)",
    ),
    (validate_target_layer_ids, {"target_layer_ids": torch.tensor([1.0])}, ValueError, "target_layer_ids must be integers"),
    (validate_target_layer_ids, {"target_layer_ids": None}, ValueError, "must be a sequence of integers, got None"),
    (validate_target_layer_ids, {"target_layer_ids": 3}, ValueError, "must be a sequence of integers, got 3"),
    (sample_generators, {"idx": torch.tensor([4.0])}, ValueError, r"idx must be integers, got \[4\.0\]"),
    (sample_generators, {"idx": torch.tensor([[4]])}, ValueError, "idx must be integers"),
]


@pytest.mark.parametrize("function", ARGUMENTS)
def test_the_arguments_are_legal_before_they_are_spoilt(function: Callable[..., Any]) -> None:
    function(**ARGUMENTS[function])


@pytest.mark.parametrize(("function", "changes", "error", "message"), MASKS + BATCHES + POSITIONS + COUNTS + LAYERS)
def test_mistakes_are_named(function: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        function(**ARGUMENTS[function] | changes)
    assert type(caught.value) is error


@pytest.mark.parametrize("anchor", [-999, 2**62])
def test_dummy_blocks_may_hold_any_anchor(anchor: int) -> None:
    anchors = _with(ANCHORS, (0, 2), anchor)
    keep = torch.tensor([[True, True, False], [True, True, True]])
    expected = block_token_ids(
        **{name: value for name, value in ARGUMENTS[create_noise_embed].items() if name != "embed_tokens"}
        | {"block_keep_mask": keep}
    )
    spoilt = {name: value for name, value in ARGUMENTS[create_noise_embed].items() if name != "embed_tokens"}
    assert torch.equal(block_token_ids(**spoilt | {"anchor_positions": anchors, "block_keep_mask": keep}), expected)
    arguments = ARGUMENTS[build_eval_mask] | {"block_keep_mask": keep}
    assert torch.equal(build_eval_mask(**arguments | {"anchor_positions": anchors}), build_eval_mask(**arguments))


def test_rows_without_tokens_hold_dummy_blocks_only() -> None:
    arguments = ARGUMENTS[create_noise_embed] | {"input_ids": torch.zeros(B, 0, dtype=torch.int64)}
    embedded = create_noise_embed(**arguments | {"block_keep_mask": torch.zeros(B, A, dtype=torch.bool)})
    assert torch.equal(embedded, arguments["embed_tokens"](torch.full((B, A * K), 19)))
    with pytest.raises(IndexError, match="rows have 0 positions"):
        create_noise_embed(**arguments)


def test_layer_ids_come_as_any_sequence_of_integers() -> None:
    states = tuple(torch.full((1, 2, 3), float(layer)) for layer in range(5))
    expected = extract_context_feature(states, [-1, 2])
    for ids in (torch.tensor([-1, 2]), np.array([-1, 2]), (-1, 2), [torch.tensor(-1), np.int32(2)]):
        assert torch.equal(extract_context_feature(states, ids), expected)
    validate_target_layer_ids(torch.tensor([0, 2]), 6)


def test_small_integer_dtypes_and_huge_lengths_do_not_wrap() -> None:
    lengths = torch.tensor([[2, 2**62, 2**62, 2**62]])
    assert context_doc_ids(seq_lens=lengths, seq_len=4).tolist() == [[0, 0, 1, 1]]
    small = torch.tensor([[100, 100, 100]], dtype=torch.int8)
    assert context_doc_ids(seq_lens=small, seq_len=301)[0, [0, 150, 299, 300]].tolist() == [0, 1, 2, 3]
    assert document_counts(seq_lens=small, seq_len=301)[1][0, [0, 299]].tolist() == [99, 0]
    narrow = ARGUMENTS[build_eval_mask] | {"anchor_positions": ANCHORS.int(), "safe_label_indices": LABELS.clamp(max=S - 1).int()}
    assert torch.equal(build_eval_mask(**narrow), build_eval_mask(**ARGUMENTS[build_eval_mask]))
