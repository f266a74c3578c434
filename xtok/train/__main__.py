"""One rank of a training run; the target of torchrun.

    python -m xtok.train --config train.yaml                                  one rank, alone
    python -m xtok.train.launch --config train.yaml                           the ranks that the configuration asks for
    torchrun --nproc-per-node 2 -m xtok.train --config train.yaml             the same by hand

--config: YAML or JSON of `schemas.train_config.TrainConfig`. The last line of the main rank's stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback

from xtok.errors import XtokError
from xtok.train.lifetime import end_with_launcher

__all__ = ["is_lost_peer", "main"]

LOST_PEER = re.compile(
    r"gloo|nccl|socket|connection (closed|reset|refused)|broken pipe|timed? ?out|remote process", re.IGNORECASE
)
# How long a rank that lost another waits for the launcher, which has then seen the first death and ends all.
GRACE_SECONDS = 10.0


def main() -> None:
    """Run one rank. A failure is recorded for torchrun, which shows the first; without torchrun it is printed here."""
    parser = argparse.ArgumentParser(
        prog="python -m xtok.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="training configuration, YAML or JSON")
    options = parser.parse_args()
    end_with_launcher()
    # Seconds, in which the launcher may die: only now.
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler
    from transformers.utils.logging import disable_progress_bar

    from xtok.train.config_file import load_train_config
    from xtok.train.loop import run_training
    from xtok.train.runtime import start_runtime, stop_runtime

    get_error_handler().initialize()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = load_train_config(options.config)
        runtime = start_runtime(config.parallel)
        result = run_training(config, runtime)
        if runtime.is_main:
            print(json.dumps(result), flush=True)
        stop_runtime()
    except KeyboardInterrupt:
        _end(130)
    except Exception as error:
        _fail(error)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that another rank is gone rather than what went wrong."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, RuntimeError | OSError) and not isinstance(link, XtokError) and LOST_PEER.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def _fail(error: Exception) -> None:
    if is_lost_peer(error) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(GRACE_SECONDS)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    else:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if not isinstance(error, XtokError):
        traceback.print_exc()
    _end(1)


def _end(code: int) -> None:
    """At once: threads that wait for other ranks must not hold this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
