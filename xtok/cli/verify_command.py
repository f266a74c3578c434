"""Check a published dataset: every file's digest and row count, and what must hold between the sides of every row.

  xtok verify out/aligned

Prints the figures and, if something is wrong, each finding and the command that mends it; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import Progress

from xtok.cli.visible import visible
from xtok.shards.publish import figures_table
from xtok.shards.read import open_dataset
from xtok.shards.verify import damaged_parts, verify_dataset

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok verify`."""
    parser.add_argument("dataset", help="folder or URL of a published dataset")


def run(options: argparse.Namespace) -> int:
    """Verify; 0 when nothing is wrong."""
    dataset = open_dataset(options.dataset)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task("verify parts")
        findings = verify_dataset(dataset, lambda _, done, total: bars.update(bar, completed=done, total=total))
    print(figures_table(dataset.manifest))
    if not findings:
        print(f"{options.dataset}: all {len(dataset.manifest.parts)} parts are sound")
        return 0
    for finding in findings:
        print(f"WRONG {visible(str(finding))}")
    parts = damaged_parts(findings)
    print(f"to mend: xtok repair {options.dataset}" + (f"  (parts {', '.join(map(str, parts))})" if parts else ""))
    return 1
