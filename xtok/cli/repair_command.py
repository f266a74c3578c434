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
from xtok.cli.visible import visible
from xtok.errors import ConfigError, DamagedPartError
from xtok.shards.pipeline import rebuild_parts, restore_manifest, restore_plan, restore_projections
from xtok.shards.pool import WorkerPool
from xtok.shards.read import Dataset, open_dataset
from xtok.shards.verify import Finding, damaged_parts, verify_dataset

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok repair`."""
    parser.add_argument("dataset", help="folder or URL of a published dataset")
    parser.add_argument("--part", type=int, action="append", metavar="N", help="rebuild this part (default: all damaged)")
    parser.add_argument("--config", metavar="FILE", help="the configuration it was made with (default: the one the run recorded)")


def run(options: argparse.Namespace) -> int:
    """Repair; 0 when the dataset is sound afterwards."""
    dataset, findings = _examined(options)
    wrong = {finding.path for finding in findings}
    parts = options.part if options.part is not None else damaged_parts(findings)
    if parts or any(path == "plan.json" or path.startswith("projection/") for path in wrong):
        config = _configuration(options.dataset, options.config)
        with WorkerPool(config.workers) as pool:
            if "plan.json" in wrong:
                restore_plan(config, runner=pool)
                print("plan.json: as published")
            if any(path.startswith("projection/") for path in wrong):
                restore_projections(config, runner=pool)
                print("projection: as published")
            for part, entry in zip(parts, rebuild_parts(config, parts, runner=pool) if parts else [], strict=True):
                print(f"part {part}: {entry.num_rows} rows, as published")
        findings = verify_dataset(dataset)
    for finding in findings:
        print(f"WRONG {visible(str(finding))}")
    print(
        f"{options.dataset}: {len(parts)} parts rebuilt, {'all is sound' if not findings else f'{len(findings)} findings left'}"
    )
    return 1 if findings else 0


def _examined(options: argparse.Namespace) -> tuple[Dataset, list[Finding]]:
    """The dataset and what is wrong with it, once its manifest is one to go by."""
    try:
        dataset = open_dataset(options.dataset)
        findings = verify_dataset(dataset)
        if not any(finding.path == "manifest.json" for finding in findings):
            return dataset, findings
    except DamagedPartError:  # no manifest at all
        pass
    restore_manifest(_configuration(options.dataset, options.config))
    print("manifest.json: written anew from plan.json and the parts")
    dataset = open_dataset(options.dataset)
    return dataset, verify_dataset(dataset)


def _configuration(dataset: str, given: str | None) -> PreprocessConfig:
    config = load_config(given) if given is not None else recorded_config(dataset)
    if config is None:
        raise ConfigError(f"{dataset} keeps no record of its run here (runs/config.json): give --config FILE")
    # The dataset may have been moved since.
    return config.model_copy(update={"output": storage.absolute(dataset)})
