"""One Prefect for all flow tests: `infra/up` on a free port of 127.0.0.1, in a folder of its own, stopped at the end.

Nothing of the user's Prefect is touched: settings, profile and database lie in that folder. Only processes started here are
ended here.
"""

from __future__ import annotations

import ctypes
import http
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def clean_environment() -> dict[str, str]:
    """This process's environment without any Prefect setting."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "VIRTUAL_ENV": str(BIN.parent),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def wait_for(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """The first truthy answer of `condition`; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def is_running(process: psutil.Process) -> bool:
    """Neither gone nor a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_us() -> None:
    """For `preexec_fn`: SIGTERM to the child when this process ends, `kill -9` included (on Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def start_up(folder: Path, port: int, log: Path, **variables: str) -> subprocess.Popen[str]:
    """`infra/up` in `folder`; what it prints goes to `log`. It ends with this process, whatever happens to that."""
    with log.open("w") as stream:
        return subprocess.Popen(
            [str(REPOSITORY / "infra" / "up"), "--port", str(port)],
            cwd=folder,
            env=clean_environment() | variables,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_us,
        )


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class ServedPrefect:
    """`infra/up` as started: its process, the directory it was started in, the address of its server."""

    process: subprocess.Popen[str]
    folder: Path
    api_url: str

    def command(self, *arguments: str, cwd: Path = REPOSITORY, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `prefect ARGUMENTS` as a user would, against this server."""
        environment = clean_environment() | {
            "PREFECT_API_URL": self.api_url,
            "PREFECT_HOME": str(self.folder / "home of the user"),
            **variables,
        }
        return subprocess.run(
            [str(BIN / "prefect"), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer. 503 is asked again, as Prefect's own client does: the server says so while its SQLite is locked."""
        request = urllib.request.Request(
            f"{self.api_url}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def ask() -> tuple[Any] | None:
            try:
                with opener.open(request, timeout=30) as answer:
                    return (json.load(answer),)
            except urllib.error.HTTPError as error:
                if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                return None

        return wait_for(ask, seconds=30, what=f"an answer of Prefect's server to {path}")[0]

    def finished_run(self, run_id: str, *, seconds: float = 120) -> dict[str, Any]:
        """The flow run once it has come to an end."""

        def look() -> dict[str, Any] | None:
            [run] = self.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
            return run if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

        ended: dict[str, Any] = wait_for(look, seconds=seconds, what=f"the end of flow run {run_id}")
        return ended


@pytest.fixture(scope="session")
def kept_database(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prefect's empty database is made once for all flow tests: ten seconds less for each server but the first."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, kept_database: dict[str, str]) -> Iterator[ServedPrefect]:
    """A running `infra/up`. Afterwards: SIGTERM must end it, its server and its serving process."""
    folder = tmp_path_factory.mktemp("served")
    port, log = free_port(), folder / "up.log"
    process = start_up(folder, port, log, **kept_database)
    prefect = ServedPrefect(process, folder, f"http://127.0.0.1:{port}/api")
    family: list[psutil.Process] = []
    try:

        def is_serving() -> bool:
            assert process.poll() is None, log.read_text()
            return "Serving preprocess" in log.read_text() and bool(prefect.post("/deployments/filter", {}))

        wait_for(is_serving, seconds=120, what="infra/up serving its deployments")
        family = psutil.Process(process.pid).children(recursive=True)
        yield prefect
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        wait_for(lambda: not any(map(is_running, family)), seconds=10, what=f"the end of all that infra/up started {family}")
    finally:
        for member in [*family, *([psutil.Process(process.pid)] if process.poll() is None else [])]:
            if is_running(member):
                member.kill()
