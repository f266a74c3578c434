"""The run folder: one run at a time, whatever lies in the way is told by name, and what a terminal shows."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.train_config import TrainConfig
from tests.unit.train.support import make_config, read_metrics
from xtok.errors import StorageError, TrainingError
from xtok.train.export import export_checkpoint
from xtok.train.metrics_log import MetricsLog
from xtok.train.output_lock import is_being_written, only_writer, reason_to_wait
from xtok.train.run_record import begin_run

QUICK: dict[str, Any] = {
    "objectives": {"distill": None, "ce": 1.0},
    "steps": 1,
    "batch_tokens": 200,
    "checkpoint": {"every_steps": None},
}

HOLD = """
import sys, time
from xtok.train.output_lock import only_writer
with only_writer(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time(world: dict[str, Any], tmp_path: Path, run: Any) -> None:
    """A second run neither starts nor moves the first one's files; after its end, however that came, the folder is free."""
    document = make_config(world, tmp_path / "run", **QUICK)
    config = TrainConfig.model_validate(document)
    output = config.output
    assert not is_being_written(output)
    with subprocess.Popen([sys.executable, "-c", HOLD, output], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert is_being_written(output)
        for start in (lambda: run(document), lambda: begin_run(config)):
            with pytest.raises(TrainingError, match=r"another run is training into .*/run: wait for its end"):
                start()
        assert "the run before is still training" in str(reason_to_wait(config)), "what a schedule starts waits for the next time"
        assert not (tmp_path / "run/run.json").exists()
        other.kill()
        other.wait()
    assert reason_to_wait(config) is None
    with only_writer(output):
        assert is_being_written(output)
    assert run(document)["step"] == 1
    unpublished = TrainConfig.model_validate({**document, "dataset": str(tmp_path)})
    assert reason_to_wait(unpublished) == f"no manifest is published in {tmp_path} yet"


@pytest.mark.parametrize(
    "in_the_way",
    ["", "checkpoints", "metrics.jsonl/", "tensorboard", "export", "export/student"],
    ids=lambda name: name or "output",
)
def test_what_lies_in_the_way_is_named(world: dict[str, Any], tmp_path: Path, run: Any, in_the_way: str) -> None:
    place = tmp_path / "run" / in_the_way
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir() if in_the_way.endswith("/") else place.write_text("in the way")
    with pytest.raises(StorageError) as caught:
        run(make_config(world, tmp_path / "run", **QUICK))
    assert str(place) in str(caught.value)


def test_a_metrics_file_with_foreign_lines_is_gone_on_with(tmp_path: Path) -> None:
    good = '{"step": 1, "kind": "train"}\n'
    foreign = '[1]\n{"step": "x"}\n{"step": null}\n{"loss": 1}\n7\n\n{"step": 1.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes((good + foreign).encode() + b"\x00\xff\n" + b'{"step": 9, "kind": "train"}\n')
    MetricsLog(str(tmp_path), num_steps=9, first_step=2, is_main=True).close()
    assert (tmp_path / "metrics.jsonl").read_text() == good


def test_a_best_that_names_no_step(world: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig.model_validate(make_config(world, tmp_path, **QUICK))
    (tmp_path / "checkpoints").mkdir()
    for text in ("{", "[]", '{"loss": 1.0}', '{"step": null}'):
        (tmp_path / "checkpoints/best.json").write_text(text)
        with pytest.raises(TrainingError, match=r"best.json names no step"):
            export_checkpoint(config, checkpoint="best")


def all_of(terminal: int) -> str:
    """What was written to a terminal whose other end is closed."""
    read = b""
    with os.fdopen(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):  # its way to say that this is the end
        while block := stream.read(1 << 16):
            read += block
    return read.decode()


def test_a_terminal_shows_loss_rate_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real terminal; the cursor is hidden while it runs and shown at its end. A file gets nothing."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setenv("TERM", "xterm")
        log = MetricsLog(str(tmp_path), num_steps=40, first_step=10, is_main=True)
        log.write(0, {"loss": 3.0}, kind="evaluation")
        for step in (11, 12):
            log.write(step, {"loss": 2.5, "tokens_per_s": 1234.5})
        log.close()
    shown = all_of(ours)
    for part in ("loss 2.5000", "1,234 tokens/s", "12/40", "0:00:"):
        assert part in shown, shown
    assert shown.index("\x1b[?25l") < shown.rindex("\x1b[?25h")
    with (tmp_path / "stderr").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        log = MetricsLog(str(tmp_path), num_steps=40, first_step=12, is_main=True)
        log.write(13, {"loss": 2.5, "tokens_per_s": 1234.5})
        log.close()
    assert (tmp_path / "stderr").read_text() == ""
    assert [line["step"] for line in read_metrics(tmp_path)] == [11, 12, 13]
