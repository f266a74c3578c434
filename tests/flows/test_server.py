"""The server's own start: what can be told at once is. And that the tests' own `infra/up` ends with them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.flows.conftest import REPOSITORY, clean_environment, free_port, is_running, wait_for

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
