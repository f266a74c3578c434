"""The document an online collator works with."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.chat.support import NATIVE, assistant, bundled_template, renderer, talk, user
from xtok.chat import RenderedChatDocument, render_document
from xtok.errors import RowRefused

QUESTION, ANSWER = "Où est le 🐈 ?", "Sur le toit, né là-haut 😀."


def test_fields() -> None:
    document = render_document(renderer(), talk(user(QUESTION), assistant(ANSWER)))
    assert isinstance(document, RenderedChatDocument)
    start, end = document.content_span
    assert document.text[start:end] == ANSWER
    assert document.input_ids.dtype == np.int32
    assert document.assistant_mask.dtype == np.bool_
    assert document.end_of_turn_index is not None
    assert document.assistant_mask[document.end_of_turn_index]
    assert [region.name for region in document.regions] == ["answer", "eot"]
    assert document.reasoning == "none"


def test_offsets_are_characters_and_pieces_of_one_share_its_span() -> None:
    document = render_document(renderer(), talk(user(QUESTION), assistant(ANSWER)))
    data = document.text.encode()
    assert len(data) > len(document.text)
    for (begin, stop), (low, high) in zip(document.offsets.tolist(), document.byte_spans.tolist(), strict=True):
        assert begin < stop
        covered = document.text[begin:stop].encode()
        first = len(document.text[:begin].encode())
        assert first <= low <= high <= first + len(covered)
        assert len(document.text[begin + 1 : stop].encode()) + first < high or stop - begin == 1
        assert first + len(document.text[begin].encode()) > low
    ascii_document = render_document(renderer(), talk(user("q"), assistant("a")))
    assert ascii_document.offsets is ascii_document.byte_spans


def test_native_regions_and_reasoning() -> None:
    row = talk(user(QUESTION), assistant(ANSWER, reasoning_content="Un chat grimpe."))
    document = render_document(renderer(bundled_template("chatml"), options=NATIVE), row)
    assert [region.name for region in document.regions] == ["reasoning", "close", "answer", "eot"]
    assert document.reasoning == "shown"
    start, end = document.content_span
    assert document.text[start:end].startswith("Un chat grimpe.")
    assert document.text[start:end].endswith(ANSWER)


def test_a_refusal_is_raised_with_its_side() -> None:
    with pytest.raises(RowRefused) as caught:
        render_document(renderer(name="teacher=1"), talk(user("q")))
    assert (caught.value.reason, caught.value.stage, caught.value.side) == ("no_final_assistant", "render", "teacher=1")
