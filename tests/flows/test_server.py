"""The server's own start: what can be told at once is. And that the tests' own `infra/up` ends with them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from flows import server
from flows.environment import clean_private_homes
from flows.server import wait_until_healthy
from tests.flows.conftest import REPOSITORY, clean_environment, free_port, is_running, wait_for
from xtok.errors import ConfigError

STARTER = """
import sys, time
from pathlib import Path
from tests.flows.conftest import start_up
print(start_up(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[1]) / "up.log").pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("command", [[sys.executable, "-m", "flows.server"], [str(REPOSITORY / "infra" / "up")]])
def test_a_taken_port_is_told_at_once(command: list[str], tmp_path: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = subprocess.run(
            [*command, "--port", port], cwd=str(tmp_path), env=clean_environment(), capture_output=True, text=True, timeout=30
        )
    assert answer.returncode != 0
    assert f"cannot listen on port {port} of 127.0.0.1" in answer.stderr
    assert "Traceback" not in answer.stderr


if sys.platform == "linux":  # elsewhere nothing tells a shell script that its parent died

    def test_what_a_killed_test_run_started_ends(tmp_path: Path) -> None:
        command = [sys.executable, "-c", STARTER, str(tmp_path), str(free_port())]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout is not None
            up = psutil.Process(int(starter.stdout.readline()))
            wait_for(lambda: len(up.children()) >= 2, seconds=30, what="infra/up's server and serving process")
            family = [up, *up.children(recursive=True)]
            starter.kill()
        try:
            wait_for(lambda: not any(map(is_running, family)), seconds=10, what=f"the end of {family}")
        finally:
            for process in filter(is_running, family):
                process.kill()
        assert not (tmp_path / ".prefect" / "served_api_url").exists()


def test_a_server_of_the_users_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "USERS_SERVER_SECONDS", 0.2)
    for url in (f"http://127.0.0.1:{free_port()}/api", "no url"):
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(ConfigError, match=rf"PREFECT_API_URL: no Prefect server answered at {url} .* unset the variable"):
            server.prepare_lone_run()


@pytest.mark.parametrize(("status", "is_there"), [(200, True), (401, True), (503, False)])
def test_a_server_that_wants_a_key_is_there(status: int, is_there: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Answer) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{answering.server_port}/api"
        if is_there:
            wait_until_healthy(url, seconds=5)
        else:
            with pytest.raises(RuntimeError, match="no Prefect server answered"):
                wait_until_healthy(url, seconds=0.2)
        answering.shutdown()


def test_homes_of_dead_runs_are_removed_and_no_others(tmp_path: Path) -> None:
    here = f"xtok-prefect-{socket.gethostname()}"
    dead, living, elsewhere = f"{here}-{2**22 + 1}-abc", f"{here}-{os.getpid()}-abc", f"xtok-prefect-other-host-{2**22 + 1}-abc"
    for name in (dead, living, elsewhere):
        (tmp_path / name / "storage").mkdir(parents=True)
    clean_private_homes(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living, elsewhere}
