"""The server's own start: what can be told at once is."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.flows.conftest import REPOSITORY, clean_environment


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
