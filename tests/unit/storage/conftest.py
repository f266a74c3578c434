"""The S3 server that these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3_server import S3Server, running_server
from xtok.storage import remote, retry


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """Started once a module."""
    with running_server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a fresh bucket; waits cut short."""
    monkeypatch.setattr(retry, "POLICY", retry.RetryPolicy(attempts=4, first_delay_s=0.01))
    monkeypatch.setattr(remote, "_READ_TIMEOUT_S", 1)
    url = s3_server.new_bucket()
    s3_server.requests.clear()
    yield url
    s3_server.fault = lambda method, path: None
