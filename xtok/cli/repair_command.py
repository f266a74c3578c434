"""Rebuild what is damaged of a published dataset, part by part; everything else stays as it is.

  xtok repair out/aligned                 every part that `xtok verify` finds damaged
  xtok repair out/aligned --part 3        this part

The sources and tokenizers must be those the dataset was made from; the rebuilt files have the published bytes, or nothing is said
to be repaired.
"""

from __future__ import annotations

import argparse

from schemas.config import PreprocessConfig
from xtok import storage
from xtok.cli.config_file import load_config
from xtok.cli.run_record import recorded_config
from xtok.errors import ConfigError
from xtok.shards.pipeline import rebuild_part, restore_plan, restore_projections
from xtok.shards.read import open_dataset
from xtok.shards.verify import damaged_parts, verify_dataset

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok repair`."""
    parser.add_argument("dataset", help="folder or URL of a published dataset")
    parser.add_argument("--part", type=int, action="append", metavar="N", help="rebuild this part (default: all damaged)")
    parser.add_argument("--config", metavar="FILE", help="the configuration it was made with (default: the one the run recorded)")


def run(options: argparse.Namespace) -> int:
    """Repair; 0 when the dataset is sound afterwards."""
    dataset = open_dataset(options.dataset)
    found = verify_dataset(dataset)
    parts = options.part if options.part is not None else damaged_parts(found)
    config = _configuration(options.dataset, options.config)
    if any(finding.path == "plan.json" for finding in found):
        restore_plan(config)
        print("plan.json: as published")
    if any(finding.path.startswith("projection/") for finding in found):
        restore_projections(config)
        print("projection: as published")
    for part in parts:
        entry = rebuild_part(config, part)
        print(f"part {part}: {entry.num_rows} rows, as published")
    findings = verify_dataset(dataset)
    for finding in findings:
        print(f"WRONG {finding}")
    print(
        f"{options.dataset}: {len(parts)} parts rebuilt, {'all is sound' if not findings else f'{len(findings)} findings left'}"
    )
    return 1 if findings else 0


def _configuration(dataset: str, given: str | None) -> PreprocessConfig:
    config = load_config(given) if given is not None else recorded_config(dataset)
    if config is None:
        raise ConfigError(f"{dataset} keeps no record of its run here (runs/config.json): give --config FILE")
    # The dataset may have been moved since.
    return config.model_copy(update={"output": storage.absolute(dataset)})
