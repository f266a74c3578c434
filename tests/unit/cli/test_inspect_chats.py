"""`xtok inspect` on chats: each side's rendering with its regions, and the chunks of the final turn alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.shards.chat_support import chats
from xtok.cli import main
from xtok.cli.chat_view import ShownText, shown_text
from xtok.cli.render_html import html_page
from xtok.cli.row_source import RowSource
from xtok.shards.read import open_dataset

NATIVE = {"include_thinking_in_loss": True, "native_thinking_alignment": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("inspect") / "out"
    chats(output, teachers=["unigram_nfkc", "chatml_bpe"], **NATIVE)
    return output


def test_every_side_is_shown_with_its_regions(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(made), "--row", "bundled-43", "--teacher", "0", "--full"]) == 0
    printed = capsys.readouterr().out
    student, teacher = printed.split("teacher 0 unigram_nfkc is shown:")
    assert "student chatml_bpe is shown:" in student
    for side in (student, teacher):
        assert re.findall(r"⟦(\w+)⟧", side) == ["reasoning", "close", "answer", "eot"]
        assert "⟦answer⟧There are 10,080 minutes in a week.⟦/⟧⟦eot⟧<|im_end|>⟦/⟧" in side
    assert "<|im_start|>system" in teacher
    assert "<|im_start|>system" not in student
    lines = [line for line in printed.splitlines() if line.startswith("student chatml_bpe  ")]
    assert lines
    assert not any("im_start" in line for line in lines)
    assert "final turn: " in printed


def test_a_refused_row_is_shown_as_the_student_sees_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats(tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out"), "--row", "bundled-43"]) == 0
    printed = capsys.readouterr().out
    assert "dropped_reasoning" in printed
    assert "student chatml_bpe is shown:" in printed
    assert "teacher 0 spm_bpe is shown:" not in printed


def test_html_marks_the_regions_and_escapes_the_text(made: Path) -> None:
    source = RowSource(open_dataset(str(made)), {})
    views = [view for address in source.find(["bundled-43"]) for view in source.views(address, None)]
    page = html_page(views, title="chats")
    assert re.findall(r'<mark title="(\w+)"', page) == ["reasoning", "close", "answer", "eot"] * 3
    assert "&lt;|im_end|&gt;</mark>" in page
    assert len(views[1].shown) == 1  # the same tokenizer sees what the student sees


def test_a_long_context_is_cut_and_the_final_turn_is_not() -> None:
    row = {
        "text": "é" * 10 + "yes.",
        "regions": [{"name": "answer", "start": 20, "end": 23}, {"name": "eot", "start": 23, "end": 24}],
    }
    shown = shown_text("student", row)
    assert shown == ShownText("student", (("é" * 10, None), ("yes", "answer"), (".", "eot")))
    assert shown is not None
    assert shown.shortened(10) == shown
    assert shown.shortened(3).pieces == (("… 7 characters …ééé", None), *shown.pieces[1:])
    assert shown_text("student", {"text": None, "regions": None}) is None
