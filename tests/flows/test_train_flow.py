"""The flow `train` as users start it: by itself with nothing set up, and as a scheduled deployment of `infra/up`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.conftest import ServedPrefect, clean_environment, wait_for
from tests.flows.test_preprocess_flow import living, run_id_of
from tests.unit.train.support import make_config, read_metrics, shared_world

pytestmark = pytest.mark.flow

QUICK: dict[str, Any] = {"objectives": {"distill": None, "ce": 1.0, "draft": 0.5}, "teachers": [], "steps": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared_world(tmp_path_factory.mktemp)


def start_alone(folder: Path, document: dict[str, Any], name: str = "train.yaml", **variables: str) -> subprocess.Popen[str]:
    """`python -m flows.train` in `folder`, with no Prefect setting and a home that has never seen Prefect."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(document))
    return subprocess.Popen(
        [sys.executable, "-m", "flows.train", "--config", name],
        cwd=folder,
        env=clean_environment() | {"HOME": str(home), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_alone_with_nothing_set_up(world: dict[str, Any], tmp_path: Path, kept_database: dict[str, str]) -> None:
    """It leaves student, draft, report and plot; the second time it says that there is nothing to do."""
    evaluation = {"dataset": world["held_out"], "every_steps": 2}
    document = make_config(world, Path("run"), **QUICK, evaluation=evaluation)
    stdout, stderr = start_alone(tmp_path, document, **kept_database).communicate(timeout=180)
    assert stderr == ""
    assert stdout.splitlines() == [
        "trained to step 4; report: run/report.md",
        f"student: {tmp_path}/run/export/student",
        f"draft: {tmp_path}/run/export/draft",
    ]
    report = (tmp_path / "run/report.md").read_text()
    assert "![losses and acceptance](training.png)" in report
    assert (tmp_path / "run/training.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "train.yaml", "run"}

    again = start_alone(tmp_path, document, **kept_database)  # side by side with a mistake
    wrong = start_alone(tmp_path, {**document, "dataset": "run", "output": "other"}, name="wrong.yaml", **kept_database)
    stdout, stderr = again.communicate(timeout=180)
    assert (again.returncode, stderr) == (0, "")
    assert stdout.startswith("nothing to do: no new manifest was published in ")
    stdout, stderr = wrong.communicate(timeout=180)
    assert (wrong.returncode, stdout) == (1, "")
    assert re.match(r"UnpublishedDatasetError: .*/run has no manifest.json", stderr)


@pytest.mark.slow
def test_killed_and_started_again(world: dict[str, Any], tmp_path: Path, kept_database: dict[str, str]) -> None:
    """After `kill -9` of the flow no rank and no server lives on, and the next launch goes on from the last checkpoint."""
    document = make_config(world, Path("run"), **{**QUICK, "steps": 300}, checkpoint={"every_steps": 1})
    process = start_alone(tmp_path, document, **kept_database)
    wait_for(lambda: any((tmp_path / "run/checkpoints").glob("step-*")), seconds=120, what="a first checkpoint")
    commands = [" ".join(member.cmdline()) for member in living(tmp_path)]
    assert sum("-m xtok.train " in command for command in commands) == 1, commands
    process.kill()
    process.communicate()
    wait_for(lambda: not living(tmp_path), seconds=10, what="the end of all that the killed run started")
    reached = max(line["step"] for line in read_metrics(tmp_path / "run"))
    assert reached < 300
    again = start_alone(tmp_path, document, **kept_database)
    wait_for(
        lambda: max((line["step"] for line in read_metrics(tmp_path / "run")), default=0) > reached,
        seconds=120,
        what="a step beyond",
    )
    again.kill()
    again.communicate()
    wait_for(lambda: not living(tmp_path), seconds=10, what="the end of all that the second run started")
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, steps[-1] + 1)), "no step twice, none missing"


def test_the_scheduled_deployment(served: ServedPrefect, world: dict[str, Any], tmp_path: Path) -> None:
    wanted = {"deployments": {"name": {"any_": ["train"]}}}
    [deployment] = wait_for(lambda: served.post("/deployments/filter", wanted), seconds=60, what="the second deployment")
    assert [schedule["schedule"]["cron"] for schedule in deployment["schedules"]] == ["0 4 * * *"]
    document = json.dumps(make_config(world, tmp_path / "run", **QUICK))

    run = served.finished_run(run_id_of(served.command("deployment", "run", "train", "--param", f"config={document}")))
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    artifacts = {a["key"]: a for a in served.post("/artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})}
    assert artifacts["train-progress"]["data"] == 100.0
    assert [row["step"] for row in json.loads(artifacts["train-metrics"]["data"])] == [1, 2, 3, 4]
    report = artifacts["train-report"]["data"]
    assert f"{tmp_path}/run/training.png" in report
    assert f"- student: `{tmp_path}/run/export/student`" in report

    parameters = {"parameters": {"config": json.loads(document)}}
    again = served.finished_run(served.post(f"/deployments/{deployment['id']}/create_flow_run", parameters)["id"])
    assert again["state_type"] == "COMPLETED", again["state"]["message"]

    def says_so() -> bool:  # messages are sent in batches, the last ones after the end
        lines = served.post("/logs/filter", {"logs": {"flow_run_id": {"any_": [again["id"]]}}})
        return any("nothing to do: no new manifest was published" in line["message"] for line in lines)

    wait_for(says_so, seconds=30, what="the message that there is nothing to do")
    assert not any(
        "launch" in line["name"] for line in served.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [again["id"]]}}})
    )
