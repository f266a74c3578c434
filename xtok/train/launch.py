"""Start the ranks that a training configuration asks for, and end with the first error in one line.

    python -m xtok.train.launch --config train.yaml

On several machines run the same command on each: they meet at `parallel.rendezvous`. This process is torchrun itself with what the
configuration says, and ends when its own parent does (--parent); its ranks end with it, `kill -9` included.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.errors import XtokError
from xtok.train.config_file import load_train_config
from xtok.train.lifetime import LAUNCHED_BY, end_with_parent

__all__ = ["describe_failure", "main", "torchrun_arguments"]

RUN_ID = "xtok-train"


def torchrun_arguments(config: TrainConfig, path: str) -> list[str]:
    """What torchrun is told: `path` holds `config`."""
    parallel = config.parallel
    arguments = ["--nproc-per-node", str(parallel.processes), "--max-restarts", "0", "--no-python"]
    if parallel.num_nodes > 1 and parallel.rendezvous is not None:
        arguments += ["--nnodes", str(parallel.num_nodes), "--rdzv-backend", "c10d", "--rdzv-id", RUN_ID]
        arguments += ["--rdzv-endpoint", parallel.rendezvous]
    else:
        arguments += ["--standalone"]
    return [*arguments, sys.executable, "-m", "xtok.train", "--config", path]


def main() -> int:
    """0 done; 1 a rank failed: the first failure is on stderr; 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m xtok.train.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="training configuration, YAML or JSON")
    parser.add_argument("--parent", type=int, help="this process's parent, to end with")
    parser.add_argument("--failure", metavar="FILE", help="write the first error there instead of to stderr")
    options = parser.parse_args()
    if options.parent is not None:
        end_with_parent(options.parent)
    try:
        config = load_train_config(options.config)
    except XtokError as error:
        return _tell(f"{type(error).__name__}: {error}", options.failure)
    os.environ[LAUNCHED_BY] = str(os.getpid())
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.parallel.processes)))
    return _torchrun(torchrun_arguments(config, options.config), options.failure)


def _torchrun(arguments: list[str], failure_file: str | None) -> int:
    # Slow to load, so a mistake in the configuration is told before.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what went wrong is told below, once
    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _tell(describe_failure(rank, failure.message, failure.exitcode), failure_file)
    except (KeyboardInterrupt, SignalException):
        if failure_file is None:  # else whoever started this says so
            print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _tell(failure: str, file: str | None) -> int:
    if file is None:
        print(failure, file=sys.stderr)
    else:
        storage.write_atomic(file, failure.encode())
    return 1


def describe_failure(rank: int, message: object, exit_code: int) -> str:
    """One line for a failed rank. message: what torchrun knows, text or {"message": text}."""
    if isinstance(message, dict):
        return str(message.get("message"))
    hint = "; often memory ran out" if exit_code == -9 else ""
    return f"TrainingError: rank {rank} ended with exit code {exit_code} ({message}){hint}. Run again to go on from the last checkpoint"


if __name__ == "__main__":
    sys.exit(main())
