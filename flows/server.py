"""Prefect's server as a child process that never outlives us.

`private_server` gives a run with nothing set up a server of its own, on a free port of 127.0.0.1, its SQLite file in a temporary
folder, both gone at the end, so that neither a user's own Prefect nor another run is ever touched. Creating Prefect's tables takes
longer (10 s) than most runs on small data, so the empty database is kept in the user's cache folder, one file per Prefect version.

    python -m flows.server --port 4200        a lasting server, state in $PREFECT_HOME; `infra/up` starts it

After `kill -9` of the process that started it the server ends itself: it watches for that from its first moment.
"""

from __future__ import annotations

from flows.environment import SET_BY_USER, home_variables  # before Prefect is imported anywhere

# isort: split
import argparse
import atexit
import contextlib
import http.client
import importlib.metadata
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from flows.lifetime import end_with_parent
from xtok.errors import ConfigError, XtokError

__all__ = ["PrivateServer", "main", "prepare_lone_run", "private_server", "wait_until_healthy"]

HOST = "127.0.0.1"
STARTUP_SECONDS = 120.0
USERS_SERVER_SECONDS = 10.0


class PrivateServer:
    """A server process with its own folder; `api_url` is what PREFECT_API_URL must say to reach it."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, port: int) -> None:
        self.process = process
        self.home = home
        self.api_url = f"http://{HOST}:{port}/api"

    def environment(self) -> dict[str, str]:
        """The variables that point a process at this server and away from the user's own Prefect settings."""
        return {"PREFECT_API_URL": self.api_url, **home_variables(self.home)}

    def stop(self) -> None:
        """End the server and remove its folder. Safe to call twice."""
        # Nothing of it is kept, so there is nothing to end gracefully.
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def prepare_lone_run() -> None:
    """Before a flow that a user started by itself: Prefect's logs quiet, and a server of its own unless PREFECT_API_URL names one.

    Raises ConfigError when no server answers there, XtokError when the own one does not come up.
    """
    api_url = os.environ.get("PREFECT_API_URL")
    if api_url:
        try:
            wait_until_healthy(api_url, seconds=USERS_SERVER_SECONDS)
        except RuntimeError as error:
            way_out = "start that server, or unset the variable: the run then brings its own"
            raise ConfigError(f"PREFECT_API_URL: {error}; {way_out}") from error
    if "PREFECT_LOGGING_LEVEL" not in SET_BY_USER:
        # What goes wrong is told at the end, once. Prefect has read its settings already, so its loggers are told too.
        os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
        for name in ("prefect", "EventsWorker", "APILogWorker"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if not api_url:
        try:
            os.environ.update(private_server(Path(os.environ["PREFECT_HOME"])).environment())
        except RuntimeError as error:
            raise XtokError(str(error)) from error
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()


def private_server(home: Path) -> PrivateServer:
    """Start a server for this process alone, with its state in `home`, and wait until it answers.

    It is stopped when the interpreter ends (after Prefect's own threads have sent their last messages, which were registered
    later), or earlier by `stop`. RuntimeError when it does not come up.
    """
    shortcuts = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
    is_ready = copy_empty_database(home / "prefect.db")
    if is_ready:
        shortcuts["PREFECT_API_DATABASE_MIGRATE_ON_START"] = "false"
    # Bound here and inherited, so no other process can take the port between choosing it and listening on it.
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "flows.server", "--parent", str(os.getpid()), "--socket", str(listener.fileno())]
        environment = {**os.environ, **home_variables(home), **shortcuts, "PREFECT_SERVER_API_PORT": str(port)}
        # It must not ask itself, or a server of the user's, for anything.
        environment.pop("PREFECT_API_URL", None)
        # A session of its own: Ctrl-C in the terminal is for the run, which still has to tell the server how it ended.
        process = subprocess.Popen(
            [*command, "--remove-home"],
            env=environment,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = PrivateServer(process, home, port)
    atexit.register(server.stop)
    try:
        wait_until_healthy(server.api_url, process)
    except BaseException:
        server.stop()
        raise
    if not is_ready:
        keep_empty_database(home / "prefect.db")
    return server


def wait_until_healthy(api_url: str, process: subprocess.Popen[bytes] | None = None, *, seconds: float = STARTUP_SECONDS) -> None:
    """Return once the server at `api_url` answers; RuntimeError after so many seconds, or when `process` has ended."""
    # A proxy of the user's environment does not lead to a server on this machine.
    is_local = f"//{HOST}:" in api_url
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_local else []))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"Prefect's server for {api_url} ended at start with exit code {process.returncode}")
        try:
            with opener.open(f"{api_url}/health", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:  # it is there, and wants a key, which is for Prefect's client to show
                return
        except (OSError, ValueError, http.client.HTTPException):
            pass
        time.sleep(0.05)
    raise RuntimeError(f"no Prefect server answered at {api_url} within {seconds:.0f} s")


def _empty_database() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "xtok" / f"prefect-{importlib.metadata.version('prefect')}.db"


def copy_empty_database(database: Path) -> bool:
    """Put the kept empty database at `database`; False when none was kept yet."""
    try:
        shutil.copyfile(_empty_database(), database)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return False
    return True


def keep_empty_database(database: Path) -> None:
    """Keep a just created database, which holds no run yet. A cache folder that cannot be written costs only time."""
    with contextlib.suppress(OSError, RuntimeError, sqlite3.Error):
        kept = _empty_database()
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.closing(sqlite3.connect(database)) as source, contextlib.closing(sqlite3.connect(draft)) as target:
            source.backup(target)
        draft.replace(kept)


def main() -> None:
    """Run Prefect's server in this process until it is told to stop or its parent dies."""
    parser = argparse.ArgumentParser(prog="python -m flows.server", description="Prefect's server, ended with its parent.")
    parser.add_argument("--port", type=int, default=4200, help="port of 127.0.0.1 to listen on (default 4200)")
    parser.add_argument("--parent", type=int, help="this process's parent, to end with; without it the server outlives it")
    parser.add_argument("--socket", type=int, help="file descriptor of a listening socket, instead of --port")
    parser.add_argument("--remove-home", action="store_true", help="remove $PREFECT_HOME when the parent has died")
    options = parser.parse_args()
    # Listens before the seconds that Prefect takes to load: a port that is taken is told at once, and early calls wait.
    listener = socket.socket(fileno=options.socket) if options.socket is not None else _listen(options.port)
    if options.parent is not None:
        home = os.environ["PREFECT_HOME"] if options.remove_home else None
        end_with_parent(options.parent, on_death=lambda: shutil.rmtree(home, ignore_errors=True) if home else None)
    own_database = Path(os.environ["PREFECT_HOME"]) / "prefect.db" if "PREFECT_HOME" in os.environ else None
    if own_database is not None and not own_database.exists() and "PREFECT_API_DATABASE_CONNECTION_URL" not in os.environ:
        copy_empty_database(own_database)
    # Tells the application that no other server process shares this one's memory.
    os.environ["PREFECT__SERVER_FINAL"] = "1"
    os.environ.setdefault("PREFECT_SERVER_API_PORT", str(options.port))

    import uvicorn

    config = uvicorn.Config("prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        sys.exit(f"cannot listen on port {port} of {HOST} ({error.strerror}): stop what uses it, or choose another with --port")


if __name__ == "__main__":
    main()
