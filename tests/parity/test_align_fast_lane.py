"""The fast lane of the alignment against the general way: the same arrays, whatever share of the documents it settles."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from xtok.align import lattice
from xtok.align.fast_lane import align_fast
from xtok.align.side import pair_of_sides
from xtok.tokenizers import FlatTokens, load_tokenizer

NAMES = ("chatml_bpe", "spm_bpe", "unigram_nfkc")
HARD = [
    "",
    " ",
    "a",
    " a",
    "cafe\u0301",
    "<|im_end|> and </s>",
    "\u4e2d\u6587",
    "tab\tnew\nline \\n",
    "\U0001f469\u200d\U0001f4bb x",
]


@pytest.mark.parametrize(("student_name", "teacher_name"), list(permutations(NAMES, 2)))
@pytest.mark.parametrize("context", [None, 40])
def test_equals_the_general_way(repository: Path, student_name: str, teacher_name: str, context: int | None) -> None:
    bundled = repository / "infra/bundled"
    texts = [json.loads(line)["text"] for line in (bundled / "udhr.jsonl").read_text().splitlines()][::7] + HARD
    adapters = [load_tokenizer(str(bundled / "tokenizers" / name)) for name in (student_name, teacher_name)]
    tokens = []
    for adapter in adapters:
        rows = adapter.encode_flat(texts).with_specials(adapter.prefix_ids, adapter.suffix_ids)
        kept = [rows.row(i)[:context] for i in range(rows.num_texts)]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in kept])]).astype(np.int64)
        tokens.append(FlatTokens(np.concatenate(kept), offsets))
    got = lattice.align_flat(*adapters, *tokens)
    sides = pair_of_sides(*adapters, *tokens)
    want = lattice._align_general(sides, None)
    for name in ("student_chunk_id", "teacher_chunk_id", "num_chunks", "pair_is_correct", "pair_offsets", "route"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name
    fast = align_fast(*sides)
    if context is None:
        assert fast is not None
        assert fast.settled.mean() > 0.5  # the lane is used
