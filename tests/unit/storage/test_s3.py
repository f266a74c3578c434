"""`s3://` against a real server: the same contract as a disk, transient failures outlived, lasting ones told."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import pytest
from aiohttp import ClientConnectionError
from botocore.exceptions import ClientError, ReadTimeoutError

from tests.s3_server import Fault, S3Server
from xtok import storage
from xtok.errors import StorageError, StoreUnavailableError
from xtok.storage import retry

DATA = bytes(range(256)) * 50_000  # three blocks of the reader


def test_what_is_put_is_read(bucket: str, s3_server: S3Server) -> None:
    url = storage.join(bucket, "folder", "file.bin")
    assert not storage.exists(url)
    storage.write_atomic(url, b"first")
    assert storage.read_bytes(url) == b"first"
    storage.write_atomic(url, DATA)
    assert storage.exists(url)
    assert storage.exists(storage.join(bucket, "folder"))
    assert storage.size(url) == len(DATA)
    assert storage.read_bytes(url) == DATA
    assert len([method for method, _ in s3_server.requests if method == "GET"]) <= 12, "few large reads, not many small ones"
    with storage.open_read(url) as stream:
        stream.seek(len(DATA) - 5)
        assert stream.read(10) == DATA[-5:]
        stream.seek(-3, 2)
        assert stream.read() == DATA[-3:]
    with storage.open_arrow(url) as handle:
        handle.seek(300)
        assert handle.read(7) == DATA[300:307]
        assert handle.size() == len(DATA)
    assert storage.glob(storage.join(bucket, "*", "*.bin")) == [url]
    assert storage.glob(url) == [url]
    assert storage.glob(storage.join(bucket, "folder")) == []
    storage.remove(url)
    storage.remove(url)
    assert not storage.exists(url)
    assert storage.glob(storage.join(bucket, "*", "*.bin")) == []


def test_what_another_machine_writes_is_seen_at_once(bucket: str, s3_server: S3Server) -> None:
    import boto3

    url = storage.join(bucket, "a", "1.jsonl")
    storage.write_atomic(url, b"1")
    assert storage.glob(storage.join(bucket, "a", "*.jsonl")) == [url]
    client = boto3.client("s3", endpoint_url=s3_server.endpoint)
    client.put_object(Bucket=bucket.removeprefix("s3://"), Key="a/2.jsonl", Body=b"2")
    client.delete_object(Bucket=bucket.removeprefix("s3://"), Key="a/1.jsonl")
    assert storage.glob(storage.join(bucket, "a", "*.jsonl")) == [storage.join(bucket, "a", "2.jsonl")]
    assert not storage.exists(url)
    assert storage.exists(storage.join(bucket, "a", "2.jsonl"))


@pytest.mark.parametrize("fault", [500, 503, "drop", "hang"])
def test_a_store_that_comes_back_is_waited_for(bucket: str, s3_server: S3Server, fault: Fault) -> None:
    url = storage.join(bucket, "file.bin")
    times = 1 if fault == "hang" else 3
    s3_server.fails_times(fault, times)
    storage.write_atomic(url, b"x" * 1000)
    s3_server.fails_times(fault, times)
    assert storage.exists(url)
    s3_server.fails_times(fault, times, method="GET")
    assert storage.read_bytes(url) == b"x" * 1000
    s3_server.fails_times(fault, times)
    assert storage.glob(storage.join(bucket, "*.bin")) == [url]
    s3_server.fails_times(fault, times)
    storage.remove(url)
    assert not storage.exists(url)


@pytest.mark.parametrize("fault", [500, 503, "drop"])
def test_a_store_that_stays_away_is_told(bucket: str, s3_server: S3Server, fault: Fault) -> None:
    url = storage.join(bucket, "file.bin")
    storage.write_atomic(url, b"old")
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: storage.write_atomic(url, b"new"),
        "look at": lambda: storage.exists(url),
        "read": lambda: storage.read_bytes(url),
        "list": lambda: storage.glob(storage.join(bucket, "*")),
        "remove": lambda: storage.remove(url),
    }
    s3_server.fault = lambda method, path: fault
    for action, call in calls.items():
        s3_server.requests.clear()
        with pytest.raises(StoreUnavailableError, match=rf"cannot (look at|{action}) s3://.*tried 4 times in \d+ s") as caught:
            call()
        assert "Run the same command again" in str(caught.value)
        # aiohttp repeats by itself, once, what was sent over a connection that turns out to be closed.
        assert len(s3_server.requests) <= (8 if fault == "drop" else 4), "the client's own retries would multiply ours"
    s3_server.fault = lambda method, path: None
    assert storage.read_bytes(url) == b"old"


def test_what_lasts_is_told_at_once(bucket: str, s3_server: S3Server) -> None:
    with pytest.raises(StorageError, match=r"cannot read s3://.*none: .*there is no such file"):
        storage.read_bytes(storage.join(bucket, "none"))
    with pytest.raises(StorageError, match=r"cannot write s3://no-such-bucket.*bucket does not exist"):
        storage.write_atomic("s3://no-such-bucket-here/file", b"x")
    storage.write_atomic(storage.join(bucket, "folder", "file"), b"x")
    with pytest.raises(StorageError, match="folder, not a file"):
        storage.read_bytes(storage.join(bucket, "folder"))
    s3_server.fault = lambda method, path: 403
    s3_server.requests.clear()
    with pytest.raises(StorageError, match="PermissionError") as caught:
        storage.write_atomic(storage.join(bucket, "file"), b"x")
    assert not isinstance(caught.value, StoreUnavailableError)
    assert len(s3_server.requests) == 1


def test_a_file_that_shrinks_while_it_is_read_is_an_error(bucket: str) -> None:
    url = storage.join(bucket, "file.bin")
    storage.write_atomic(url, DATA)
    with storage.open_read(url) as stream:
        storage.write_atomic(url, DATA[:10])
        stream.seek(5)
        with pytest.raises(OSError, match=r"the file changed meanwhile|range"):
            stream.read()


def test_which_errors_may_pass() -> None:
    def s3_error(status: int) -> OSError:
        error = OSError(errno.EIO, "unknown code")  # what s3fs makes of a code that it does not know
        error.__cause__ = ClientError({"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": "Odd"}}, "GetObject")
        return error

    passing: list[Exception] = [s3_error(503), s3_error(500), s3_error(429), OSError(errno.EBUSY, "slow down")]
    passing += [ConnectionResetError(), TimeoutError(), ClientConnectionError(), ReadTimeoutError(endpoint_url="x", error="y")]
    assert all(map(retry.is_transient, passing))
    lasting = [
        s3_error(400),
        s3_error(403),
        FileNotFoundError(),
        PermissionError(),
        ValueError("no"),
        OSError(errno.ENOSPC, "full"),
    ]
    assert not any(map(retry.is_transient, lasting))


def test_delays_grow_are_bounded_and_differ() -> None:
    policy = retry.RetryPolicy()
    delays = [list(policy.delays()) for _ in range(20)]
    limits = [min(policy.max_delay_s, policy.first_delay_s * 2**n) for n in range(policy.attempts - 1)]
    assert all(limit / 2 <= delay <= limit for row in delays for delay, limit in zip(row, limits, strict=True))
    assert len({row[0] for row in delays}) > 1
    assert sum(limits) < 20


def test_the_last_attempt_is_not_waited_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "POLICY", retry.RetryPolicy(attempts=3, first_delay_s=0.01))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ConnectionResetError("gone")

    with pytest.raises(StoreUnavailableError, match="ConnectionResetError: gone"):
        retry.retried("read", "s3://a/b", fail)
    assert (len(calls), len(slept)) == (3, 2)
