"""The torchrun target: `torchrun --nproc-per-node 2 -m xtok.train --config train.json` (or plain `python -m xtok.train` for one rank).

--config: YAML or JSON of `schemas.train_config.TrainConfig`. The last line of the main rank is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

import yaml
from pydantic import ValidationError
from torch.distributed.elastic.multiprocessing.errors import record

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.errors import ConfigError, XtokError
from xtok.train.loop import run_training
from xtok.train.runtime import end_with_launcher, start_runtime, stop_runtime


def load_config(path: str) -> TrainConfig:
    """Raises ConfigError with every wrong field."""
    try:
        document = yaml.safe_load(storage.read_bytes(path))
        return TrainConfig.model_validate(document)
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


@record
def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="python -m xtok.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="training configuration, YAML or JSON")
    options = parser.parse_args()
    end_with_launcher()
    try:
        config = load_config(options.config)
        runtime = start_runtime(config.parallel)
        result = run_training(config, runtime)
        if runtime.is_main:
            print(json.dumps(result), flush=True)
        stop_runtime()
    except XtokError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
