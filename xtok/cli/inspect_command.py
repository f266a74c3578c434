"""Look at rows of a published dataset: the student's tokens over a teacher's, chunk by chunk, in colour.

  xtok inspect out/aligned                            one row, drawn at random
  xtok inspect out/aligned --row doc-17 --teacher 1   this row against the second teacher
  xtok inspect out/aligned --random 20 --html rows.html

Tokenizers are looked for where the run found them; `--tokenizer` says where they lie now.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from xtok import storage
from xtok.cli.render_html import html_page
from xtok.cli.render_terminal import print_row
from xtok.cli.row_source import RowSource
from xtok.shards.read import open_dataset

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok inspect`."""
    parser.add_argument("dataset", help="folder or URL of a published dataset")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--row", action="append", metavar="SAMPLE_ID", help="show this row (may be given again)")
    which.add_argument("--random", type=_positive, default=1, metavar="N", help="show N rows drawn at random (default 1)")
    parser.add_argument("--seed", type=int, help="makes the draw repeatable")
    parser.add_argument("--teacher", type=int, metavar="I", help="only teacher I (default: all, one after the other)")
    parser.add_argument("--lines", type=_positive, default=12, help="pairs of lines to print for each row (default 12)")
    parser.add_argument("--full", action="store_true", help="print whole rows, however long")
    parser.add_argument("--html", metavar="FILE", help="write the rows, whole, to one HTML file that needs nothing else")
    parser.add_argument(
        "--tokenizer",
        action="append",
        type=_assignment,
        default=[],
        metavar="SIDE=FOLDER",
        help="where a tokenizer lies now, e.g. student=out/qwen3 or 0=out/llama3_2 (default: where the run found it)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the rows, or write them to the HTML file."""
    dataset = open_dataset(options.dataset)
    source = RowSource(dataset, dict(options.tokenizer))
    addresses = source.find(options.row) if options.row else source.draw(options.random, options.seed)
    views = [view for address in addresses for view in source.views(address, options.teacher)]
    if options.html:
        title = f"{options.dataset}: {len(addresses)} row{'s' * (len(addresses) != 1)}"
        storage.write_atomic(options.html, html_page(views, title=title).encode())
        print(f"{options.html}: {len(addresses)} rows, {len(views)} pairs of student and teacher")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for view in views:
        print_row(view, console, max_lines=None if options.full else options.lines)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _assignment(text: str) -> tuple[str, str]:
    side, _, folder = text.partition("=")
    if not side or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not SIDE=FOLDER")
    return side, folder
