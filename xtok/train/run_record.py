"""What a run folder remembers of its launches, so that the same manifest is not trained on twice and another one starts afresh.

<output>/run.json            manifest and configuration of the run, whether it was finished, and what it exported
<output>/earlier/<manifest>/ what a run on an earlier manifest left, moved there when the next one starts
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from schemas.train_config import TrainConfig
from xtok import storage
from xtok.train.checkpoint import CHECKPOINT_FOLDER
from xtok.train.export import EXPORT_FOLDER
from xtok.train.identity import config_digest
from xtok.train.metrics_log import METRICS_FILE
from xtok.train.output_lock import only_writer

__all__ = ["PLOT_FILE", "REPORT_FILE", "RunRecord", "begin_run", "finish_run", "nothing_to_do"]

RECORD_FILE = "run.json"
REPORT_FILE = "report.md"
PLOT_FILE = "training.png"
EARLIER = "earlier"
MOVED = (CHECKPOINT_FOLDER, EXPORT_FOLDER, METRICS_FILE, "tensorboard", REPORT_FILE, PLOT_FILE)


@dataclass(frozen=True)
class RunRecord:
    """manifest_sha256: of the dataset's manifest. config_digest: `xtok.train.identity.config_digest`.

    results: bytes of every exported file, by its path in the output.
    """

    manifest_sha256: str
    config_digest: str
    finished: bool = False
    results: dict[str, int] = field(default_factory=dict)


def nothing_to_do(config: TrainConfig) -> str | None:
    """Why there is nothing to train: the run was finished on the very manifest that is published, and all it exported is there.

    None when there is something.
    """
    record = _read(config.output)
    if record is None or not record.finished or (record.manifest_sha256, record.config_digest) != _digests(config):
        return None
    is_there = record.results.items() <= _results(config.output).items()
    if not is_there or not _wanted(config) <= {Path(path).parts[1] for path in record.results}:
        return None  # another launch goes on from the last checkpoint, and exports anew
    return (
        f"no new manifest was published in {config.dataset} since the last run (sha256 {record.manifest_sha256[:12]}); "
        f"its results are in {config.output}"
    )


def begin_run(config: TrainConfig) -> None:
    """Remember what is being trained. What a run on another manifest left is moved to earlier/ first.

    Raises TrainingError while another run is writing there: what it leaves must not be moved away under it.
    """
    with only_writer(config.output):
        _begin(config)


def _begin(config: TrainConfig) -> None:
    record = _read(config.output)
    manifest, digest = _digests(config)
    if record is not None and record.manifest_sha256 != manifest:
        _set_aside(Path(config.output), record.manifest_sha256[:12])
    _write(config.output, RunRecord(manifest, digest))


def finish_run(config: TrainConfig) -> None:
    """Remember that the run came to its end: on the manifest that it began with, whatever was published meanwhile."""
    begun = _read(config.output) or RunRecord(*_digests(config))
    _write(config.output, replace(begun, finished=True, results=_results(config.output)))


def _results(output: str) -> dict[str, int]:
    folder = Path(output) / EXPORT_FOLDER
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(output).as_posix(): path.stat().st_size for path in files}


def _wanted(config: TrainConfig) -> set[str]:
    """The folders that this configuration exports."""
    wanted = {"student"} if config.export_student and config.trains_student else set()
    return wanted | ({"draft"} if config.trains_draft else set())


def _digests(config: TrainConfig) -> tuple[str, str]:
    return storage.sha256(storage.join(config.dataset, "manifest.json")), config_digest(config)


def _set_aside(output: Path, name: str) -> None:
    """One rename a name; killed in between, the next launch moves the rest, for the record is written after."""
    folder = output / EARLIER / name
    storage.make_folder(str(folder))
    for moved in MOVED:
        if (output / moved).exists():
            if (folder / moved).is_dir():
                shutil.rmtree(folder / moved)
            os.replace(output / moved, folder / moved)


def _read(output: str) -> RunRecord | None:
    path = storage.join(output, RECORD_FILE)
    if not storage.exists(path):
        return None
    try:
        return RunRecord(**json.loads(storage.read_bytes(path)))
    except (ValueError, TypeError):
        return None


def _write(output: str, record: RunRecord) -> None:
    storage.make_folder(output)
    storage.write_atomic(storage.join(output, RECORD_FILE), json.dumps(asdict(record), indent=1).encode())
