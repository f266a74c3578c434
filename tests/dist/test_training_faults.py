"""Training under torchrun as users start it: `kill -9` of the launcher or of a rank, and errors told once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.dist.harness import ranks
from tests.dist.training_runs import run_in_rank
from tests.unit.train.support import make_config, read_metrics, shared_world
from xtok.train.__main__ import is_lost_peer
from xtok.train.launch import describe_failure

pytestmark = pytest.mark.slow
STEPS, EVERY = 12, 3
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared_world(tmp_path_factory.mktemp)


class Run:
    """One launched run, its ranks known by the folder in their environment."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = Path(document["output"])
        config = folder / "train.json"
        config.write_text(json.dumps({**document, "parallel": {"device": "cpu", "processes": 2}}))
        self.mark = str(folder)
        environment = {**os.environ, "XTOK_TEST_RUN": self.mark, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xtok.train.launch", "--config", str(config)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> dict[int, psutil.Process]:
        """Living ranks of this run by number, whoever their parent is now."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and variables.get("XTOK_TEST_RUN") == self.mark and "LOCAL_RANK" in variables:
                    found[int(variables["RANK"])] = process
        return found

    def last_step(self) -> int:
        """Of the metrics written so far."""
        try:
            return max((line["step"] for line in read_metrics(self.output)), default=0)
        except (OSError, ValueError):
            return 0

    def result(self) -> dict[str, Any]:
        stdout, stderr = self.process.communicate(timeout=180)
        assert self.process.returncode == 0, stderr
        answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return answer


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def test_killed_ranks_and_launchers_cost_the_steps_since_the_last_checkpoint(world: dict[str, Any], tmp_path: Path) -> None:
    document = make_config(world, tmp_path / "run", steps=STEPS, batch_tokens=300, checkpoint={"every_steps": EVERY})

    def start() -> Run:
        return Run(tmp_path, document)

    run = start()
    wait_for(lambda: run.last_step() >= EVERY + 1, "the fourth step")
    victim = run.ranks()[1]
    victim.send_signal(signal.SIGKILL)
    _, stderr = run.process.communicate(timeout=60)
    assert run.process.returncode == 1
    assert stderr.strip().splitlines()[-1].startswith("TrainingError: rank 1 ended with exit code -9"), stderr
    assert "Connection closed" not in stderr, "the other rank's troubles are not the first error"
    assert not run.ranks(), "no rank lives on"

    run = start()
    wait_for(lambda: run.last_step() >= 2 * EVERY + 2, "the eighth step")
    run.process.kill()
    run.process.communicate()
    wait_for(lambda: not run.ranks(), "the end of the ranks of a killed launcher", seconds=5)

    run = start()  # killed while it starts, before its first step
    wait_for(lambda: len(run.ranks()) == 2, "the start of both ranks")
    run.process.kill()
    run.process.communicate()
    wait_for(lambda: not run.ranks(), "the end of the ranks of a killed launcher", seconds=5)

    result = start().result()
    assert result["step"] == STEPS
    assert result["resumed_from"] >= EVERY, "at most the steps since the last checkpoint are lost"
    # The same ranks, never disturbed and not launched by torchrun, walk the same curve.
    undisturbed = {**document, "output": str(tmp_path / "undisturbed"), "parallel": {"device": "cpu", "processes": 2}}
    ranks(2).values(run_in_rank, undisturbed, timeout_seconds=TIMEOUT)
    lines, wanted = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "undisturbed")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted]
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == [f"step-{STEPS - EVERY:08d}", f"step-{STEPS:08d}"]


def test_an_error_of_every_rank_is_told_once(world: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(world, tmp_path / "run", dataset=str(tmp_path)))
    stdout, stderr = run.process.communicate(timeout=90)
    assert run.process.returncode == 1
    assert stdout == ""
    [line] = stderr.strip().splitlines()
    assert line.startswith(f"UnpublishedDatasetError: {tmp_path} has no manifest.json")


def test_what_counts_as_a_lost_peer() -> None:
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    wrapped = ValueError("while saving")
    wrapped.__cause__ = lost
    assert is_lost_peer(lost)
    assert is_lost_peer(wrapped)
    assert not is_lost_peer(RuntimeError("expected scalar type Float but found Half"))
    assert not is_lost_peer(ValueError("a row mentions gloo"))


def test_failures_are_one_line() -> None:
    assert describe_failure(1, {"message": "ConfigError: no"}, 1) == "ConfigError: no"
    told = describe_failure(3, "Signal 9 (SIGKILL) received by PID 7", -9)
    assert told.startswith("TrainingError: rank 3 ended with exit code -9 (Signal 9")
    assert "memory" in told
