"""The report of a preprocessing run in Markdown, and its table of parts.

Written to runs/<run>/report.md beside report.html, and shown by the flow as artifacts.
"""

from __future__ import annotations

import re
from typing import Any

from schemas.manifest import Manifest, PartEntry
from xtok.cli.report_sections import Chart, RunReport, Section, Table, report_sections
from xtok.cli.visible import visible

__all__ = ["chart_table", "parts_table", "report_markdown"]


def parts_table(manifest: Manifest) -> list[dict[str, Any]]:
    """One row for each part: rows, rejects, bytes and coverage."""
    return [
        {
            "part": part.index,
            "source rows": part.num_source_rows,
            "rows": part.num_rows,
            "rejects": _num_rejects(part),
            "bytes": sum(file.num_bytes for file in (part.student_file, *part.teacher_files) if file is not None),
            **{f"coverage {index}": round(side.coverage, 4) for index, side in enumerate(part.teachers)},
        }
        for part in manifest.parts
    ]


def report_markdown(report: RunReport) -> str:
    """The report; charts become tables. What comes from the data is escaped."""
    first, *others = report_sections(report)
    lines = ["# " + first.title, "", *_body(first)]
    for section in others:
        lines += ["## " + section.title, "", *_body(section)]
    return "\n".join(lines).rstrip("\n") + "\n"


def chart_table(chart: Chart) -> Table:
    """A chart's values as a table, one row for each category."""
    headers = (chart.unit, *(name for name, _ in chart.series))
    values = zip(*(series for _, series in chart.series), strict=True)
    return Table(
        headers, [(name, *(f"{value:.1f}" for value in row)) for name, row in zip(chart.categories, values, strict=True)]
    )


def _body(section: Section) -> list[str]:
    lines = []
    for sentence in section.sentences:
        lines += [_text(sentence), ""]
    for block in section.blocks:
        if isinstance(block, Chart) and block.title:
            lines += [f"**{_text(block.title)}**", ""]
        lines += [*_table(chart_table(block) if isinstance(block, Chart) else block), ""]
    return lines


def _table(table: Table) -> list[str]:
    rules = ["---"] * table.num_text + ["--:"] * (len(table.headers) - table.num_text)
    rows = [table.headers, *table.rows]
    head, *body = ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in rows]
    return [head, "|" + "|".join(rules) + "|", *body]


def _text(text: str) -> str:
    """Text in which nothing is markup: no line ends, no HTML, no Markdown."""
    text = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", " ".join(text.split()))


def _num_rejects(part: PartEntry) -> int:
    return sum(part.source_rejects.values()) + part.student.num_rejects + sum(side.num_rejects for side in part.teachers)
