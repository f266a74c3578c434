"""Check a published dataset: every file's digest and row count, and the invariants of every row.

  xtok verify out/aligned

Prints what is wrong, file by file, with the command that mends it, and ends with code 1; prints the figures when all is well.
"""

from __future__ import annotations

import argparse

from xtok.shards.publish import figures_table
from xtok.shards.read import open_dataset

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "verify"
HELP = "check digests, row counts and invariants of a published dataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok verify`."""
    parser.add_argument("dataset", help="folder or URL of a published dataset")


def run(options: argparse.Namespace) -> int:
    """Verify; 0 when nothing is wrong."""
    from xtok.shards.verify import verify_dataset

    dataset = open_dataset(options.dataset)
    problems = verify_dataset(dataset)
    print(figures_table(dataset.manifest))
    return 1 if problems else 0
