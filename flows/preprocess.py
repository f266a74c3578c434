"""The flow `preprocess`: raw text or chats in, aligned Parquet shards out.

    python -m flows.preprocess --config my.yaml       with nothing set up: a private Prefect server for this run alone
    prefect deployment run preprocess                 where `infra/up` is serving

plan -> parts, a task each on the engine of the configuration (`flows.engines`) -> report -> publish. What is finished is known by
its own digests (`xtok.shards.records`), never by Prefect's cache, so nothing here persists or caches a result.
"""

from __future__ import annotations

from flows.environment import use_private_home  # before Prefect is imported anywhere

if __name__ == "__main__":
    use_private_home()

# isort: split
import argparse
import os
import sys
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from flows.artifacts import ProgressBar, publish_report
from flows.engines import open_engine
from flows.lifetime import end_with_serving_process
from flows.server import prepare_lone_run
from schemas.config import PreprocessConfig
from schemas.manifest import FileEntry, Manifest, PartEntry
from xtok.cli.config_file import load_config
from xtok.cli.run_record import StepClock, make_report, write_report
from xtok.cli.visible import visible
from xtok.errors import XtokError
from xtok.shards.pipeline import absolute_config, plan_dataset
from xtok.shards.plan import RunPlan
from xtok.shards.pool import Runner
from xtok.shards.projections import build_projections
from xtok.shards.publish import build_manifest, figures_table, publish
from xtok.shards.records import part_jobs

__all__ = ["main", "preprocess"]

# Threads only wait for the pool's processes, which bound what really runs; the rest of the parts waits in their queue.
THREADS: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2 * (os.cpu_count() or 1) + 2)


@task(name="plan", persist_result=False, cache_policy=NO_CACHE)
def plan_task(config: PreprocessConfig, runner: Runner) -> RunPlan:
    """Digest the sources, balance the parts, check the tokenizers, and freeze the plan in the output."""
    return plan_dataset(config, runner)


@task(name="publish", persist_result=False, cache_policy=NO_CACHE)
def publish_task(
    run: RunPlan, entries: list[PartEntry], config: PreprocessConfig, projections: tuple[FileEntry | None, ...]
) -> Manifest:
    """Hold the figures against the limits and write the manifest."""
    return publish(run, entries, config, projections)


@flow(name="preprocess", task_runner=cast(Any, THREADS), persist_result=False)
def preprocess(config: str | dict[str, Any] | None = None) -> Manifest:
    """Raw text or chats in, aligned Parquet shards out.

    config: path of a YAML file (relative: to the directory of `infra/up`, or the current one), the same as an object, or
    nothing for the example on bundled data.
    """
    end_with_serving_process()
    clock = StepClock()
    logger = get_run_logger()
    checked = absolute_config(load_config(config))
    with open_engine(checked) as engine:
        run = plan_task(checked, engine.runner)
        clock.done("plan")
        projections = build_projections(run, checked, engine.runner)
        clock.done("build projections")
        jobs = part_jobs(run, checked)
        logger.info("%d rows in %d parts, on %s, into %s", run.plan.num_rows, len(jobs), engine.place, checked.output)
        progress = ProgressBar(len(jobs))
        entries: list[PartEntry] = []
        for entry in engine.build(jobs):
            entries.append(entry)
            progress.update(len(entries))
        clock.done("build parts")
        # Reported before it is published: where publication is refused, the figures are what one needs.
        manifest = build_manifest(run.plan, entries, projections)
        report = make_report(manifest, checked, clock.seconds, engine.runner)
    write_report(report)
    publish_report(report)
    publish_task(run, entries, checked, projections)
    logger.info("published %d rows in %s", manifest.num_rows, checked.output)
    return manifest


def main() -> int:
    """Run the flow once, with a server of its own unless PREFECT_API_URL names one."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.preprocess",
        description="Build and publish an aligned dataset as a Prefect flow. Without PREFECT_API_URL it brings its own server.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML configuration (default: the example on bundled data)")
    options = parser.parse_args()
    try:
        config = load_config(options.config)  # a mistake is told at once, not after a server has started
        prepare_lone_run()
        manifest = preprocess(config.model_dump(mode="json"))
    except XtokError as error:
        print(f"{type(error).__name__}: {visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues where it stopped", file=sys.stderr)
        return 130
    print(f"published {config.output}\n{figures_table(manifest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
