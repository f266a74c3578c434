"""Build and publish a dataset on this machine, without Prefect: the same pipeline, the same bytes.

  xtok preprocess my.yaml

The configuration is a YAML file (README.md shows one); relative paths in it begin in the current directory. After an interruption
the same command continues where it stopped, and ends with the same bytes.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from schemas.config import PreprocessConfig
from schemas.manifest import Manifest
from xtok.cli.config_file import load_config
from xtok.cli.run_record import StepClock, make_report, write_report
from xtok.errors import ConfigError
from xtok.shards.pipeline import absolute_config, build_parts, plan_dataset
from xtok.shards.plan import Progress as ShowProgress
from xtok.shards.pool import WorkerPool
from xtok.shards.projections import build_projections
from xtok.shards.publish import build_manifest, figures_table, publish

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok preprocess`."""
    parser.add_argument("config", help="YAML file with sources, student, teachers, output (README.md shows all by example)")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes, instead of the file's (default: one a core)")


def run(options: argparse.Namespace) -> int:
    """Preprocess, with a progress bar on stderr and the figures on stdout."""
    config = load_config(options.config, overrides={"workers": options.workers} if options.workers is not None else {})
    if config.engine != "local":
        raise ConfigError(
            f"engine: {config.engine!r} is for the flow (`python -m flows.preprocess`); leave it out to use this machine"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        stages: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        manifest, report = _preprocess(absolute_config(config), show)
    print(f"published {config.output}\n{figures_table(manifest)}\nreport {report}/report.html")
    return 0


def _preprocess(config: PreprocessConfig, progress: ShowProgress) -> tuple[Manifest, str]:
    """Plan, build, report, publish; the manifest, and the folder of the report. Reported before it is published: where
    publication is refused, the figures are what one needs."""
    clock = StepClock()
    with WorkerPool(config.workers) as pool:
        run = plan_dataset(config, pool, progress)
        clock.done("plan")
        projections = build_projections(run, config, pool)
        clock.done("build projections")
        entries = build_parts(run, config, pool, progress)
        clock.done("build parts")
        manifest = build_manifest(run.plan, entries, projections)
        report = write_report(make_report(manifest, config, clock.seconds, pool))
    publish(run, entries, config, projections)
    return manifest, report
