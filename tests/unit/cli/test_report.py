"""The report of a run: what it counts, that HTML and Markdown say the same, and that no data of the user becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.unit.shards.support import PARTS, build, config_for, side, udhr_rows, write_lines
from xtok.cli import main
from xtok.cli.report import parts_table, report_markdown
from xtok.cli.report_html import report_html
from xtok.cli.report_sections import Chart, RunReport, Table, report_sections
from xtok.cli.run_record import make_report, write_report
from xtok.shards.figures import Refusals
from xtok.shards.pool import SerialRunner

HOSTILE = "<script>alert(1)</script> | `x` *y* [z](http://evil) &amp;\n# no heading\x1b]52;c;eA==\x07\0\x9b31m"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """Two teachers and the student's own tokenizer; one teacher refuses long rows; a source with a hostile name; refusals."""
    folder = tmp_path_factory.mktemp("report")
    source = write_lines(folder / "<b>bold|.jsonl", [*udhr_rows(60), b"{broken"])
    teachers = [side("spm_bpe", 400), side("unigram_nfkc"), side("chatml_bpe")]
    changes = {"teachers": teachers, "overlength": "reject", **PARTS}
    manifest = build(folder / "out", source, **changes)
    config = config_for(folder / "out", source, **changes)
    made = make_report(manifest, config, {"plan": 1.25, "build parts": 2.5}, SerialRunner())
    made.figures.refusals["source", "invented"] = Refusals(2, [(HOSTILE, 7, HOSTILE, HOSTILE * 10)])
    return made


class Page(HTMLParser):
    """Tags, attributes and text of a page; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_else_and_runs_nothing(report: RunReport) -> None:
    text = report_html(report)
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "table", "tr", "th", "td"),
        *("details", "summary", "svg", "rect", "text", "line"),
    }
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "style", "xlink:href"}
    assert not any(name.startswith("on") for name in names)
    assert "url(" not in text
    assert "@import" not in text
    assert "color-scheme: light dark" in text


def test_what_comes_from_the_data_is_only_text(report: RunReport) -> None:
    page = Page(report_html(report))
    shown = "".join(page.text)
    assert "<script>alert(1)</script> | `x` *y* [z](http://evil) &amp;" in shown
    assert "<b>bold|.jsonl" in shown
    assert not CONTROL.search(shown), "a terminal, or a database that takes no NUL, may be given it"

    markdown = report_markdown(report)
    assert "<" not in markdown
    assert not CONTROL.search(markdown)
    assert "\\[z\\](http://evil) &amp;amp; # no heading" in markdown, "one line, links and entities taken apart"
    headings = [line for line in markdown.splitlines() if line.startswith("#")]
    assert headings[0] == "# Aligned dataset"
    assert len(headings) == len(report_sections(report))
    for block in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_long_messages_are_cut(report: RunReport) -> None:
    assert HOSTILE * 10 not in "".join(Page(report_html(report)).text)


def test_charts_hold_shares_of_everything(report: RunReport) -> None:
    charts = [block for section in report_sections(report) for block in section.blocks if isinstance(block, Chart)]
    assert len(charts) == 4, "chunks of two teachers, lengths, time"
    for chart in charts:
        for name, values in chart.series:
            assert len(values) == len(chart.categories)
            assert sum(values) == pytest.approx(100.0), f"{chart.title} {name}"


def test_bars_are_as_high_as_their_values(report: RunReport) -> None:
    bars = [attributes for tag, attributes in Page(report_html(report)).tags if tag == "rect" and attributes.get("class")]
    heights = np.array([float(str(bar["height"])) for bar in bars])
    charts = [block for section in report_sections(report) for block in section.blocks if isinstance(block, Chart)]
    keys = [11.0]
    expected: list[float] = []
    for chart in charts:
        highest = max(value for _, values in chart.series for value in values)
        expected += keys * (len(chart.series) if len(chart.series) > 1 else 0)
        expected += [150 * values[place] / highest for place in range(len(chart.categories)) for _, values in chart.series]
    np.testing.assert_allclose(heights, expected, atol=0.06)


def test_sources_agree_with_the_manifest(report: RunReport) -> None:
    [table] = [section.blocks[0] for section in report_sections(report) if section.title == "Coverage by source"]
    assert isinstance(table, Table)
    [row] = table.rows
    totals = report.manifest.teacher_totals
    shares = [f"{totals[index].num_one_to_one / totals[index].num_chunks:.1%}" for index in (0, 1)]
    assert row[1:] == (
        f"{report.manifest.num_rows}",
        *(f"{totals[0].coverage:.4f}", shares[0], f"{totals[1].coverage:.4f}", shares[1]),
    )


def test_of_many_sources_the_worst_are_shown(report: RunReport) -> None:
    figures = report.figures
    rows = {f"s{number:03d}": 1 for number in range(100)}
    teacher = type(figures.teachers[0])()
    pairs = next(iter(figures.teachers[0].sources.values()))
    for number, name in enumerate(rows):
        teacher.sources[name] = type(pairs)(1, 100, 100 - number % 50, 1, 1)
    changed = RunReport(report.manifest, type(figures)({0: teacher}, rows), report.output, {})
    [section] = [section for section in report_sections(changed) if section.title == "Coverage by source"]
    assert "of 100" in section.sentences[0]
    [table] = section.blocks
    assert isinstance(table, Table)
    assert table.rows[0][:3] == ("s049", "1", "0.5100")
    assert len(table.rows) == 40


def test_both_files_are_written(report: RunReport) -> None:
    folder = Path(write_report(report))
    assert (folder / "report.md").read_text() == report_markdown(report)
    assert (folder / "report.html").read_text() == report_html(report)
    assert folder.parent == Path(report.output) / "runs"


def test_parts_are_listed_with_their_coverage(report: RunReport) -> None:
    table = parts_table(report.manifest)
    assert len(table) == len(report.manifest.parts)
    assert sum(row["rows"] for row in table) == report.manifest.num_rows
    assert all(row["bytes"] > 0 and row["coverage 0"] <= 1 for row in table)


def test_a_refused_publication_leaves_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path / "out", write_lines(tmp_path / "texts.jsonl", [*udhr_rows(3), b"{", b"{"]))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json") | {"max_reject_fraction": 0.05}))
    assert main(["preprocess", str(tmp_path / "c.yaml"), "--workers", "1"]) == 1
    assert "PublicationRefusedError" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()
    [page] = (tmp_path / "out").glob("runs/*/report.html")
    assert "invalid_json" in page.read_text()


def test_a_dataset_without_rows_has_a_report(tmp_path: Path) -> None:
    config = config_for(tmp_path / "out", write_lines(tmp_path / "texts.jsonl", [b"{", b"{"]))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert main(["preprocess", str(tmp_path / "c.yaml"), "--workers", "1"]) == 1
    [page] = (tmp_path / "out").glob("runs/*/report.md")
    assert "0 rows from 2 read" in page.read_text()
