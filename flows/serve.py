"""Serve our deployments: register them with the server of PREFECT_API_URL and run what is asked of them, until told to stop.

    python -m flows.serve            (`infra/up` starts it beside a server of its own)

The one place that names deployments and their schedules. Each is named like its flow, which is what the bare-name plugin counts
on. Runs start in the directory this was started in, so relative paths in their configurations begin there.
"""

from __future__ import annotations

import flows.environment  # noqa: F401  (before Prefect is imported anywhere)

# isort: split
import argparse
import os
import sys
from typing import Any, cast

from prefect import Flow, serve
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron, Schedule

from flows.lifetime import SERVED_BY, end_with_parent
from flows.preprocess import preprocess
from flows.server import wait_until_healthy
from flows.train import train

__all__ = ["DEPLOYED_FLOWS", "SCHEDULES", "deployments", "main"]

DEPLOYED_FLOWS: tuple[Flow[Any, Any], ...] = (preprocess, train)

# Flow name -> schedule. A run of `train` ends at once, saying so, unless a new manifest was published since its last one.
SCHEDULES: dict[str, Schedule] = {"train": Cron("0 4 * * *", timezone="UTC")}


def deployments() -> list[RunnerDeployment]:
    """One deployment for each flow, under the flow's own name."""
    made = [
        flow.to_deployment(name=flow.name, description=flow.description, schedule=SCHEDULES.get(flow.name), tags=["xtok"])
        for flow in DEPLOYED_FLOWS
    ]
    return cast(list[RunnerDeployment], made)  # coroutines only where an event loop runs


def main() -> None:
    """Serve all deployments of `DEPLOYED_FLOWS`; Ctrl-C or SIGTERM stops the runs in progress and returns."""
    parser = argparse.ArgumentParser(prog="python -m flows.serve", description="Serve our flows as deployments.")
    parser.add_argument("--parent", type=int, help="this process's parent, to end with")
    options = parser.parse_args()
    api_url = os.environ.get("PREFECT_API_URL")
    if not api_url:
        sys.exit("PREFECT_API_URL is not set: start `infra/up`, or point it to your server, e.g. http://127.0.0.1:4200/api")
    if options.parent is not None:
        end_with_parent(options.parent)
    os.environ[SERVED_BY] = str(os.getpid())
    # Of a served run, the flow's own messages go to its page on the server; the rest stays quiet.
    os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL", "INFO")
    wait_until_healthy(api_url)
    names = ", ".join(flow.name for flow in DEPLOYED_FLOWS)
    print(f"Serving {names}; relative paths begin in {os.getcwd()}", flush=True)
    serve(*deployments(), print_starting_message=False, query_seconds=2)


if __name__ == "__main__":
    main()
