"""Rows as a person reads them: pairing, spelling, terminal and HTML."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.cells import cell_len
from rich.console import Console

from xtok.cli.chat_view import ShownText
from xtok.cli.render_html import html_page
from xtok.cli.render_terminal import print_row
from xtok.cli.row_view import ChunkView, RowView, TokenView, pair_chunks, spell


def tokens(*texts: str) -> tuple[TokenView, ...]:
    return tuple(TokenView(id=at, text=text, is_special=text.startswith("<"), supervised=True) for at, text in enumerate(texts))


def row_of(chunks: tuple[ChunkView, ...], sample_id: str = "doc-1") -> RowView:
    return RowView(
        sample_id=sample_id,
        source="texts.jsonl",
        line=7,
        teacher_index=1,
        student_name="small",
        teacher_name="large",
        route="byte",
        coverage=0.5,
        note=None,
        chunks=chunks,
    )


def shape(chunks: tuple[ChunkView, ...]) -> list[tuple[int, str, str]]:
    return [(c.chunk_id, "|".join(t.text for t in c.student), "|".join(t.text for t in c.teacher)) for c in chunks]


def test_chunks_are_paired_in_reading_order() -> None:
    student = tokens("<s>", "ab", "c", "x", "d")
    teacher = tokens("a", "bc", "y", "z", "d", "</s>")
    chunks = pair_chunks(student, teacher, [-1, 0, 0, -1, 1], [0, 0, -1, -1, 1, -1], [True, False])
    assert shape(chunks) == [
        (-1, "<s>", ""),
        (0, "ab|c", "a|bc"),
        (-1, "x", ""),
        (-1, "", "y"),
        (-1, "", "z"),
        (1, "d", "d"),
        (-1, "", "</s>"),
    ]
    assert [chunk.is_correct for chunk in chunks if chunk.chunk_id >= 0] == [True, False]


def test_role_pairs_numbered_last_still_come_first() -> None:
    chunks = pair_chunks(tokens("<s>", "a"), tokens("<s>", "a"), [1, 0], [1, 0], [True, True])
    assert shape(chunks) == [(1, "<s>", "<s>"), (0, "a", "a")]


def test_every_token_is_shown_once_whatever_the_ids() -> None:
    student, teacher = tokens(*"abcd"), tokens(*"wxyz")
    chunks = pair_chunks(student, teacher, [0, -1, 0, 1], [2, 0, -1, 1], [True, True, True])
    assert sorted(t.text for c in chunks for t in c.student) == list("abcd")
    assert sorted(t.text for c in chunks for t in c.teacher) == list("wxyz")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b" the", "·the"),
        (b"a\n\t", "a↵⇥"),
        (b"\xe2\x82", "<E2 82>"),
        (b" \xd7\x94\xd7", "·ה<D7>"),
        ("é\u2028".encode(), "é\\u2028"),
        (b"\x00\x1b[31m", "\\u0000\\u001b[31m"),
        (b"", ""),
    ],
)
def test_spelling_shows_what_is_there(data: bytes, text: str) -> None:
    assert spell(data) == text


def printed(row: RowView, width: int, **options: int | None) -> list[str]:
    stream = io.StringIO()
    print_row(row, Console(file=stream, width=width, color_system=None, highlight=False), **options)
    return stream.getvalue().splitlines()


def test_terminal_lines_stay_in_step_and_lose_nothing() -> None:
    words = ["漢字", "[bold]", "ab", "🙂", "e"] * 12
    chunks = tuple(ChunkView(at, True, tokens(word), tokens(*word)) for at, word in enumerate(words))
    lines = printed(row_of(chunks), 60)
    top = [line for line in lines if line.startswith("student small")]
    bottom = [line for line in lines if line.startswith("teacher 1 large")]
    assert len(top) == len(bottom) > 3
    assert all(cell_len(line) <= 61 for line in top + bottom)
    assert " ".join(top).count("[bold]") == 12
    assert "".join(re.sub(r"^teacher 1 large +", "", line) for line in bottom).replace("|", "").replace(" ", "") == "".join(words)
    for upper, lower in zip(top, bottom, strict=True):
        assert cell_len(upper) == cell_len(lower)


def test_terminal_marks_are_text_too() -> None:
    chunks = (ChunkView(-1, False, tokens("x"), ()), ChunkView(0, False, tokens("a", "b"), tokens("c")))
    text = "\n".join(printed(row_of(chunks), 80))
    assert "[x]" in text
    assert "!a|b" in text
    assert "1 not correct" in text


def test_terminal_says_what_it_leaves_out() -> None:
    chunks = tuple(ChunkView(at, True, tokens("abcdef"), tokens("abcdef")) for at in range(40))
    lines = printed(row_of(chunks), 60, max_lines=2)
    shown = sum(line.count("abcdef") for line in lines if line.startswith("student"))
    assert lines[-1] == f"… {40 - shown} more chunks (--full shows all)"


class Reader(HTMLParser):
    """Collects text, tags and attribute names, and checks that tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_escapes_everything_and_needs_nothing() -> None:
    evil = '</bdi><script>alert("1")</script>&amp;'
    chunks = (ChunkView(0, True, tokens(evil), tokens("ok")), ChunkView(-1, False, (), tokens('" onclick="')))
    page = html_page([row_of(chunks, sample_id=evil)], title=evil)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert "script" not in reader.tags
    assert reader.attributes <= {"lang", "charset", "name", "content", "class", "style", "title"}
    assert "".join(reader.text).count(evil) == 4
    assert "http" not in page
    assert "url(" not in page


def test_nothing_of_the_data_steers_a_terminal() -> None:
    evil = "a\x1b]52;c;eA==\x07b\rc\x9b31md\0\n"
    shown = ShownText("student x", ((evil, None), (evil, "answer")))
    row = replace(row_of((ChunkView(0, True, tokens("ok"), tokens("ok")),), sample_id=evil), source=evil, shown=(shown,))
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    print_row(row, console)
    for text in (console.file.getvalue(), html_page([row], title="evil")):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
        assert text.count("a\\x1b]52;c;eA==\\x07b\\x0dc\\x9b31md\\x00") == 4


def test_html_tells_a_token_outside_the_mask_from_one_without_counterpart() -> None:
    outside = TokenView(1, "prompt", False, False)
    chunks = (ChunkView(-1, False, (outside,), ()), ChunkView(-1, False, (outside, *tokens("answer")), ()))
    page = html_page([row_of(chunks)], title="two")
    assert page.count('class="outside"') == page.count('class="alone"') == 1
    assert page.index('class="outside"') < page.index('class="alone"')
