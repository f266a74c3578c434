"""The files of infra/ that nothing here can run: they parse, and agree with each other, with pyproject.toml and with the code.

Checked: versions of images, names of pools and deployments, entry points, commands against Prefect's own command line, variables
against Prefect's own settings, telemetry off everywhere.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import PreprocessConfig
from tests.conftest import REPOSITORY

INFRA = REPOSITORY / "infra"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((INFRA / "compose" / "compose.yaml").read_text())
DOCKERFILE = (INFRA / "compose" / "Dockerfile").read_text()
KUBERNETES = list(yaml.safe_load_all((INFRA / "k8s" / "worker.yaml").read_text()))
WORK_POOL = json.loads((INFRA / "k8s" / "work-pool.json").read_text())
RAY = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
DEPLOYMENT_FILES = {
    "xtok": yaml.safe_load((INFRA / "prefect.yaml").read_text()),
    "xtok-kubernetes": yaml.safe_load((INFRA / "k8s" / "prefect.yaml").read_text()),
}
TELEMETRY_OFF = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
PREFECT_IMAGE = re.search(r"^FROM (prefecthq/prefect:(\S+)-python(\S+))$", DOCKERFILE, flags=re.MULTILINE)
assert PREFECT_IMAGE is not None


def kubernetes(kind: str, name: str) -> dict[str, Any]:
    """The object of this kind and name."""
    [found] = [each for each in KUBERNETES if each["kind"] == kind and each["metadata"]["name"] == name]
    return dict(found)


def worker_container() -> dict[str, Any]:
    [container] = kubernetes("Deployment", "xtok-worker")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environments() -> dict[str, dict[str, str]]:
    """Every set of variables that these files give to a process, by where it stands."""
    found = {
        f"compose {name}": service.get("environment", {}) for name, service in COMPOSE["services"].items() if name != "database"
    }
    found["Dockerfile"] = dict(re.findall(r"(?:ENV|\\\n) +(\w+)=(\S+)", DOCKERFILE))
    found["k8s worker"] = {each["name"]: each["value"] for each in worker_container()["env"]}
    for pool, file in DEPLOYMENT_FILES.items():
        for deployment in file["deployments"]:
            found[f"{pool} {deployment['name']}"] = deployment["work_pool"]["job_variables"]["env"]
    for role in ("head", "worker"):
        start = RAY[f"{role}_start_ray_commands"][-1]
        found[f"ray {role}"] = dict(word.split("=", 1) for word in shlex.split(start) if re.match(r"[A-Z_]+=", word))
    return found


def prefect_commands() -> Iterator[list[str]]:
    """Every `prefect ...` command line in these files, comments included."""
    for service in COMPOSE["services"].values():
        command = service.get("command", [])
        yield from (
            [command] if command[:1] == ["prefect"] else [shlex.split(line) for text in command[2:] for line in text.splitlines()]
        )
    yield worker_container()["args"]
    for path in (INFRA / "prefect.yaml", INFRA / "k8s" / "worker.yaml"):
        for line in re.findall(r"^# +(prefect .*)$", path.read_text(), flags=re.MULTILINE):
            yield shlex.split(re.split(r" {3,}", line)[0])


def test_one_prefect_version_and_it_is_one_that_pyproject_allows() -> None:
    assert PREFECT_IMAGE is not None
    image, version, python = PREFECT_IMAGE.groups()
    assert COMPOSE["services"]["server"]["image"] == image
    [wanted] = [each for each in PROJECT["dependencies"] if each.startswith("prefect>=")]
    lowest, below = re.findall(r"[\d.]+", wanted)
    assert _numbers(lowest) <= _numbers(version) < _numbers(below)
    assert _numbers(python) >= _numbers(PROJECT["requires-python"].removeprefix(">="))
    assert wanted in DOCKERFILE


def test_the_image_installs_what_the_project_names() -> None:
    [torch] = [each for each in PROJECT["optional-dependencies"]["dev"] if each.startswith("torch==")]
    assert f'"{torch}"' in DOCKERFILE
    for extra in re.findall(r"\.\[([\w,]+)\]", DOCKERFILE + (INFRA / "ray" / "cluster.yaml").read_text()):
        assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_one_image_of_ours_everywhere() -> None:
    tag = f"xtok:{PROJECT['version']}"
    assert {COMPOSE["services"][name]["image"] for name in ("deploy", "worker")} == {tag}
    assert worker_container()["image"] == f"REGISTRY/{tag}"
    for deployment in DEPLOYMENT_FILES["xtok-kubernetes"]["deployments"]:
        assert deployment["work_pool"]["job_variables"]["image"] == f"REGISTRY/{tag}"
    build = COMPOSE["services"]["worker"]["build"]
    context = (INFRA / "compose" / build["context"]).resolve()
    assert context == REPOSITORY
    assert (context / build["dockerfile"]) == INFRA / "compose" / "Dockerfile"


def test_telemetry_is_off_everywhere() -> None:
    for place, environment in environments().items():
        assert {name: environment.get(name) for name in TELEMETRY_OFF} == TELEMETRY_OFF, place
    from flows.environment import DEFAULTS

    assert TELEMETRY_OFF.items() <= DEFAULTS.items()


def test_tokenizers_threads_are_off_where_parts_run() -> None:
    environment = environments()
    places = [place for place in environment if place not in ("compose server", "k8s worker")]
    assert len(places) >= 7
    assert {environment[place].get("TOKENIZERS_PARALLELISM") for place in places} == {"false"}


def test_prefect_knows_every_variable() -> None:
    program = (
        "import flows.environment, json\n"
        "from prefect.settings import Settings\n"
        "from prefect.settings.legacy import _get_valid_setting_names\n"
        "print(json.dumps(sorted(_get_valid_setting_names(Settings))))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    known = set(json.loads(answer.stdout.splitlines()[-1]))
    for place, environment in environments().items():
        names = {name for name in environment if name.startswith("PREFECT_")}
        own_of_kubernetes = {name for name in names if name.startswith("PREFECT_INTEGRATIONS_KUBERNETES_")}
        assert names - own_of_kubernetes <= known, place


def test_pools_and_workers_have_the_same_names() -> None:
    for pool, file in DEPLOYMENT_FILES.items():
        assert {deployment["work_pool"]["name"] for deployment in file["deployments"]} == {pool}
    created, started = {}, {}
    for command in prefect_commands():
        if command[1:3] == ["work-pool", "create"]:
            created[command[3]] = command[command.index("--type") + 1]
        if command[1:3] == ["worker", "start"] and "--type" in command:
            started[command[command.index("--pool") + 1]] = command[command.index("--type") + 1]
    assert created == started == {"xtok": "process", "xtok-kubernetes": "kubernetes"}


def test_every_command_has_the_options_it_is_given() -> None:
    commands = list(prefect_commands())
    assert len(commands) >= 9
    for words in commands:
        positions = [at for at, word in enumerate(words) if word.startswith("--")]
        path = [word for word in words[1:] if not word.startswith("-")][: 1 if "deploy" in words else 2]
        text = help_of(*path)
        for at in positions:
            if words[at] != "--no-prompt":
                assert re.search(rf"{words[at]}\b", text), f"prefect {' '.join(path)} has no {words[at]}"
        for name in [word for word in words if word.startswith("infra/")]:
            assert (REPOSITORY / name).is_file()


_HELP: dict[tuple[str, ...], str] = {}


def help_of(*path: str) -> str:
    """What `prefect ... --help` prints, kept."""
    if path not in _HELP:
        program = "import flows.environment; from prefect.cli import app; app()"
        command = [sys.executable, "-c", program, *path, "--help"]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
        assert answer.returncode == 0, answer.stderr
        _HELP[path] = answer.stdout
    return _HELP[path]


@pytest.mark.parametrize("pool", DEPLOYMENT_FILES)
def test_deployments_are_those_that_are_served(pool: str) -> None:
    """Entry points exist, names are the flows' own (the bare-name plugin counts on it), schedules are written down and inactive."""
    for deployment in DEPLOYMENT_FILES[pool]["deployments"]:
        path, _, function = deployment["entrypoint"].partition(":")
        assert (REPOSITORY / path).is_file()
        assert function == deployment["name"] == Path(path).stem
        source = (REPOSITORY / path).read_text()
        assert re.search(rf'@flow\(name="{function}"', source), path
        for schedule in deployment["schedules"]:
            assert schedule["active"] is False
            assert len(schedule["cron"].split()) == 5
        assert deployment["schedules"]
    served = re.search(r"^DEPLOYED_FLOWS.* = \((.*)\)$", (REPOSITORY / "flows" / "serve.py").read_text(), flags=re.MULTILINE)
    assert served is not None
    names = {deployment["name"] for deployment in DEPLOYMENT_FILES[pool]["deployments"]}
    assert names == ({"preprocess"} if pool == "xtok-kubernetes" else set(re.findall(r"\w+", served.group(1))))


def test_the_job_template_uses_every_variable_and_no_other() -> None:
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(WORK_POOL["job_configuration"])))
    assert used == set(WORK_POOL["variables"]["properties"])
    for deployment in DEPLOYMENT_FILES["xtok-kubernetes"]["deployments"]:
        given = set(deployment["work_pool"]["job_variables"])
        assert set(WORK_POOL["variables"]["required"]) <= given <= used
    pod = WORK_POOL["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    namespace = WORK_POOL["variables"]["properties"]["namespace"]["default"]
    assert kubernetes("ServiceAccount", pod["serviceAccountName"])["metadata"]["namespace"] == namespace
    assert {each["metadata"].get("namespace", namespace) for each in KUBERNETES} == {namespace}


def test_compose_services_wait_for_what_they_need() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            assert other in services, name
            assert condition["condition"] != "service_healthy" or "healthcheck" in services[other]
    url = services["server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"]
    assert url.startswith("postgresql+asyncpg://")
    assert url.endswith(f"@database:5432/{services['database']['environment']['POSTGRES_DB']}")
    assert all(port.startswith("127.0.0.1:") for port in services["server"]["ports"]), "the server has no login"
    assert set(COMPOSE["volumes"]) == {"database"}


def test_ray_nodes_are_as_many_as_named() -> None:
    assert RAY["min_workers"] == RAY["max_workers"] == len(RAY["provider"]["worker_ips"])
    assert "ray" in str(PreprocessConfig.model_fields["engine"].annotation)


def test_the_page_names_every_folder_and_says_what_was_not_run() -> None:
    page = (INFRA / "README.md").read_text()
    for name in ("infra/compose/", "infra/k8s/", "infra/ray/", "infra/prefect.yaml", "infra/up"):
        assert name in page
        assert (REPOSITORY / name).exists()
    assert "**Not run here:**" in page


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
