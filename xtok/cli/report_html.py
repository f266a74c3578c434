"""The report of a preprocessing run as one HTML file that needs nothing else: no script, no font, no request.

Charts are inline SVG, colours follow the reader's light or dark setting. All text is escaped.
"""

from __future__ import annotations

from html import escape

from xtok.cli.report import chart_table
from xtok.cli.report_sections import Chart, RunReport, Section, Table, report_sections
from xtok.cli.visible import visible

__all__ = ["report_html"]

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th { font-weight: 600; border-bottom-color: #888; }
.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
details { margin: .2rem 0 .8rem; } summary { cursor: pointer; opacity: .75; }
svg { display: block; max-width: 100%; height: auto; margin: .4rem 0; font: 11px system-ui, sans-serif; }
svg text { fill: currentColor; text-anchor: middle; } svg .key { text-anchor: start; }
.axis { stroke: currentColor; opacity: .5; }
.bar0 { fill: #3b82c4; } .bar1 { fill: #e08a1e; } .bar2 { fill: #3f9d5c; } .bar3 { fill: #b0509c; }
.bar4 { fill: #8a7a3c; } .bar5 { fill: #7d86d8; } .bar6 { fill: #c9504a; } .bar7 { fill: #4aa3a3; }
"""
NUM_COLOURS = 8
PLOT_HEIGHT = 150
# A value is written over its bar where that leaves room for it; hovering shows it everywhere.
MAX_LABELLED_SERIES = 2


def report_html(report: RunReport) -> str:
    """The whole page."""
    first, *others = report_sections(report)
    title = f"{first.title}: {report.output}"
    body = "\n".join([f"<h1>{_escaped(first.title)}</h1>", _section(first), *map(_titled, others)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _escaped(text: str) -> str:
    return escape(visible(text))


def _titled(section: Section) -> str:
    return f"<h2>{_escaped(section.title)}</h2>\n{_section(section)}"


def _section(section: Section) -> str:
    pieces = [f"<p>{_escaped(sentence)}</p>" for sentence in section.sentences]
    pieces += [_chart(block) if isinstance(block, Chart) else _table(block) for block in section.blocks]
    return "\n".join(pieces)


def _table(table: Table) -> str:
    rows = [_row("th", table.headers, table.num_text), *(_row("td", row, table.num_text) for row in table.rows)]
    return '<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _row(tag: str, cells: tuple[str, ...], num_text: int) -> str:
    drawn = (f"<{tag}{' class=text' if column < num_text else ''}>{_escaped(cell)}</{tag}>" for column, cell in enumerate(cells))
    return f"<tr>{''.join(drawn)}</tr>"


def _chart(chart: Chart) -> str:
    heading = f"<h3>{_escaped(chart.title)}</h3>\n" if chart.title else ""
    table = _table(chart_table(chart))
    return f"{heading}{_svg(chart)}\n<details><summary>the same in figures</summary>{table}</details>"


def _svg(chart: Chart) -> str:
    """Groups of bars over a base line, one group a category, with the key above when there is more than one series."""
    num_series = len(chart.series)
    labelled = num_series <= MAX_LABELLED_SERIES
    bar = 32 if labelled else 16
    group = max(num_series * bar + 18, 96)
    has_key = num_series > 1
    top, width = (44 if has_key else 24), group * len(chart.categories) + 20
    base = top + PLOT_HEIGHT
    highest = max((value for _, values in chart.series for value in values), default=0.0) or 1.0
    pieces = [_key(chart, width)] if has_key else []
    for place, category in enumerate(chart.categories):
        left = 10 + place * group + (group - num_series * bar) / 2
        for number, (name, values) in enumerate(chart.series):
            label = f"{values[place]:.1f}"
            height = PLOT_HEIGHT * values[place] / highest
            x = left + number * bar
            pieces.append(
                f'<rect class="bar{number % NUM_COLOURS}" x="{x:.1f}" y="{base - height:.1f}" width="{bar - 2}" '
                f'height="{height:.1f}"><title>{_escaped(f"{name}, {category}: {label} {chart.unit}")}</title></rect>'
            )
            if labelled:
                pieces.append(f'<text x="{x + bar / 2 - 1:.1f}" y="{base - height - 4:.1f}">{label}</text>')
        pieces.append(f'<text x="{10 + (place + 0.5) * group:.1f}" y="{base + 15}">{_escaped(category)}</text>')
    pieces.append(f'<line class="axis" x1="10" x2="{width - 10}" y1="{base}" y2="{base}"/>')
    caption = f'<text x="{width / 2:.1f}" y="{base + 32}">{_escaped(chart.unit)}</text>'
    name = _escaped(f"{chart.title or chart.unit}: bars of {', '.join(series for series, _ in chart.series)}")
    return (
        f'<svg role="img" aria-label="{name}" width="{width}" viewBox="0 0 {width} {base + 40}">'
        + "".join([*pieces, caption])
        + "</svg>"
    )


def _key(chart: Chart, width: int) -> str:
    step = (width - 20) / len(chart.series)
    pieces = []
    for number, (name, _) in enumerate(chart.series):
        x = 10 + number * step
        pieces.append(f'<rect class="bar{number % NUM_COLOURS}" x="{x:.1f}" y="6" width="11" height="11"/>')
        pieces.append(f'<text class="key" x="{x + 16:.1f}" y="16">{_escaped(name)}</text>')
    return "".join(pieces)
