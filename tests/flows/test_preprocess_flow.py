"""The flow `preprocess` as users start it: by itself with nothing set up, and as a deployment of `infra/up`.

Real subprocesses throughout; bundled data, cut small.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.flows.conftest import REPOSITORY, ServedPrefect, clean_environment, wait_for
from xtok.shards.read import open_dataset

pytestmark = pytest.mark.flow

BUNDLED = REPOSITORY / "infra" / "bundled"


def bundled_lines(number: int) -> list[str]:
    """The first rows of the bundled texts."""
    return (BUNDLED / "udhr.jsonl").read_text(encoding="utf-8").splitlines()[:number]


def write_config(folder: Path, lines: list[str], **changes: Any) -> dict[str, Any]:
    """A configuration with relative paths, as small.yaml beside its source; returned as an object too."""
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = {
        "sources": ["texts.jsonl"],
        "student": {"tokenizer": str(BUNDLED / "tokenizers" / "chatml_bpe")},
        "teachers": [{"tokenizer": str(BUNDLED / "tokenizers" / "spm_bpe")}],
        "part_bytes": 8000,
        "workers": 2,
        "output": "aligned",
    } | changes
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    return config


def start_alone(folder: Path, config: str = "small.yaml", **variables: str) -> subprocess.Popen[str]:
    """`python -m flows.preprocess` in `folder`, with no Prefect setting and a home that has never seen Prefect."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "flows.preprocess", "--config", config],
        cwd=folder,
        env=clean_environment() | {"HOME": str(home), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(dataset: Path) -> dict[str, str]:
    """sha256 of every file of a dataset, runs/ left out."""
    files = (path for path in dataset.rglob("*") if path.is_file() and path.relative_to(dataset).parts[0] != "runs")
    return {str(path.relative_to(dataset)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_alone(folder: Path, **variables: str) -> str:
    """Run to the end; returns stdout."""
    process = start_alone(folder, **variables)
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert stderr == "", "quiet: nothing on stderr when all is well"
    return stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, kept_database: dict[str, str]) -> Path:
    """A directory where forty texts were preprocessed on one worker without interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, bundled_lines(40), workers=1)
    assert run_alone(folder, **kept_database).startswith("published aligned\n")
    return folder


def test_alone_with_nothing_set_up(undisturbed: Path) -> None:
    """It leaves the dataset, and nothing else anywhere: no Prefect home, no file in the current directory."""
    assert {path.name for path in undisturbed.iterdir()} == {"home", "texts.jsonl", "small.yaml", "aligned"}
    assert not (undisturbed / "home" / ".prefect").exists(), "the user's own Prefect was touched"
    [report] = (undisturbed / "aligned" / "runs").glob("*/report.md")
    assert "| teacher 0 | spm_bpe | byte |" in report.read_text()


@pytest.mark.slow
def test_killed_at_ten_moments(undisturbed: Path, tmp_path: Path, kept_database: dict[str, str], served: ServedPrefect) -> None:
    """After each `kill -9` nothing of ours lives on; relaunched on two workers it ends with the same bytes.

    The moments: one right after the first part was written, nine anywhere in a run: two of these with a server of its own, seven on
    a lasting one, where most of a run is its work.
    """
    write_config(tmp_path, bundled_lines(40), workers=2)
    moments = random.Random(5)
    (tmp_path / "temporary").mkdir()
    everywhere = {**kept_database, "TMPDIR": str(tmp_path / "temporary")}
    lasting = {"PREFECT_API_URL": served.api_url}
    for attempt in range(10):
        process = start_alone(tmp_path, **everywhere, **({} if attempt < 3 else lasting))
        if attempt == 0:
            wait_for(lambda: any((tmp_path / "aligned").glob("records/*")), seconds=120, what="a first part")
        else:
            time.sleep(moments.uniform(0.5, 6.0 if attempt < 3 else 4.0))
        if attempt == 0:
            commands = [" ".join(member.cmdline()) for member in living(tmp_path)]
            assert any("flows.server" in command for command in commands)
            assert any("spawn_main" in command for command in commands)
        process.kill()
        process.communicate()
        wait_for(lambda: not living(tmp_path), seconds=10, what="the end of all that the killed run started")
    run_alone(tmp_path, **everywhere)
    assert digests(tmp_path / "aligned") == digests(undisturbed / "aligned")
    assert list((tmp_path / "temporary").glob("xtok-prefect-*")) == [], "nor is anything left of the servers"


def living(folder: Path) -> list[psutil.Process]:
    """Every process, whoever its parent is now, that stems from a run started in `folder` (known by its HOME)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HOME") == str(folder / "home"):
                found.append(process)
    return found


def run_id_of(answer: subprocess.CompletedProcess[str]) -> str:
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = re.search(r"UUID: ([0-9a-f-]{36})", answer.stdout)
    assert found, answer.stdout
    return found[1]


def test_bare_name_runs_the_deployment(served: ServedPrefect, tmp_path: Path) -> None:
    """Without parameters, with a path, with an object; from the repository and from another directory. All run side by side."""
    config = write_config(served.folder, bundled_lines(20), output="by path")
    elsewhere = {"cwd": tmp_path, "PREFECT_PLUGINS_ENABLED": "1"}
    bundled = run_id_of(served.command("deployment", "run", "preprocess"))
    by_path = run_id_of(served.command("deployment", "run", "--param", "config=small.yaml", "preprocess"))
    as_object = json.dumps(config | {"output": "as object"})
    inline = run_id_of(served.command("deployment", "run", "preprocess", "--param", f"config={as_object}", **elsewhere))
    wrong = run_id_of(served.command("deployment", "run", "preprocess/preprocess", "-p", "config=no/such.yaml", **elsewhere))

    for run_id, output, num_rows in [(bundled, "out/bundled", 516), (by_path, "by path", 20), (inline, "as object", 20)]:
        run = served.finished_run(run_id)
        assert run["state_type"] == "COMPLETED", run["state"]["message"]
        assert open_dataset(str(served.folder / output)).manifest.num_rows == num_rows
    assert digests(served.folder / "by path") == digests(served.folder / "as object")

    run = served.finished_run(wrong)
    assert run["state_type"] == "FAILED"
    assert "'no/such.yaml'" in run["state"]["message"], "the path as given"
    assert str(served.folder / "no/such.yaml") in run["state"]["message"], "and in full"

    artifacts = {a["key"]: a for a in served.post("/artifacts/filter", {"flow_runs": {"id": {"any_": [by_path]}}})}
    assert artifacts["preprocess-progress"]["data"] == 100.0
    assert sum(row["rows"] for row in json.loads(artifacts["preprocess-parts"]["data"])) == 20
    assert "| teacher 0 | spm_bpe | byte |" in artifacts["preprocess-report"]["data"]
    [written] = (served.folder / "by path").glob("runs/*/report.md")
    assert artifacts["preprocess-report"]["data"] == written.read_text()
    assert "<svg" in written.with_suffix(".html").read_text()


def test_the_bare_name_needs_the_plugin(served: ServedPrefect, tmp_path: Path) -> None:
    """The other tests prove the plugin only if Prefect by itself refuses a bare name."""
    answer = served.command("deployment", "run", "preprocess", cwd=tmp_path, PREFECT_PLUGINS_ENABLED="0")
    assert answer.returncode != 0
    assert "FLOW_NAME" in answer.stdout + answer.stderr
