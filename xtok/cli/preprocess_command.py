"""Build and publish a dataset on this machine, without Prefect: the same pipeline, the same bytes.

  xtok preprocess my.yaml

The configuration is a YAML file (README.md shows one); relative paths in it begin in the current directory. After an interruption
the same command continues where it stopped, and ends with the same bytes.
"""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from xtok.cli.config_file import load_config
from xtok.cli.report import report_markdown
from xtok.cli.run_record import write_report
from xtok.shards.pipeline import preprocess
from xtok.shards.publish import figures_table

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok preprocess`."""
    parser.add_argument("config", help="YAML file with sources, student, teachers, output (README.md shows all by example)")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes, instead of the file's (default: one a core)")


def run(options: argparse.Namespace) -> int:
    """Preprocess, with a progress bar on stderr and the figures on stdout."""
    config = load_config(options.config, overrides={"workers": options.workers} if options.workers is not None else {})
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        stages: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        manifest = preprocess(config, progress=show)
    write_report(config.output, report_markdown(manifest, output=config.output, seconds=time.monotonic() - began))
    print(f"published {config.output}\n{figures_table(manifest)}")
    return 0
