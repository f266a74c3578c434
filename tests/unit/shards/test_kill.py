"""kill -9 at random moments, relaunched each time: the bytes of an undisturbed run, and no worker left alive."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.shards.support import TOKENIZERS, config_for, frozen_files, udhr_rows, write_lines
from xtok.shards.pipeline import preprocess
from xtok.shards.read import open_dataset
from xtok.shards.verify import verify_dataset

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
from schemas.config import PreprocessConfig
from xtok.shards.pipeline import preprocess
preprocess(PreprocessConfig.model_validate_json(sys.argv[1]), progress=lambda *event: print(*event, flush=True))
"""
MARK = "XTOK_KILL_TEST"


def launch(config: str, repository: Path, mark: str) -> subprocess.Popen[str]:
    """A run as a user starts it, its processes marked in their environment."""
    environment = os.environ | {MARK: mark}
    command = [sys.executable, "-c", SCRIPT, config]
    return subprocess.Popen(
        command, cwd=repository, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def alive(mark: str) -> list[int]:
    """Processes of the run, zombies aside."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ten_kills_and_relaunches_give_the_undisturbed_bytes(tmp_path: Path, repository: Path) -> None:
    rows = udhr_rows(500)
    texts = [{"id": f"{row['id']}-{copy}", "text": row["text"]} for copy in range(5) for row in rows]
    texts[100] = {"id": texts[99]["id"], "text": "a duplicate"}
    source = write_lines(tmp_path / "in.jsonl", [*texts[:200], b"no json", *texts[200:]])
    teachers = [{"tokenizer": str(TOKENIZERS / "spm_bpe"), "context_length": 200}, "wordpiece_lower"]
    changes = {"part_bytes": 80_000, "row_group_rows": 64, "teachers": teachers, "overlength": "reject"}
    began = time.monotonic()
    preprocess(config_for(tmp_path / "whole", source, workers=1, **changes))
    undisturbed_s = time.monotonic() - began

    config = config_for(tmp_path / "out", source, workers=2, **changes).model_dump_json()
    seed = int.from_bytes(os.urandom(4), "big")
    moments = random.Random(seed)
    killed = 0
    for attempt in range(10):
        mark = f"{seed}-{attempt}"
        run = launch(config, repository, mark)
        # Each run finds more of it done, so the later moments lie earlier.
        time.sleep(moments.uniform(0.2, max(1.0, undisturbed_s / (1 + attempt / 2))))
        killed += run.poll() is None
        run.kill()
        run.communicate()
        deadline = time.monotonic() + 10
        while alive(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(mark) == [], f"seed {seed}, attempt {attempt}: a process outlived its parent"
    assert killed >= 3, f"seed {seed}: only {killed} runs were still going when they were killed"
    last = launch(config, repository, f"{seed}-last")
    _, errors = last.communicate(timeout=120)
    assert last.returncode == 0, errors
    assert frozen_files(tmp_path / "out") == frozen_files(tmp_path / "whole"), f"seed {seed}"
    assert list((tmp_path / "out" / "runs" / "staging").glob("*.tmp")) == []
    assert verify_dataset(open_dataset(str(tmp_path / "out"))) == []


def test_an_interrupt_ends_every_process(tmp_path: Path, repository: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", udhr_rows(200))
    config = json.loads(config_for(tmp_path / "out", source, workers=2, part_bytes=1_000).model_dump_json())
    run = launch(json.dumps(config), repository, "interrupt")
    deadline = time.monotonic() + 30
    while not list((tmp_path / "out").glob("records/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert alive("interrupt") == []
    assert not (tmp_path / "out" / "manifest.json").exists()
