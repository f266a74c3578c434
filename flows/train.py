"""The flow `train`: from a published dataset to a trained student and draft, in a torchrun child of this process.

    python -m flows.train --config train.yaml         with nothing set up: a private Prefect server for this run alone
    prefect deployment run train                      where `infra/up` is serving

check -> launch, its metrics streamed -> report. On several machines (`parallel.num_nodes`) this flow starts the ranks of its own
machine; on each other one run `python -m xtok.train.launch --config train.yaml`. Whether there is anything new to train on is known
by the manifest's digest in the run folder, never by Prefect's cache.
"""

from __future__ import annotations

from flows.environment import use_private_home  # before Prefect is imported anywhere

if __name__ == "__main__":
    use_private_home()

# isort: split
import argparse
import sys
import time
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from flows.lifetime import end_with_serving_process
from flows.server import prepare_lone_run
from flows.train_artifacts import TrainingProgress, publish_training
from schemas.train_config import TrainConfig
from xtok import storage
from xtok.cli.visible import visible
from xtok.errors import XtokError
from xtok.train.config_file import absolute_train_config, load_bundled_train_config, load_train_config
from xtok.train.output_lock import reason_to_wait

__all__ = ["main", "train"]

# What needs torch is imported inside the tasks: the process that serves deployments starts without it.


@task(name="check", persist_result=False, cache_policy=NO_CACHE)
def check_task(config: TrainConfig) -> str | None:
    """Compare the manifest's fingerprints with the configured models; why there is nothing to do, or None."""
    from xtok.train.build import check_dataset
    from xtok.train.run_record import nothing_to_do

    check_dataset(config)
    return nothing_to_do(config)


@task(name="launch", persist_result=False, cache_policy=NO_CACHE)
def launch_task(config: TrainConfig) -> dict[str, Any]:
    """Run torchrun as a child to the end, streaming its progress; the main rank's result."""
    from xtok.train.child import TrainingProcess
    from xtok.train.run_record import begin_run, finish_run

    begin_run(config)
    progress = TrainingProgress(config.steps)
    with TrainingProcess(config) as child:
        for line in child.lines():
            progress.show(line)
        result = child.result()
    finish_run(config)
    return result


@task(name="report", persist_result=False, cache_policy=NO_CACHE)
def report_task(config: TrainConfig, exported: dict[str, str], seconds: float) -> None:
    """Draw the plot, write report.md beside it, and store table and report on the server."""
    from xtok.train.plot import draw_plot
    from xtok.train.report import metrics_table, read_metrics, train_report_markdown
    from xtok.train.run_record import PLOT_FILE, REPORT_FILE

    lines = read_metrics(config.output)
    plot = PLOT_FILE if draw_plot(lines, storage.join(config.output, PLOT_FILE)) else None
    markdown = train_report_markdown(config, lines, exported=exported, seconds=seconds, plot=plot)
    storage.write_atomic(storage.join(config.output, REPORT_FILE), markdown.encode())
    publish_training(config.output, metrics_table(lines), markdown, plot)


@flow(name="train", persist_result=False)
def train(config: str | dict[str, Any] | None = None) -> dict[str, Any]:
    """A published dataset in, a trained student and its draft out; a run that was interrupted goes on.

    config: path of a YAML file (relative: to the directory of `infra/up`, or the current one), the same as an object, or nothing for
    the example on bundled data. Does nothing, saying so, when no new manifest was published since its last run.
    """
    end_with_serving_process()
    began = time.monotonic()
    logger = get_run_logger()
    given = load_bundled_train_config() if config is None else load_train_config(config)
    checked = absolute_train_config(given)
    reason = (reason_to_wait(checked) if _is_scheduled() else None) or check_task(checked)
    if reason is not None:
        logger.info("nothing to do: %s", reason)
        return {"nothing_to_do": f"nothing to do: {reason}"}
    logger.info(
        "%d steps on %s into %s, %d ranks here", checked.steps, checked.dataset, checked.output, checked.parallel.processes
    )
    result = launch_task(checked)
    report_task(checked, result["exported"], time.monotonic() - began)
    logger.info("trained to step %d; exported %s", result["step"], ", ".join(result["exported"].values()) or "nothing")
    return result


def _is_scheduled() -> bool:
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.auto_scheduled)


def main() -> int:
    """Run the flow once, with a server of its own unless PREFECT_API_URL names one."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.train",
        description="Train student and draft as a Prefect flow. Without PREFECT_API_URL it brings its own server.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML configuration (default: the example on bundled data)")
    options = parser.parse_args()
    try:
        config = load_bundled_train_config() if options.config is None else load_train_config(options.config)
        prepare_lone_run()
        result = train(config.model_dump(mode="json"))
    except XtokError as error:
        print(f"{type(error).__name__}: {visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    if "nothing_to_do" in result:
        print(result["nothing_to_do"])
        return 0
    print(f"trained to step {result['step']}; report: {storage.join(config.output, 'report.md')}")
    for name, path in result["exported"].items():
        print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
