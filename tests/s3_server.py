"""A real S3 server on 127.0.0.1, of this process, that can be told to misbehave.

moto's server behind a layer that answers instead of it: a status of the 500s, nothing at all within the time-out, or a connection
that is closed. What reaches it is real HTTP of the real clients.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import boto3
import pytest
import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Fault = int | Literal["hang", "drop"] | None
HANG_S = 3.0
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to fail</Message></Error>"
_CODES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied"}


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Silent."""


class S3Server:
    """endpoint: its URL. requests: (method, path) of what arrived. fault: decides for each of these what goes wrong."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.requests.append((method, path))
            fault = self.fault(method, path)
        if fault is None:
            answer: Iterable[bytes] = self._moto(environ, start_response)
            return answer
        if isinstance(fault, int):
            body = b"" if method == "HEAD" else _ERROR.format(code=_CODES[fault]).encode()
            start_response(f"{fault} told to fail", [("Content-Type", "application/xml"), ("Connection", "close")])
            return [body]
        if fault == "hang":
            time.sleep(HANG_S)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response("500 closed", [])
        return []

    def fails_times(self, fault: Fault, times: int, *, method: str | None = None) -> None:
        """The next so many requests (of one method) go wrong, then all is well."""
        left = [times]

        def decide(found: str, _: str) -> Fault:
            if left[0] and method in (None, found):
                left[0] -= 1
                return fault
            return None

        self.fault = decide

    def new_bucket(self) -> str:
        """s3:// URL of a fresh bucket."""
        name = f"xtok-{uuid.uuid4().hex[:12]}"
        boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1").create_bucket(Bucket=name)
        return f"s3://{name}"

    def stop(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def running_server() -> Iterator[S3Server]:
    """A server, and the environment by which this process and its children find it."""
    server = S3Server()
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            for name in [name for name in os.environ if name.startswith("AWS_") and name not in variables]:
                patch.delenv(name)
            s3fs.S3FileSystem.clear_instance_cache()  # a client keeps the server that it met first
            yield server
    finally:
        server.stop()


def stored_files(server: S3Server, url: str) -> dict[str, bytes]:
    """Every object under `url` but those of runs/: what must be the same bytes from run to run."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=server.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    kept = [key for key in keys if not key.startswith(f"{prefix}/runs/")]
    return {key.removeprefix(f"{prefix}/"): client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in kept}
